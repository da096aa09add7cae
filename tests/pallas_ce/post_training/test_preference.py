"""Preference losses against the published formulas, in float64."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import dpo_loss, sequence_log_probs
from tests.pallas_ce.checks import assert_close, with_gradients


def published(x: Any, kind: str, beta: float, smoothing: float) -> Any:
    """TRL's `sigmoid`, `hinge` and `ipo` of each pair: chosen, rejected, and both of the reference."""
    logits = (x[0] - x[1]) - jax.lax.stop_gradient(x[2] - x[3])
    if kind == "sigmoid":
        return (1 - smoothing) * jnp.logaddexp(0, -beta * logits) + smoothing * jnp.logaddexp(0, beta * logits)
    return jnp.maximum(0, 1 - beta * logits) if kind == "hinge" else (logits - 1 / (2 * beta)) ** 2


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
@hypothesis.given(seed=st.integers(0, 2**16), beta=st.sampled_from([0.05, 0.5]), share=st.sampled_from([0.0, 0.6, 1.0]))
def test_values_and_gradients_are_those_of_the_published_formulas(
    kind: Any, seed: int, beta: float, share: float
) -> None:
    rng = np.random.default_rng(seed)
    x = [-10 * rng.exponential(1.0, 7).astype(np.float32) for _ in range(4)]
    mask = rng.random(7) < share
    smoothing = 0.1 if kind == "sigmoid" else 0.0

    def ours(x: Any) -> Any:
        reductions: tuple[Any, ...] = ("mean", "sum", "none")
        options = {"beta": beta, "label_smoothing": smoothing, "kind": kind}
        return [dpo_loss(*x, mask, reduction=reduction, **options) for reduction in reductions]

    def exact(x: Any) -> Any:
        each = jnp.where(mask, published(x, kind, beta, smoothing), 0)
        return [jnp.sum(each) / max(mask.sum(), 1), jnp.sum(each), each]

    values, gradients = with_gradients(ours, x, lambda found: found[0])
    with jax.enable_x64(True):
        want, slopes = with_gradients(exact, [np.float64(value) for value in x], lambda found: found[0])
    assert_close(values, want, 1e-5, floor=1e-5)
    assert_close(gradients, slopes, 1e-5, floor=1e-6)


def test_extreme_margins_keep_finite_gradients() -> None:
    x = jnp.array([[1e4, -1e4], [-1e4, 1e4], [0.0, 0.0], [0.0, 0.0]])
    value, gradient = jax.value_and_grad(lambda x: dpo_loss(*x, beta=1.0))(x)
    np.testing.assert_allclose(value, 1e4, rtol=1e-6)
    assert np.all(np.isfinite(gradient))


def test_answers_that_neither_model_allows_are_no_evidence() -> None:
    impossible, x = jnp.array([-jnp.inf]), jnp.array([-1.0])
    assert dpo_loss(impossible, x, impossible, x) == dpo_loss(x, x, x, x)


def test_metrics() -> None:
    x = ([-1.0, -5.0], [-2.0, -4.0], [-1.5, -5.5], [-1.0, -4.5])
    _, metrics = dpo_loss(*(jnp.array(v) for v in x), beta=0.5, return_metrics=True)
    np.testing.assert_allclose(metrics.chosen_reward, 0.25)
    np.testing.assert_allclose(metrics.rejected_reward, -0.125)
    np.testing.assert_allclose(metrics.margin, 0.375)
    assert metrics.accuracy == 0.5


def test_sequence_log_probs_sum_or_average_what_counts() -> None:
    log_probs = jnp.array([[-1.0, -3.0, jnp.nan], [jnp.nan, jnp.inf, 0.0]])
    mask = jnp.array([[True, True, False], [False, False, False]])
    np.testing.assert_array_equal(sequence_log_probs(log_probs, mask), [-4.0, 0.0])
    np.testing.assert_array_equal(sequence_log_probs(log_probs, mask, average=True), [-2.0, 0.0])
    gradient = jax.grad(lambda x: jnp.sum(sequence_log_probs(x, mask, average=True)))(log_probs)
    np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0], [0, 0, 0]])
