"""`explain` tells the truth: products, mode and its reason, and tiles; `test_compiled.py` has the memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import Explanation, explain

N, H, V = 4096, 256, 16384
MIB = 2**20
HIDDEN, WEIGHT = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, H), (V, H)))


def _xla(**options: Any) -> Explanation:
    """The same on every machine, unless an option names another implementation."""
    return explain(HIDDEN, WEIGHT, **{"implementation": "xla", **options})


@pytest.mark.parametrize(
    ("options", "gemms"),
    [
        ({"backward": "recompute"}, 4),
        ({"backward": "recompute", "differentiate": ("hidden",)}, 3),
        ({"backward": "recompute", "differentiate": ("weight",)}, 3),
        ({"backward": "recompute", "differentiate": ("bias",)}, 2),
        ({"backward": "in_forward"}, 3),
        ({"backward": "in_forward", "differentiate": ("hidden",)}, 2),
        ({"backward": "in_forward", "differentiate": ("weight",)}, 2),
        ({"backward": "in_forward", "differentiate": ("bias",)}, 1),
        ({"reduction": "none"}, 4),
        ({"implementation": "reference"}, 3),
        ({"implementation": "reference", "differentiate": ("weight",)}, 2),
        # The scale's gradient comes from the hidden product, which it then needs; the number 1 has no gradient.
        ({"backward": "in_forward", "differentiate": ("weight", "logit_scale")}, 2),
        ({"backward": "in_forward", "differentiate": ("weight", "logit_scale"), "logit_scale": 2.0}, 3),
        ({"backward": "in_forward", "differentiate": ()}, 1),
        ({"backward": "recompute", "differentiate": ()}, 1),
        ({"implementation": "reference", "differentiate": ()}, 1),
    ],
)
def test_products_are_counted_for_each_mode_and_frozen_side(options: dict[str, Any], gemms: int) -> None:
    assert _xla(bias=jax.ShapeDtypeStruct((V,), jnp.float32), **options).gemms == gemms


@pytest.mark.filterwarnings("error")
def test_arrays_of_numpy_s_own_dtypes_are_as_a_call_takes_them() -> None:
    told = explain(np.ones((4, 8)), np.ones((16, 8)), np.arange(4))
    assert told == explain(np.ones((4, 8), np.float32), np.ones((16, 8), np.float32), np.arange(4, dtype=np.int32))


def test_evaluation_has_no_backward_and_no_gradients() -> None:
    told = _xla(differentiate=())
    assert told.backward is told.alternative is None
    assert told.backward_reason == "nothing is differentiated"
    assert told.gradient_bytes == told.accumulator_bytes == 0
    assert told.scratch_bytes < told.peak_bytes < told.logits_bytes == 4 * N * V


@pytest.mark.parametrize(
    ("options", "backward", "reason"),
    [
        ({}, "in_forward", "a scalar loss: three products instead of four, within the scratch budget"),
        ({"reduction": "none"}, "recompute", "each row has a cotangent of its own, known only in the backward"),
        ({"scratch_bytes": MIB}, "recompute", "the scratch budget holds 4 rows of logits, fewer than the 64 that"),
        ({"scratch_bytes": 20_000}, "recompute", "the scratch budget holds 0 rows of logits, fewer than the 64 that"),
        ({"backward": "in_forward", "scratch_bytes": MIB}, "in_forward", "asked for by name"),
        ({"backward": "recompute"}, "recompute", "asked for by name"),
        ({"implementation": "reference"}, None, "JAX differentiates the materialised logits"),
    ],
)
def test_the_backward_mode_comes_with_its_reason(options: dict[str, Any], backward: str | None, reason: str) -> None:
    told = _xla(**options)
    assert told.backward == backward
    assert told.backward_reason.startswith(reason)
    assert (told.rows is told.columns is None) == (told.implementation == "reference")
    no_choice = options in ({"reduction": "none"}, {"scratch_bytes": 20_000}, {"implementation": "reference"})
    assert (told.alternative is None) == no_choice


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_a_smaller_scratch_budget_gives_smaller_blocks(backward: Any) -> None:
    budgets = [None, 32 * MIB, 8 * MIB, 2 * MIB, 200_000]
    told = [_xla(backward=backward, scratch_bytes=budget) for budget in budgets]
    tiles = [x.rows * x.columns for x in told if x.rows is not None and x.columns is not None]
    assert len(tiles) == len(budgets)
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[0] > 4 * tiles[-1]
    assert all(x.scratch_bytes <= budget for x, budget in zip(told[1:], budgets[1:], strict=True) if budget)
    assert [x.peak_bytes for x in told] == sorted((x.peak_bytes for x in told), reverse=True)


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_both_layouts_and_padding_are_described(vocab_axis: int) -> None:
    weight = jax.ShapeDtypeStruct((V, H) if vocab_axis == 0 else (H, V), jnp.float32)
    told = explain(HIDDEN, weight, vocab_axis=vocab_axis, vocab_size=V - 100)
    assert told.logits_bytes == 4 * N * (V - 100)
    assert told.gradient_bytes == 4 * (N * H + V * H)


def test_no_tokens_can_be_explained() -> None:
    assert explain(jax.ShapeDtypeStruct((0, H), jnp.float32), WEIGHT, implementation="xla").logits_bytes == 0


@pytest.mark.parametrize("options", [{}, {"scratch_bytes": 8 * MIB}, {"backward": "recompute", "temperature": 2.0}])
def test_the_other_mode_stands_beside_the_one_taken(options: dict[str, Any]) -> None:
    told = _xla(**options)
    assert told.alternative is not None
    other = _xla(**options | {"backward": told.alternative.backward})
    assert {told.backward, other.backward} == {"in_forward", "recompute"}
    assert told.alternative == dataclasses.replace(other, alternative=None)


@pytest.mark.parametrize("differentiate", [(), ("hidden",), ("hidden", "weight")])
def test_peaks_are_compared_with_those_of_a_program_that_stores_logits(differentiate: tuple[str, ...]) -> None:
    """Logits, their gradient and the gradients returned: what XLA plans for the plain loss."""
    n, h, v = 512, 32, 4096
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, h), (v, h))]

    def plain(hidden: Any, weight: Any) -> Any:
        log_probs = jax.nn.log_softmax(jnp.matmul(hidden, weight.T, precision="highest"))
        return -jnp.mean(log_probs[:, 7])

    places = tuple(("hidden", "weight").index(name) for name in differentiate)
    function = jax.value_and_grad(plain, places) if places else plain
    planned = jax.jit(function).lower(*given).compile().memory_analysis()
    used = planned.temp_size_in_bytes + planned.output_size_in_bytes
    told = explain(*given, differentiate=differentiate, implementation="xla").stored_bytes
    assert 0.9 <= used / told <= 1.2
