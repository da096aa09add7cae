"""From cotangents to the gradient of the logits: the formula, its normalisation by powers of two, its invariance."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.statistics.gradient import (
    Coefficients,
    dlogits,
    each_once,
    exponent_above,
    normalise,
    power_of_two,
)

N, V = 6, 17
COLUMNS = jnp.arange(V, dtype=jnp.int32)
LABELS = jnp.array([0, 3, -1, V - 1, 5, 5], jnp.int32)
U = jnp.linspace(-1, 2, V)


magnitudes = st.integers(-120, 100).map(lambda exponent: 2.0**exponent) | st.just(0.0)


@st.composite
def drawn_coefficients(draw: Any) -> Coefficients:
    """Any terms but at least one, of any magnitude and sign; B and C come with A."""
    fields: list[Any] = [None] * 6
    for i in draw(st.sets(st.sampled_from(range(6)), min_size=1)):
        signs = np.random.default_rng(i).choice([-1, 1], N)
        fields[i] = jnp.asarray(signs * draw(magnitudes) * np.linspace(0.1, 1, N), jnp.float32)
    if fields[0] is None and (fields[1] is not None or fields[2] is not None):
        fields[0] = jnp.zeros(N)
    return Coefficients(*fields)


@hypothesis.given(k=st.integers(1, 40), ids=st.integers(1, 50), seed=st.integers(0, 2**31))
def test_each_target_of_a_row_is_left_once_with_the_sum_of_its_values(k: int, ids: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, values = rng.integers(-1, ids, size=(N, k)), rng.normal(size=(N, k)).astype(np.float32)
    sums, left = map(np.asarray, each_once(jnp.asarray(values), jnp.asarray(labels)))
    for row in range(N):
        there = left[row] >= 0
        of_row, first = np.unique(labels[row], return_index=True)
        np.testing.assert_array_equal(np.flatnonzero(there), np.sort(first[of_row >= 0]))
        np.testing.assert_array_equal(left[row][there], labels[row][there])
        assert not sums[row][~there].any()
        equal = labels[row] == labels[row][:, None]
        np.testing.assert_allclose(sums[row][there], (equal * values[row].astype(np.float64)).sum(1)[there], 1e-5, 1e-5)


@hypothesis.given(coefficients=drawn_coefficients())
def test_normalised_coefficients_use_the_range_of_float16_and_lose_nothing(coefficients: Coefficients) -> None:
    normalised, factor = jax.jit(normalise)(coefficients, 2.0)
    mantissa, _ = np.frexp(factor)
    assert mantissa == 0.5  # a power of two
    given, scaled = jax.tree.leaves(coefficients), jax.tree.leaves(normalised)
    for x, y in zip(given, scaled, strict=True):
        wide = np.asarray(x, np.float64)
        normal = np.abs(wide) / float(factor) >= 2.0**-126  # smaller ones count for nothing beside the largest
        np.testing.assert_array_equal((np.asarray(y, np.float64) * float(factor))[normal], wide[normal])

    lse, log_p = jnp.zeros(N), jnp.log(jnp.linspace(1e-6, 1, V))
    formed = jax.jit(dlogits, static_argnums=8)(
        normalised, jnp.tile(log_p, (N, 1)), lse, COLUMNS, None, LABELS, LABELS, U, None
    )
    assert np.all(np.abs(formed) <= 2**13)
    largest = max(float(jnp.max(jnp.abs(x))) for x in scaled)
    if max(float(jnp.max(jnp.abs(x))) for x in given) > 2.0**-100:
        assert largest >= 2**12 / 8  # the bound adds six terms, one of them doubled by max |u|


def test_coefficients_of_zero_stay_zero_and_infinite_ones_leave_the_others_finite() -> None:
    zeros, factor = normalise(Coefficients(jnp.zeros(N), target=jnp.zeros(N)), 1.0)
    assert not np.any(zeros.prob)
    assert np.isfinite(factor)
    assert factor > 0
    given = jnp.array([1.0, -2.0, jnp.inf, -jnp.inf, jnp.nan, 0.0])
    kept, factor = normalise(Coefficients(given), 1.0)
    assert kept.prob is not None
    np.testing.assert_array_equal(kept.prob * factor, given)
    nothing, factor = normalise(Coefficients(jnp.zeros(0)), 1.0)
    assert nothing.prob is not None
    assert nothing.prob.shape == (0,)
    assert np.isfinite(factor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponents_and_powers_are_those_of_frexp_and_ldexp(dtype: Any) -> None:
    """The exponent of the largest finite one."""
    x = np.asarray(
        [1e-37, 0.1, np.nextafter(dtype(1), dtype(0)), 1, 1.5, 2, np.nextafter(dtype(8), dtype(9)), 8e37], dtype
    )
    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(exponent_above))(x)
        np.testing.assert_array_equal(found, np.frexp(x)[1])
        np.testing.assert_array_equal(power_of_two(-found, np.dtype(dtype)), np.ldexp(dtype(1), -np.frexp(x)[1]))
        assert power_of_two(jnp.int32(5000), np.dtype(dtype)) == 2.0 ** (np.finfo(dtype).maxexp - 1)
        assert power_of_two(jnp.int32(-5000), np.dtype(dtype)) == np.finfo(dtype).smallest_normal
        for nothing in ([], [0], [0, np.inf, np.nan]):
            assert exponent_above(jnp.asarray(nothing, dtype)) == 1
        assert exponent_above(jnp.asarray([3.0, -100.0, np.nan, -np.inf, np.inf], dtype)) == 7
