"""Losses and log-probabilities of stored logits: what `test_contract.py` and `test_edge_cases.py` do not have."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import cross_entropy, mean_squared_lse, selective_log_softmax
from tests.pallas_ce.checks import (
    assert_close,
    assert_exact_but_rounded,
    of_stored_logits,
    relative_error,
    with_gradients,
)


def _both(logits: np.ndarray, cotangent: float, **options: Any) -> tuple[Any, Any]:
    """Loss and gradient of logits with random labels, and the oracle's."""
    labels = np.random.default_rng(1).integers(0, logits.shape[1], len(logits))
    return of_stored_logits(logits, labels, cotangent, **options)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_narrow_logits_is_the_exact_one_rounded(dtype: Any, smoothing: float) -> None:
    logits = (3 * np.random.default_rng(0).normal(size=(64, 500))).astype(dtype)
    assert_exact_but_rounded(*_both(logits, 1.0, label_smoothing=smoothing))
    # An upstream scalar rounds a second time: half a unit in the last place each.
    (_, scaled), (_, exact) = _both(logits, 3.7, label_smoothing=smoothing)
    unit = np.abs(np.spacing(exact.astype(dtype)).astype(np.float64))
    assert np.all(np.abs(np.asarray(scaled, np.float64) - exact) <= 2.01 * unit)


def test_a_loss_scale_keeps_float16_gradients_from_underflowing() -> None:
    """p/N is 1e-7 here, which float16 cannot hold before the upstream scalar."""
    logits = np.random.default_rng(0).normal(size=(100_000, 16)).astype(np.float16)
    (_, gradient), (_, exact) = _both(logits, 2.0**15)
    assert_close(gradient, exact, 2e-3, floor=0)


def test_the_gradient_alone_waits_for_the_backward() -> None:
    """A scan over micro-batches would else store the logits beside it."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 9)))
    _, backward = jax.vjp(lambda z: cross_entropy(z, jnp.arange(6)), logits)
    assert [x.size for x in jax.tree.leaves(backward)].count(logits.size) == 1


@pytest.mark.parametrize(("n", "v"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens_and_no_vocabulary_give_zero(n: int, v: int, reduction: Any) -> None:
    logits, labels = jnp.zeros((n, v)), jnp.zeros(n, int)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1, "class_weights": jnp.ones(v)}
    loss, metrics = cross_entropy(logits, labels, return_metrics=True, **options)
    assert not np.any(loss)
    assert loss.shape == ((n,) if reduction == "none" else ())
    assert metrics.num_tokens == 0
    assert jax.grad(lambda z: jnp.sum(cross_entropy(z, labels, **options)))(logits).shape == (n, v)
    assert mean_squared_lse(logits, labels) == 0


def _plain(logits: Any, index: Any) -> Any:
    """In the dtype of `logits`; entries outside the vocabulary are 0."""
    log_probs = jax.nn.log_softmax(logits)
    if index.ndim == logits.ndim - 1:
        return _plain(logits, index[..., None])[..., 0]
    inside = (index >= 0) & (index < logits.shape[-1])
    return jnp.where(inside, jnp.take_along_axis(log_probs, jnp.where(inside, index, 0), axis=-1), 0)


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    leading=st.sampled_from([(1,), (7,), (2, 3), (130,)]),
    several=st.sampled_from([(), (1,), (3,)]),
    v=st.sampled_from([1, 2, 130, 20_000]),
    scale=st.sampled_from([(0.01, 0.0), (4.0, 256.0), (30.0, -1e4)]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64]),
    seed=st.integers(0, 2**16),
)
def test_values_and_gradients_are_those_of_the_exact_log_softmax(
    leading: Any, several: Any, v: int, scale: Any, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    index = rng.integers(-1, v + 1, size=leading + several)
    cotangent = rng.normal(size=index.shape)

    def weighted(value: Any) -> Any:
        return jnp.sum(value * cotangent)

    with jax.enable_x64(dtype == jnp.float64):
        logits = jnp.asarray(rng.normal(size=(*leading, v)) * scale[0] + scale[1], dtype)
        value, gradient = with_gradients(lambda z: selective_log_softmax(z, index), logits, weighted)
    with jax.enable_x64(True):
        wide = np.asarray(logits).astype(np.float64)
        found = with_gradients(lambda z: _plain(z, index), wide, weighted)
        want, exact = jax.tree.map(np.asarray, found)
    assert value.dtype == (np.float64 if dtype == jnp.float64 else np.float32)
    assert gradient.dtype == dtype
    unit = float(jnp.finfo(value.dtype).eps)
    # The sum over the row and the two differences that follow round a few times at the result's own size.
    assert_close(value, want, 0, floor=16 * unit * max(1.0, np.abs(want).max()))
    # The gradient knows the row by its log-sum-exp, whose rounding is relative to it.
    lse = np.abs(wide).max() + np.log(v)
    rounding = relative_error(exact.astype(dtype), exact)
    assert relative_error(gradient, exact) <= 1.05 * rounding + 8 * unit * max(1.0, lse) or np.abs(exact).max() < 1e-6


def test_rows_that_cannot_be_normalised_have_finite_gradients() -> None:
    logits = jnp.array([[-jnp.inf, -jnp.inf], [jnp.nan, 0.0], [-jnp.inf, 3.0]])
    index = jnp.array([0, -1, 0])
    value, gradient = jax.value_and_grad(lambda z: selective_log_softmax(z, index)[1])(logits)
    assert value == 0
    assert np.isneginf(selective_log_softmax(logits, index)[jnp.array([0, 2])]).all()
    total = jax.grad(lambda z: selective_log_softmax(z, index).sum())(logits)
    assert np.isfinite(gradient).all()
    assert np.isfinite(total).all()


@pytest.mark.parametrize(("shape", "index_shape"), [((0, 4), (0,)), ((3, 4), (3, 0)), ((3, 0), (3,)), ((3, 0), (3, 2))])
def test_nothing_to_gather_gives_nothing_or_zero(shape: Any, index_shape: Any) -> None:
    value = selective_log_softmax(jnp.zeros(shape), jnp.zeros(index_shape, int))
    assert value.shape == index_shape
    assert not value.any()
