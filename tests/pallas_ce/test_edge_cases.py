"""Inputs at the edge of the contract, through every backend and mode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_loss
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, library_loss, library_results
from tests.pallas_ce.problems import STORED, WAYS, Problem, make

every_way = pytest.mark.parametrize(("implementation", "backward"), WAYS)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(("implementation", "backward"), [*WAYS, *STORED])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits(scale: float, implementation: str, backward: Any) -> None:
    """Differences of logits near 1e4 carry 1e4·2^-24 of rounding each: absolute, hence 2e-3 in the probabilities.

    Where the oracle's gradients are 0, not a bit is set.
    """
    p = make(0, 16, 8, 40)
    p.arrays["logit_scale"] = np.float32(scale)
    loss, gradients = library_results(p, implementation, backward)
    want, exact = oracle.cross_entropy(p.arrays, p.labels, p.options)
    assert_close(loss, want, 1e-5, floor=0)
    assert_close(gradients, exact, 4e-3)
    assert not any(np.any(np.asarray(gradients[name])[x == 0]) for name, x in exact.items())


def _banned() -> Problem:
    """One of eight columns is never the label."""
    p = make(0, 6, 5, 8)
    p.labels[:], p.arrays["bias"] = 1, np.where(np.arange(8) == 3, np.float32(-np.inf), 0)
    return p


@every_way
def test_smoothing_over_a_minus_infinity_column_is_infinite_unless_its_weight_is_zero(
    implementation: str, backward: Any
) -> None:
    p = _banned()
    loss, gradients = library_results(p, implementation, backward, label_smoothing=0.1)
    assert float(loss) == np.inf
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))
    class_weights = np.where(np.arange(8) == 3, 0.0, 1.0)
    results = library_results(p, implementation, backward, label_smoothing=0.1, class_weights=class_weights)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(results))
    # A traced smoothing of 0 keeps the term in the program: 0·inf must still be 0.
    traced = jax.jit(lambda alpha: library_loss(p, p.arrays, implementation=implementation, label_smoothing=alpha))
    assert np.isfinite(traced(0.0))


def test_a_banned_columns_share_of_the_scales_gradient_is_zero() -> None:
    p = _banned()
    p.arrays["logit_scale"] = np.float32(0.8)
    scales = [library_results(p, name, "auto")[1]["logit_scale"] for name in ("reference", "xla")]
    assert np.isfinite(scales).all()
    assert_close(*scales, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla", "stored logits"])
def test_metrics_describe_the_call(implementation: str) -> None:
    p = make(0, 30, 6, 9)
    p.options = {"z_loss": 0.01, "label_smoothing": 0.1}
    p.arrays["token_weights"] = np.linspace(0.5, 2, 30).astype(np.float32)
    logits, counts = oracle.Logits(p.arrays), p.labels >= 0
    for reduction in ("mean", "sum", "none"):
        loss, metrics = library_loss(
            p, p.arrays, implementation=implementation, reduction=reduction, return_metrics=True
        )
        if reduction != "none":
            np.testing.assert_allclose(metrics.cross_entropy + metrics.z_loss, loss, rtol=1e-6)
        assert int(metrics.num_tokens) == counts.sum()
        np.testing.assert_allclose(metrics.accuracy, (logits.z.argmax(1) == p.labels)[counts].mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics.mean_lse, logits.lse[counts].mean(), rtol=1e-5)
    gradient = jax.grad(lambda h: library_loss(p, {**p.arrays, "hidden": h}, return_metrics=True)[1].mean_lse)
    assert not np.any(gradient(jnp.asarray(p.arrays["hidden"])))


def assert_no_row_gives_gradients_of_zero(implementation: Any, backward: Any, dtype: Any) -> None:
    """Row temperatures are read as 0 where a block holds no row, and the slope of a cap divides by them."""
    hidden, weight = jnp.ones((1, 32), dtype), jnp.full((64, 32), 0.01, dtype)

    def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return linear_loss(
            lambda row: row.lse, hidden, weight, jnp.array([-100]), temperature=jnp.array([2.0]), logit_softcap=3.0,
            implementation=implementation, backward=backward,
        )  # fmt: skip

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, weight):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_capped_row_at_a_temperature_that_does_not_count_has_gradients_of_zero(backward: Any) -> None:
    assert_no_row_gives_gradients_of_zero("xla", backward, jnp.float32)
