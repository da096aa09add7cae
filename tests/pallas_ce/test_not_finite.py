"""NaN and infinity show where plain JAX shows them, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import cross_entropy, linear_cross_entropy, selective_log_softmax
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.row import add, finalise, from_reference, merge, partial_of_tile, without_columns
from pallas_ce.statistics.table import PRIMITIVES, Partial
from tests.pallas_ce import not_finite
from tests.pallas_ce.problems import WAYS

EVERY = frozenset(PRIMITIVES)
VALUES = [np.nan, np.inf, -np.inf]
every_value = pytest.mark.parametrize("value", VALUES)
every_place = pytest.mark.parametrize("place", not_finite.PLACES)


@every_value
@every_place
@pytest.mark.parametrize(("implementation", "backward"), WAYS)
def test_losses_and_gradients(place: str, value: float, implementation: str, backward: Any) -> None:
    budget = None if implementation == "reference" else 20_000
    options = {"implementation": implementation, "backward": backward, "scratch_bytes": budget}
    not_finite.assert_as_plain_jax(place, value, **options)


@every_value
@every_place
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_statistics(place: str, value: float, implementation: str) -> None:
    budget = None if implementation == "reference" else 20_000
    not_finite.assert_statistics_as_defined(place, value, implementation=implementation, scratch_bytes=budget)


def test_one_nan_in_a_weight_is_in_the_loss_of_every_row() -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((512, 8), (1000, 8)))
    labels = np.arange(512) + 8
    weight[7, 2] = np.nan
    assert np.isnan(linear_cross_entropy(hidden, weight, labels))
    gradients = jax.grad(linear_cross_entropy, (0, 1))(hidden, weight, labels)
    assert all(np.isnan(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_with_a_nan_leaves_the_others_as_they_are(masked: bool) -> None:
    """In float16, whose dlogits need a power of two that all rows share."""
    rng = np.random.default_rng(0)
    hidden, weight = (rng.normal(size=shape).astype(np.float16) for shape in ((40, 16), (300, 16)))
    labels = np.arange(40) if not masked else np.where(np.arange(40) == 3, -100, np.arange(40))
    gradient = jax.jit(jax.grad(lambda h: 1e-4 * linear_cross_entropy(h, weight, labels, reduction="sum")))
    clean = gradient(hidden)
    hidden[3] = np.nan
    dirty = gradient(hidden)
    others = np.arange(40) != 3
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert masked or np.isnan(dirty[3]).all()
    assert not masked or not dirty[3].any()


@every_value
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_stored_logits(value: float, dtype: Any) -> None:
    z = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    z[2, 7], z[4, 5], labels = value, value, np.array([3, 1, 7, -100, 2, 5])
    z = jnp.asarray(z, dtype)

    def plain(z: jax.Array) -> jax.Array:
        z = z.astype(jnp.float32)
        return jax.nn.logsumexp(z, axis=1) - z[jnp.arange(6), np.maximum(labels, 0)]

    counts = labels >= 0
    want, back = jax.vjp(plain, z)
    (right,) = back(jnp.where(counts, 1.0, 0.0))
    for reduction in ("sum", "none"):
        ours = jax.jit(jax.value_and_grad(lambda z, r=reduction: jnp.sum(cross_entropy(z, labels, reduction=r))))
        loss, gradient = ours(z)
        assert np.isnan(loss) == np.isnan(want[counts]).any()
        assert np.isfinite(loss) == np.isfinite(want[counts]).all()
        np.testing.assert_array_equal(np.isfinite(gradient), np.isfinite(right))
        assert not gradient[3].any()
    chosen = selective_log_softmax(z, labels)
    np.testing.assert_array_equal(np.isfinite(chosen), np.isfinite(np.where(counts, want, 0)))
    np.testing.assert_array_equal(np.isnan(chosen), np.isnan(np.where(counts, want, 0)))


def test_a_weight_of_no_token_does_not_hide_a_nan() -> None:
    """0·(±inf) is 0, and 0·nan is not."""
    z = jnp.array([[0.0, jnp.nan], [0.0, 1.0], [0.0, -jnp.inf]])
    values = cross_entropy(z, jnp.array([0, 1, 1]), token_weights=jnp.array([0.0, 1.0, 0.0]), reduction="none")
    assert np.isnan(values[0])
    assert values[1] > 0
    assert values[2] == 0


@pytest.mark.parametrize("smoothing", ["class_weights", "label_smoothing"])
def test_a_nan_of_the_smoothing_is_in_the_loss(smoothing: str) -> None:
    options: dict[str, Any] = {"label_smoothing": 0.1, "class_weights": jnp.ones(4)}
    options[smoothing] = jnp.nan if smoothing == "label_smoothing" else jnp.array([1.0, jnp.nan, 1.0, 1.0])
    hidden, weight = jnp.ones((3, 2)), jnp.ones((4, 2))
    loss = jax.jit(lambda options: linear_cross_entropy(hidden, weight, jnp.zeros(3, int), **options))
    assert np.isnan(loss(options))


TILES = {
    "nothing": [-np.inf, -np.inf],
    "numbers": [1.0, 3.0],
    "larger": [7.0, 2.0],
    "nan": [2.0, np.nan],
    "nan first": [np.nan, 9.0],
    "inf": [np.inf, 1.0],
}


def _partial(values: Any, first: int) -> Partial:
    columns = jnp.arange(len(values)) + first
    u = jnp.full(len(values), 0.25)
    labels = jnp.array([0])
    return partial_of_tile(jnp.asarray([values], jnp.float32), columns, None, labels, u, EVERY)


@pytest.mark.parametrize("first", TILES)
@pytest.mark.parametrize("second", TILES)
@pytest.mark.parametrize("how", ["merged", "swapped", "added", "with nothing"])
def test_parts_are_joined_as_if_they_were_one(first: str, second: str, how: str) -> None:
    """Compiled: XLA's maxima and minima on a CPU drop NaN then."""

    @jax.jit
    def joined() -> dict[str, jax.Array]:
        a, b = _partial(TILES[first], 0), _partial(TILES[second], 2)
        if how == "added":  # measured from one number

            def measured(values: Any, at: int, part: Partial) -> Partial:
                e = jnp.exp(jnp.asarray(values, jnp.float32) - 4.0)
                return Partial(max=part.max, sum_exp=e.sum()[None], argmax=part.argmax)

            parts = measured(TILES[first], 0, a), measured(TILES[second], 2, b)
            return finalise(from_reference(add(*parts), jnp.full(1, 4.0)), EVERY)
        if how == "with nothing":
            a = merge(without_columns(a), merge(a, without_columns(a)))
        return finalise(merge(b, a) if how == "swapped" else merge(a, b), EVERY)

    found, z = joined(), jnp.asarray(TILES[first] + TILES[second], jnp.float32)
    want = {"max_logit": z.max(), "lse": jax.nn.logsumexp(z)}
    if how != "added":
        nan = bool(jnp.isnan(z).any() | jnp.isposinf(z).any())
        want |= dict.fromkeys(("entropy", "sum_sq_probs", "varentropy"), jnp.float32(np.nan if nan else 0.0))
    for name, right in want.items():
        np.testing.assert_array_equal(np.isnan(found[name][0]), np.isnan(right), err_msg=name)
        if name in ("max_logit", "lse"):
            np.testing.assert_allclose(found[name][0], right, rtol=1e-6, err_msg=name)
    assert found["argmax"][0] == jnp.argmax(z)


def test_dlogits_of_a_row_with_a_nan_are_nan_and_columns_that_are_not_valid_stay_0() -> None:
    ones = jnp.ones(2)
    coefficients = Coefficients(ones, ones, ones, ones, None, ones, ones, ones)
    logits = jnp.array([[1.0, jnp.nan, 0.0, 2.0], [1.0, 2.0, 3.0, 0.0]])
    lse = jax.nn.logsumexp(logits, axis=1)
    labels = jnp.zeros(2, jnp.int32)
    valid = jnp.array([True, True, True, False])

    @jax.jit
    def run(logits: jax.Array, lse: jax.Array) -> jax.Array:
        return coef.dlogits(coefficients, logits, lse, jnp.arange(4), valid, labels, labels, None, None)

    found = run(logits, lse)
    assert np.isnan(found[0, :3]).all()
    assert np.isfinite(found[1]).all()
    assert not found[:, 3].any()


def test_normalised_coefficients_fit_whatever_rows_hold_that_is_not_finite() -> None:
    given = Coefficients(jnp.array([1e-6, jnp.nan, jnp.inf]), target=jnp.array([-1e-6, 1.0, jnp.nan]))
    normalised, factor = jax.jit(coef.normalise)(given, 1.0)
    assert normalised.prob is not None
    assert np.isfinite(factor)
    assert 2**10 <= float(normalised.prob[0]) <= 2**13
