"""Gradients added to a sum where it lies: their values beside the oracle's, and what the compiled program holds."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import explain, linear_cross_entropy, linear_cross_entropy_and_gradients
from tests import compile_for_h200 as h200
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import WAYS, Problem, make, problems, small_scratch
from tests.pallas_ce.sums import assert_adds


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(("implementation", "backward"), WAYS)
@hypothesis.given(
    p=problems(low_rank=False), loss_scale=st.sampled_from([1.0, 0.3, -128.0, 0.0]), bias=st.booleans(),
    divisor=st.none() | st.integers(2, 60),
)  # fmt: skip
def test_sums_are_added_to(
    p: Problem, loss_scale: float, bias: bool, divisor: int | None, implementation: str, backward: Any
) -> None:
    """In any budget of scratch."""
    scratch = small_scratch(p, divisor) if divisor is not None and backward != "auto" else None
    assert_adds(p, loss_scale, bias, implementation=implementation, backward=backward, scratch_bytes=scratch)


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_a_scale_of_zero_and_a_nan_that_does_not_count(vocab_axis: int) -> None:
    p = make(0, 24, 8, 40, vocab_axis=vocab_axis)
    p.arrays["logit_scale"] = np.float32(0.0)
    for backward in ("in_forward", "recompute"):
        assert_adds(p, 2.0, implementation="xla", backward=backward)
        ignored = np.flatnonzero(p.labels < 0)
        hidden = p.arrays["hidden"].copy()
        hidden[ignored] = np.nan
        weight = p.arrays["weight"] if vocab_axis == 0 else p.arrays["weight"].T
        found = linear_cross_entropy_and_gradients(
            hidden, weight, p.labels, np.ones_like(weight), vocab_axis=vocab_axis, backward=backward
        )
        assert all(np.isfinite(x).all() for x in found[:3])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("scratch_bytes", [None, 30_000])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_bits_are_those_of_adding_gradients(backward: Any, scratch_bytes: int | None) -> None:
    """In_forward adds each row block's gradient, recompute the sum of all blocks'."""
    p = make(1, 72, 16, 96)
    hidden, weight, labels = p.arrays["hidden"], p.arrays["weight"], np.abs(p.labels) % 96
    options: Any = {"backward": backward, "implementation": "xla", "scratch_bytes": scratch_bytes}
    blocks = 72 // explain(hidden, weight, **options).rows
    assert blocks == (1 if scratch_bytes is None else {"in_forward": 4, "recompute": 2}[backward])
    loss = functools.partial(linear_cross_entropy, normalizer=72.0, **options)
    start = np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)
    found = linear_cross_entropy_and_gradients(hidden, weight, labels, start, normalizer=72.0, **options)
    want, (for_hidden, for_weight) = jax.value_and_grad(loss, (0, 1))(hidden, weight, labels)
    assert found.loss == want
    np.testing.assert_array_equal(found.hidden, for_hidden)
    added = [for_weight]
    if backward == "in_forward":
        added = [
            jax.grad(loss, 1)(x, weight, y)
            for x, y in zip(*(np.split(x, blocks) for x in (hidden, labels)), strict=True)
        ]
    np.testing.assert_array_equal(found.weight_sum, sum(added, start))


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("scratch_bytes", [None, 20000])
def test_a_narrow_sum_is_rounded_once(backward: Any, scratch_bytes: int | None) -> None:
    p = make(2, 48, 16, 80)
    weight, start = jnp.asarray(p.arrays["weight"], jnp.bfloat16), jnp.full((80, 16), 0.37, jnp.bfloat16)
    options: Any = {"backward": backward, "implementation": "xla", "scratch_bytes": scratch_bytes}
    given = jnp.asarray(p.arrays["hidden"], jnp.bfloat16), weight, p.labels
    wide = linear_cross_entropy_and_gradients(*given, start.astype(jnp.float32), **options)
    narrow = linear_cross_entropy_and_gradients(*given, start, **options)
    assert narrow.weight_sum.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.weight_sum, wide.weight_sum.astype(jnp.bfloat16))
    assert narrow.hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_wide_sum_keeps_its_bits(backward: Any) -> None:
    with jax.enable_x64(True):
        hidden, weight, start = jnp.ones((4, 3), jnp.float32), jnp.ones((5, 3)), jnp.full((5, 3), 1 + 1e-12)
        options: Any = {"dtype": jnp.float32, "loss_scale": 0.0, "backward": backward}
        found = linear_cross_entropy_and_gradients(hidden, weight, jnp.arange(4), start, **options)
        np.testing.assert_array_equal(found.weight_sum, start)


def test_micro_batches_in_a_scan_are_the_whole_batch() -> None:
    p = make(3, 64, 16, 96)
    hidden, labels = p.arrays["hidden"].reshape(4, 16, 16), p.labels.reshape(4, 16)
    count = (p.labels >= 0).sum()

    @jax.jit
    def accumulated(weight: Any) -> Any:
        def step(total: Any, batch: Any) -> Any:
            found = linear_cross_entropy_and_gradients(batch[0], weight, batch[1], total, normalizer=count)
            return found.weight_sum, (found.loss, found.hidden)

        return jax.lax.scan(step, jnp.zeros_like(weight), (hidden, labels))

    total, (losses, d_hidden) = accumulated(p.arrays["weight"])
    whole = jax.value_and_grad(linear_cross_entropy, (0, 1))(p.arrays["hidden"], p.arrays["weight"], p.labels)
    assert_close((losses.sum(), (d_hidden.reshape(64, 16), total)), whole, 1e-5)


def test_no_rows_and_rows_none_of_which_counts() -> None:
    weight, start = np.ones((6, 4), np.float32), np.full((6, 4), 3.0, np.float32)
    for hidden, labels in ((np.ones((0, 4), np.float32), np.zeros(0, int)), (np.ones((2, 4), np.float32), [-100] * 2)):
        found = linear_cross_entropy_and_gradients(hidden, weight, np.asarray(labels), start)
        assert found.loss == 0
        np.testing.assert_array_equal(found.weight_sum, start)
        assert not np.any(found.hidden)


def test_differentiating_it_is_an_error_that_says_what_to_do() -> None:
    weight, labels = np.ones((6, 4), np.float32), np.zeros(2, np.int32)
    with pytest.raises(NotImplementedError, match="returns gradients already"):
        jax.grad(lambda hidden: linear_cross_entropy_and_gradients(hidden, weight, labels, weight).loss)(
            jnp.ones((2, 4))
        )


@pytest.mark.nightly
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
def test_an_h200s_program_takes_the_memory_of_one_micro_batch_and_the_sum(implementation: Any, backward: Any) -> None:
    """Beside one by differentiation there is no further array of the weight's size."""
    shape = (65536, 2048)
    given = h200.arrays(
        ((4, 4096, 2048), jnp.bfloat16), (shape, jnp.bfloat16), ((4, 4096), jnp.int32), (shape, jnp.float32)
    )

    options: Any = {"implementation": implementation, "backward": backward}

    def run(hidden: Any, weight: Any, labels: Any, total: Any) -> Any:
        def step(total: Any, batch: Any) -> Any:
            found = linear_cross_entropy_and_gradients(batch[0], weight, batch[1], total, **options)
            return found.weight_sum, (found.loss, found.hidden)

        return jax.lax.scan(step, total, (hidden, labels))

    alone = jax.value_and_grad(functools.partial(linear_cross_entropy, **options), (0, 1))
    one = h200.arrays(((4096, 2048), jnp.bfloat16), given[1], ((4096,), jnp.int32))
    memory = h200.compile_for_h200(run, *given, donate_argnums=3)[0].memory_analysis()
    of_one = h200.compile_for_h200(alone, *one)[0].memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * shape[0] * shape[1]
    assert memory.temp_size_in_bytes < of_one.temp_size_in_bytes + 2 * shape[0] * shape[1]
