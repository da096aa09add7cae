"""A low-rank term on the Hopper kernels, under the GPU interpreter, beside the float64 oracle's."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ce import LowRank, linear_cross_entropy
from pallas_ce.backends.mosaic_gpu import plans, recomputation
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import HeadSpec
from tests import compile_for_h200 as h200
from tests.pallas_ce.checks import assert_as_accurate_as_reference, library_results, oracle_results
from tests.pallas_ce.problems import LOGIT_OPTIONS, make


@pytest.mark.slow
@pytest.mark.usefixtures("small_backend")
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize(
    ("shape", "vocab_axis", "options"),
    [
        ((40, 48, 128, 4), 0, {}),
        ((40, 48, 128, 70), 1, {}),  # more than one step
        ((33, 40, 136, 3), 0, {"scratch_bytes": 42_000}),  # several blocks
        ((33, 48, 130, 3), 1, {"logit_softcap": 3.0}),
        ((40, 48, 128, 4), 0, {"vocab_size": 127}),
    ],
)
def test_loss_and_gradients(interpreted: Any, shape: Any, vocab_axis: int, options: Any, backward: Any) -> None:
    n, _, v, _ = shape
    labels = np.where(np.arange(n) % 5 == 4, -100, np.arange(n) % v)
    check(shape, vocab_axis, labels, backward, options)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("ignored", [0.0, 0.6])
def test_rows_that_are_skipped(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch, ignored: float, vocab_axis: int, backward: Any
) -> None:
    """Of them nothing is stored, nor of columns behind the vocabulary's end: the last of three parts is narrower."""
    n, h, v = 384, 256, 576
    monkeypatch.setattr(plans, "recompute", lambda *given: Plan(n, 256, 2**20, v, skips_rows=True))
    assert recomputation.in_place(HeadSpec(h, v, v, vocab_axis, np.dtype(jnp.bfloat16), None), n, 256)
    labels = np.where(np.arange(n) < ignored * n, -100, np.arange(n))
    check((n, h, v, 4), vocab_axis, labels, backward, {"scratch_bytes": 3 * 2**18})


def check(shape: Any, vocab_axis: int, labels: np.ndarray, backward: Any, options: Any) -> None:
    """Loss and all gradients; a padded vocabulary's `up` may hold anything there."""
    n, h, v, r = shape
    p, rng = make(0, n, h, v, vocab_axis=vocab_axis), np.random.default_rng(0)
    p.labels, p.options = labels, {name: x for name, x in options.items() if name in LOGIT_OPTIONS}
    p.arrays["up"], p.arrays["down"] = rng.normal(size=(v, r)) / np.sqrt(r), rng.normal(size=(r, h)) / np.sqrt(h)
    p.arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in p.arrays.items()}
    want = oracle_results(p)
    p.arrays["up"][options.get("vocab_size", v) :] = np.nan
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = library_results(p, "mosaic_gpu", backward, scratch_bytes=options.get("scratch_bytes"))
    assert_as_accurate_as_reference(p, got, want)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_an_h200s_program_holds_no_second_array_of_dlogits_or_hidden_states(implementation: Any, backward: Any) -> None:
    """Beside a frozen weight alone; in this problem either takes as much as the bound or more."""
    mesh = h200.h200_mesh()
    shapes = (8192, 4096), (131072, 4096), (131072, 16), (16, 4096)
    arrays = [h200.shaped(mesh, shape, jnp.bfloat16) for shape in shapes]
    labels = h200.shaped(mesh, (8192,), jnp.int32)

    def temporary(differentiate: tuple[int, ...], *arrays: Any) -> int:
        def loss(labels: Any, hidden: Any, weight: Any, *term: Any) -> Any:
            head = LowRank(weight, *term) if term else weight
            return linear_cross_entropy(hidden, head, labels, implementation=implementation, backward=backward)

        program = jax.value_and_grad(loss, differentiate)
        return int(h200.compile_for_h200(program, labels, *arrays)[0].memory_analysis().temp_size_in_bytes)

    assert temporary((1, 3, 4), *arrays) - temporary((1,), *arrays[:2]) < 64 * 2**20
