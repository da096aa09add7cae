"""Losses on stored logits: what `test_contract.py` and `test_edge_cases.py`, which take them too, do not have."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import cross_entropy, mean_squared_lse
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, relative_error, with_gradients


def _both(logits: np.ndarray, cotangent: float, **options: Any) -> tuple[Any, Any]:
    """Loss and gradient of logits with random labels: ours, and the oracle's of the logits as a head's."""
    n, v = logits.shape
    labels = np.random.default_rng(1).integers(0, v, n)
    ours = with_gradients(lambda z: cross_entropy(z, labels, **options), logits, lambda value: value * cotangent)
    loss, gradients = oracle.cross_entropy({"hidden": logits, "weight": np.eye(v)}, labels, options, cotangent)
    return ours, (loss, gradients["hidden"])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_narrow_logits_is_the_exact_one_rounded(dtype: Any, smoothing: float) -> None:
    logits = (3 * np.random.default_rng(0).normal(size=(64, 500))).astype(dtype)
    (loss, gradient), (want, exact) = _both(logits, 1.0, label_smoothing=smoothing)
    rounded = exact.astype(np.float32).astype(dtype)
    assert gradient.dtype == dtype
    assert abs(float(loss) - want) <= 1e-6 * want
    assert relative_error(gradient, exact) <= 1.05 * relative_error(rounded, exact)

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


BATCH = np.random.default_rng(1).normal(size=(3, 8, 21)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(-1, 22, size=(3, 8))


def test_the_regulariser_by_itself_is_the_z_part() -> None:
    logits, labels = jnp.asarray(BATCH), jnp.asarray(LABELS)

    def part(z: Any) -> Any:
        return cross_entropy(z, labels, z_loss=1.0) - cross_entropy(z, labels)

    got = jax.value_and_grad(lambda z: mean_squared_lse(z, labels))(logits)
    assert_close(got, jax.value_and_grad(part)(logits), 1e-5, floor=1e-6)
