"""The contract on real Hopper kernels: drawn shapes and options, and what only a GPU can show."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import linear_cross_entropy, linear_row_statistics, selective_log_softmax
from tests.pallas_ce import kernel_cases
from tests.pallas_ce.checks import (
    assert_as_accurate_as_rounded_dlogits,
    library_loss,
    library_results,
    relative_error,
)
from tests.pallas_ce.problems import Problem, make, narrow_problems, readable
from tests.pallas_ce.sums import ON_GPU, PARTS, drawn_in_parts

pytestmark = pytest.mark.gpu

both_modes = pytest.mark.parametrize("backward", ["recompute", "in_forward"])


def narrow(p: Problem) -> Problem:
    """In bfloat16."""
    p.arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in p.arrays.items()}
    return p


@PARTS
def test_any_options(part: int) -> None:
    drawn_in_parts(part, 128, narrow_problems(most=ON_GPU).map(readable), "mosaic_gpu")


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize(("name", "mode"), kernel_cases.EACH)
def test_the_loss_and_its_gradients(name: str, mode: Any, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cases.check(kernel_cases.CASES[name], implementation, mode, monkeypatch)


@both_modes
@pytest.mark.parametrize(
    ("shape", "vocab_axis", "ignored", "vocab_size"),
    [
        *(((2048, 1024, 32000), vocab_axis, 0.0, None) for vocab_axis in (0, 1)),  # a model's head
        *(((1024, 4096, 8192), vocab_axis, 0.3, None) for vocab_axis in (0, 1)),  # few rows that fill the chip
        *(((2304, 512, 4096), 0, ignored, 4090) for ignored in (0.0, 0.7)),  # a little padding
        *(((4096, 2048, 8192), 0, ignored, None) for ignored in (0.0, 0.7)),  # more than a forward alone packs at once
        *(((300, 32, 64), vocab_axis, 0.0, None) for vocab_axis in (0, 1)),  # rows as long as a stored block
    ],
)
def test_a_chosen_problem(
    shape: tuple[int, int, int], vocab_axis: int, ignored: float, vocab_size: int | None, backward: str
) -> None:
    """Of few rows hidden's product is a kernel's; tiles reach a block beyond short rows, and must not come back."""
    p = narrow(make(0, *shape, vocab_axis=vocab_axis))
    p.labels[np.random.default_rng(1).random(shape[0]) < ignored] = -100
    p.options |= {} if vocab_size is None else {"vocab_size": vocab_size}
    assert_as_accurate_as_rounded_dlogits(p, library_results(p, "mosaic_gpu", backward), backward)


@both_modes
@pytest.mark.parametrize("v", [1504, 1512])
def test_slices_may_begin_anywhere(v: int, backward: Any) -> None:
    n, h = 72, 176
    rows = jax.random.normal(jax.random.key(0), (n + 1, h), jnp.bfloat16)
    parameters = jax.random.normal(jax.random.key(1), (7 + v * h,), jnp.bfloat16)
    labels = jax.random.randint(jax.random.key(2), (n,), 0, v)

    def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, backward=backward, implementation="mosaic_gpu")

    @jax.jit
    @jax.value_and_grad
    def of_slices(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        return loss(given[0][1:], given[1][7:].reshape(v, h))

    hidden, weight = rows[1:], parameters[7:].reshape(v, h)
    want, (for_hidden, for_weight) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
    got, (for_rows, for_parameters) = of_slices((rows, parameters))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    unit = float(ml_dtypes.finfo(jnp.bfloat16).eps) / 2  # XLA's own products may add in another order
    assert relative_error(for_rows[1:], for_hidden) <= unit
    assert relative_error(for_parameters[7:].reshape(v, h), for_weight) <= unit


@both_modes
def test_a_single_class_has_no_gradient(backward: str) -> None:
    p = readable(narrow(make(4, 300, 32, 1)))
    loss, gradients = library_results(p, "mosaic_gpu", backward)
    assert abs(float(loss)) <= 1e-6
    assert all(np.max(np.abs(np.asarray(g, np.float32))) <= 1e-6 for g in gradients.values())


@both_modes
def test_the_same_bits_each_time(backward: str) -> None:
    p = narrow(make(1, 3000, 256, 20000))
    kernel_cases.assert_same_bits(lambda: library_results(p, "mosaic_gpu", backward))


def test_entries_of_stored_logits_that_repeat_give_the_same_bits_each_time() -> None:
    rng = np.random.default_rng(0)
    logits, index = jnp.asarray(rng.normal(size=(512, 1000)), jnp.float32), rng.integers(0, 4, size=(512, 64))
    weights = jnp.asarray(rng.normal(size=index.shape), jnp.float32)
    gradient = jax.jit(jax.grad(lambda z: jnp.sum(weights * selective_log_softmax(z, index))))
    kernel_cases.assert_same_bits(lambda: gradient(logits))


@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_more_than_a_billion_logits(ignored: float) -> None:
    """Each thread block makes hundreds of tiles; rows end within a block."""
    p = narrow(make(6, 2500, 64, 2**19))
    p.labels[np.random.default_rng(7).random(2500) < ignored] = -100
    got = library_loss(p, p.arrays, implementation="mosaic_gpu", reduction="none")
    wide = {name: x.astype(np.float32) for name, x in p.arrays.items()}
    want = library_loss(p, wide, implementation="xla", reduction="none")
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("vocab_axis", "h", "v"), [(0, 1024, 30000), (1, 1024, 30000), (0, 2048, 40000)])
def test_a_rows_bits_are_the_same_alone_in_any_batch_and_at_any_place(vocab_axis: int, h: int, v: int) -> None:
    p = narrow(make(6, 2500, h, v, vocab_axis=vocab_axis))
    hidden, weight = p.arrays["hidden"], p.arrays["weight"] if vocab_axis == 0 else p.arrays["weight"].T
    names = ("lse", "log_prob", "entropy", "argmax")

    def statistics(places: np.ndarray) -> Any:
        given = {"vocab_axis": vocab_axis, "statistics": names, "implementation": "mosaic_gpu"}
        labels = np.arange(2500)[places]
        return jax.jit(lambda h: linear_row_statistics(h, weight, labels, **given))(hidden[places])

    whole = statistics(np.arange(2500))
    for places in (np.array([1700]), np.arange(2400, 1000, -1), np.array([2499, 0, 1700] * 50)):
        some = statistics(places)
        for name in names:
            np.testing.assert_array_equal(getattr(whole, name)[places], getattr(some, name), err_msg=name)


@both_modes
def test_adversarial_logits(backward: str) -> None:
    """Rows whose maximum lies far outside any sample of the vocabulary, ±1e4, and a common offset."""
    p = make(2, 512, 64, 5000)
    p.arrays["bias"] = np.zeros(5000, np.float32)
    p.arrays["bias"][[17, 4321]] = 1e4, -1e4
    p.arrays["bias"][100:200] = -np.inf
    p.labels[(p.labels >= 100) & (p.labels < 200)] = 17
    p.arrays = {k: x.astype(ml_dtypes.bfloat16) if k != "bias" else x for k, x in p.arrays.items()}
    loss, gradients = library_results(p, "mosaic_gpu", backward)
    want, needs_grad = library_results(p, "reference", "auto")
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for name in needs_grad:
        assert np.all(np.isfinite(np.asarray(gradients[name], np.float32)))
        assert relative_error(gradients[name], np.asarray(needs_grad[name], np.float64)) < 1e-2, name
