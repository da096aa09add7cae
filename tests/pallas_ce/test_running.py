"""Gradients added to a sum where it lies: their values beside the oracle's, and what the compiled program holds."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import LowRank, linear_cross_entropy, linear_cross_entropy_and_gradients
from tests import compile_for_h200 as h200
from tests.pallas_ce.checks import assert_close, call, oracle_results
from tests.pallas_ce.problems import WAYS, Problem, make, problems


def assert_adds(p: Problem, loss_scale: float, with_bias: bool = True, bound: float = 1e-5, **options: Any) -> None:
    """Loss, hidden's gradient and both sums beside the oracle's gradients, added in float64."""
    rng = np.random.default_rng(p.labels.size)
    before = {name: 0.1 * rng.normal(size=p.arrays[name].shape) for name in ("weight", "bias") if name in p.arrays}
    before = {name: x.astype(np.float32) for name, x in before.items()}

    @jax.jit
    def run(arrays: dict[str, Any], before: dict[str, Any]) -> Any:
        weight_sum = before["weight"] if p.vocab_axis == 0 else before["weight"].T
        given = {"bias_sum": before["bias"]} if "bias" in before and with_bias else {}
        return call(
            lambda hidden, weight, labels, **others: linear_cross_entropy_and_gradients(
                hidden, weight, labels, weight_sum, loss_scale=loss_scale, **given, **others
            ),
            p, arrays, **options,
        )  # fmt: skip

    got = run(p.arrays, before)
    loss, gradients = oracle_results(p)
    terms = float((np.abs(p.arrays["hidden"]) @ np.abs(p.arrays["weight"]).T * p.arrays.get("logit_scale", 1.0)).max())
    floor = bound / 2**7 * max(4.0, 4.0 * abs(loss), abs(terms)) * max(1.0, abs(loss_scale))
    beside = {name: max(1.0, float(np.abs(p.arrays[name]).max())) for name in ("hidden", "weight")}
    added = {name: before[name] + loss_scale * gradients[name] for name in before}
    assert_close(got.loss, loss, bound, floor)
    assert_close(got.hidden, loss_scale * gradients["hidden"], bound, floor * beside["weight"])
    weight_sum = got.weight_sum if p.vocab_axis == 0 else got.weight_sum.T
    assert_close(weight_sum, added["weight"], bound, floor * beside["hidden"])
    assert (got.bias_sum is not None) == ("bias" in before and with_bias)
    if got.bias_sum is not None:
        assert_close(got.bias_sum, added["bias"], bound, floor)


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
@hypothesis.given(p=problems(low_rank=False), loss_scale=st.sampled_from([1.0, 0.3, -128.0, 0.0]), bias=st.booleans())
def test_sums_are_added_to(p: Problem, loss_scale: float, bias: bool, implementation: str, backward: Any) -> None:
    assert_adds(p, loss_scale, bias, implementation=implementation, backward=backward)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@hypothesis.given(p=problems(low_rank=False), divisor=st.integers(2, 60))
def test_any_scratch_budget_gives_the_same_sums(p: Problem, divisor: int, backward: Any) -> None:
    (n, h), v = p.arrays["hidden"].shape, p.arrays["weight"].shape[0]
    small = max(12 * n * v // divisor, 4 * v + 12 + 24 * h)
    assert_adds(p, 0.5, implementation="xla", backward=backward, scratch_bytes=small)


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


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_bits_are_those_of_adding_a_gradient(backward: Any) -> None:
    """Of one block of rows; several are added one by one."""
    p = make(1, 64, 16, 96)
    given = p.arrays["hidden"], p.arrays["weight"], p.labels
    options: Any = {"backward": backward, "implementation": "xla"}
    start = np.random.default_rng(0).normal(size=given[1].shape).astype(np.float32)
    found = linear_cross_entropy_and_gradients(*given, start, **options)
    loss, gradients = jax.value_and_grad(lambda *x: linear_cross_entropy(*x, given[2], **options), (0, 1))(*given[:2])
    assert found.loss == loss
    np.testing.assert_array_equal(found.hidden, gradients[0])
    np.testing.assert_array_equal(found.weight_sum, start + gradients[1])


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


H, W, L = np.ones((2, 4), np.float32), np.ones((6, 4), np.float32), np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weight_sum": W.T}, ValueError, r"weight_sum has shape \(4, 6\); it must be that of weight, \(6, 4\)"),
        ({"weight_sum": W.astype(np.float16)}, TypeError, "weight_sum is float16; it must be float32"),
        ({"weight_sum": W.astype(int)}, TypeError, "weight_sum is int"),
        ({"bias_sum": np.ones(6, np.float32)}, ValueError, "bias_sum is given and bias is None"),
        ({"bias": W[:, 0], "bias_sum": W[:5, 0]}, ValueError, r"bias_sum has shape \(5,\)"),
        ({"reduction": "none"}, ValueError, "reduction='none' has no single gradient"),
        ({"loss_scale": np.ones(2)}, ValueError, "loss_scale"),
        ({"loss_scale": "1"}, TypeError, "loss_scale"),
        ({"weight": LowRank(W, W[:, :1], W[:1])}, TypeError, "weight is a LowRank"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"hidden": H, "weight": W, "labels": L, "weight_sum": W} | arguments
    with pytest.raises(error, match=words):
        linear_cross_entropy_and_gradients(**given)


def test_differentiating_it_is_an_error_that_says_what_to_do() -> None:
    def loss(hidden: Any) -> Any:
        return linear_cross_entropy_and_gradients(hidden, W, L, W).loss

    with pytest.raises(NotImplementedError, match="returns gradients already"):
        jax.grad(loss)(H)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
def test_an_h200s_program_takes_the_memory_of_one_micro_batch_and_the_sum(implementation: Any, backward: Any) -> None:
    """Beside one by differentiation there is no further array of the weight's size."""
    mesh = h200.h200_mesh()
    shape = (65536, 2048)
    given = [
        h200.shaped(mesh, *x)
        for x in (((4, 4096, 2048), jnp.bfloat16), (shape, jnp.bfloat16), ((4, 4096), jnp.int32), (shape, jnp.float32))
    ]

    def run(hidden: Any, weight: Any, labels: Any, total: Any) -> Any:
        def step(total: Any, batch: Any) -> Any:
            found = linear_cross_entropy_and_gradients(
                batch[0], weight, batch[1], total, implementation=implementation, backward=backward
            )
            return found.weight_sum, (found.loss, found.hidden)

        return jax.lax.scan(step, total, (hidden, labels))

    def alone(hidden: Any, weight: Any, labels: Any) -> Any:
        def loss(hidden: Any, weight: Any) -> Any:
            return linear_cross_entropy(hidden, weight, labels, implementation=implementation, backward=backward)

        return jax.value_and_grad(loss, (0, 1))(hidden, weight)

    one = h200.shaped(mesh, (4096, 2048), jnp.bfloat16), given[1], h200.shaped(mesh, (4096,), jnp.int32)
    memory = h200.compile_for_h200(run, *given, donate_argnums=3)[0].memory_analysis()
    of_one = h200.compile_for_h200(alone, *one)[0].memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * shape[0] * shape[1]
    assert memory.temp_size_in_bytes < of_one.temp_size_in_bytes + 2 * shape[0] * shape[1]
