"""A common offset of a row's logits changes neither its loss nor its gradient, beside the logits' own rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import (
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_row_statistics,
    selective_log_softmax,
)
from pallas_ce.statistics.row import finalise, merge, partial_of_tile
from pallas_ce.statistics.table import PRIMITIVES
from tests.pallas_ce.problems import WAYS

N, V = 16, 300
OFFSETS = [0.0, 1e2, 1e4, 1e5, 1e6, -1e6]
every_offset = pytest.mark.parametrize("offset", OFFSETS)
RNG = np.random.default_rng(0)
PLAIN = (3 * RNG.normal(size=(N, V))).astype(np.float32)
LABELS = RNG.integers(0, V, N)
CLASSES = RNG.uniform(0.5, 2, V).astype(np.float32)
OPTIONS: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "class_weights": CLASSES}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed", "classes"])


def log_probs(z: np.ndarray) -> np.ndarray:
    """In float64."""
    wide = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    found: np.ndarray = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return found


def exact(z: np.ndarray, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Each row's loss, and the gradient of their sum, of float32 logits, in float64."""
    smoothing, c = options.get("label_smoothing", 0.0), np.float64(options.get("class_weights", np.ones(V)))
    log_p = log_probs(z)
    losses = -(1 - smoothing) * c[LABELS] * log_p[np.arange(N), LABELS] - smoothing / V * log_p @ c
    p, hit = np.exp(log_p), np.eye(V)[LABELS]
    return losses, (1 - smoothing) * c[LABELS][:, None] * (p - hit) + smoothing / V * (c.sum() * p - c)


def assert_near(losses: Any, gradient: Any, z: np.ndarray, options: dict[str, Any]) -> None:
    """Within a few roundings of the distances from the maximum, which are no larger than 40, weighted by 2."""
    want, right = exact(z, options)
    np.testing.assert_allclose(losses, want, rtol=0, atol=8e-6)
    np.testing.assert_allclose(gradient, right, rtol=0, atol=2e-6)


@every_offset
@every_option
def test_stored_logits(offset: float, options: dict[str, Any]) -> None:
    z = PLAIN + np.float32(offset)
    for reduction in ("none", "sum"):

        def loss(z: Any, reduction: Any = reduction) -> Any:
            return jnp.sum(cross_entropy(z, LABELS, reduction=reduction, **options))

        assert_near(cross_entropy(z, LABELS, reduction="none", **options), jax.grad(loss)(jnp.asarray(z)), z, options)


@every_offset
@every_option
@pytest.mark.parametrize(("implementation", "backward"), WAYS)
def test_a_head_with_a_bias(offset: float, options: dict[str, Any], implementation: str, backward: Any) -> None:
    """Hidden states that each choose a column of the weight, whose products are exact; in several tiles."""
    z, hidden, weight = PLAIN + np.float32(offset), np.eye(N, dtype=np.float32), PLAIN.T
    given = {"labels": LABELS, "bias": np.full(V, offset, np.float32), "implementation": implementation, **options}
    budget = None if implementation == "reference" else 10_000

    def loss(weight: Any, **how: Any) -> Any:
        return linear_cross_entropy(hidden, weight, **given, **how, scratch_bytes=budget)

    losses = loss(weight, reduction="none")
    gradient = jax.grad(lambda w: loss(w, reduction="sum", backward=backward))(weight)
    assert_near(losses, gradient.T, z, options)


@every_offset
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_log_probabilities_of_several_tokens_and_all_that_comes_of_them(offset: float, implementation: str) -> None:
    z, hidden, weight = PLAIN + np.float32(offset), np.eye(N, dtype=np.float32), PLAIN.T
    several, bias = RNG.integers(0, V, (N, 4)), np.full(V, offset, np.float32)
    options: dict[str, Any] = {"bias": bias, "implementation": implementation}
    want = np.take_along_axis(log_probs(z), several, axis=1)
    np.testing.assert_allclose(linear_log_probs(hidden, weight, several, **options), want, rtol=0, atol=4e-6)
    np.testing.assert_allclose(selective_log_softmax(z, several), want, rtol=0, atol=4e-6)
    names = ("mean_log_prob", "entropy", "sum_sq_probs", "varentropy", "mean_logit", "lse")
    weights = CLASSES / V
    p, log_p = np.exp(log_probs(z)), log_probs(z)

    def total(weight: Any) -> Any:
        found = linear_row_statistics(hidden, weight, statistics=names, logit_weights=weights, **options)
        return jnp.sum(found.mean_log_prob + found.entropy + found.varentropy), found

    (_, found), gradient = jax.value_and_grad(total, has_aux=True)(weight)
    entropy = -(p * log_p).sum(axis=1)
    varentropy = (p * (log_p + entropy[:, None]) ** 2).sum(axis=1)
    np.testing.assert_allclose(found.mean_log_prob, log_p @ np.float64(weights), rtol=0, atol=8e-6)
    np.testing.assert_allclose(found.entropy, entropy, rtol=0, atol=4e-6)
    np.testing.assert_allclose(found.varentropy, varentropy, rtol=1e-5, atol=4e-6)
    wide = z.astype(np.float64)
    np.testing.assert_allclose(found.mean_logit, wide @ np.float64(weights), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found.lse, log_p[:, 0] * 0 + (wide - log_p)[:, 0], rtol=2e-7)
    y = log_p + entropy[:, None]
    right = weights - np.float64(weights).sum() * p - p * y + p * (y * y + 2 * y - varentropy[:, None])
    np.testing.assert_allclose(gradient.T, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", [[1.0, 5.0], [-np.inf, -np.inf], [2.0, -np.inf]])
@pytest.mark.parametrize("weights", [[0.5, 0.25, 1.0, -2.0], [0.5, 0.0, 1.0, 3.0], [1.0, -1.0, 0.5, 0.25]])
def test_weighted_sums_move_with_the_maximum(first: list[float], weights: list[float]) -> None:
    """To which columns of weight 0 add nothing, even of -inf; also from a part that has no other."""
    z, names = jnp.asarray([[*first, 40.0, 7.0]], jnp.float32), frozenset(PRIMITIVES)

    @jax.jit
    def joined() -> dict[str, jax.Array]:
        parts = (
            partial_of_tile(z[:, i : i + 2], jnp.arange(i, i + 2), None, None, jnp.asarray(weights[i : i + 2]), names)
            for i in (0, 2)
        )
        return finalise(merge(*parts), names)

    wide, u = np.asarray(z, np.float64)[0], np.asarray(weights)
    with np.errstate(invalid="ignore"):
        want = np.where(u != 0, u * wide, 0).sum()
        mean_log_prob = want - u.sum() * np.log(np.exp(wide).sum())
    np.testing.assert_allclose(joined()["mean_logit"][0], want, rtol=1e-6)
    np.testing.assert_allclose(joined()["mean_log_prob"][0], mean_log_prob, rtol=1e-6)
