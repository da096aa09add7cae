"""Losses and log-probabilities of stored logits: what contract, edge cases and offsets do not have."""

from typing import Any

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
