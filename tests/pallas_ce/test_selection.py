"""The tournament of groups against `lax.top_k` of whole rows: the same values, places and order."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_ce.streaming import selection

RARE = [-np.inf, -0.0, 0.0, 1.0]


def rows(seed: int, n: int, m: int, kinds: int) -> jax.Array:
    """Rows with many equal entries where `kinds`, how many values they draw from, is small."""
    source = np.random.default_rng(seed)
    values = np.concatenate([RARE, source.normal(size=kinds)]).astype(np.float32)
    return jnp.asarray(source.choice(values, size=(n, m)))


def assert_largest(found: Any, values: jax.Array, k: int) -> None:
    want, places = lax.top_k(values, k)
    np.testing.assert_array_equal(found.places, places)
    np.testing.assert_array_equal(found.values, want)


@hypothesis.given(data=st.data())
def test_equals_sorting_whole_rows(data: Any) -> None:
    """Short rows count as long ones, so that several rounds are played."""
    n, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 700))
    k = data.draw(st.integers(1, min(m, 40)))
    values = rows(data.draw(st.integers(0, 99)), n, m, data.draw(st.sampled_from([0, 3, 5000])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_SHORT", data.draw(st.sampled_from([1, 16, 64])))
        assert_largest(selection.largest(values, k), values, k)


@pytest.mark.parametrize("k", [1, 3, 40])
def test_nan_of_either_sign_comes_first_as_in_argmax(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lax.top_k` has a NaN with a minus sign come last, and XLA's maximum on a CPU passes over both."""
    monkeypatch.setattr(selection, "_SHORT", 16)
    values = np.array(rows(0, 5, 700, 50))
    values[1, 600] = values[2, 13] = values[3, 699] = np.nan
    values[2, 11] = values[3, 0] = values[4, 350] = -np.nan
    values[2, 12] = np.inf
    found = jax.jit(lambda values: selection.largest(values, k))(values)
    assert_largest(found, jnp.where(np.isnan(values), np.nan, values), k)
    np.testing.assert_array_equal(found.places[:, 0], jnp.argmax(values, axis=1))


@pytest.mark.parametrize(("m", "size", "k"), [(64, 32, 5), (3, 32, 96), (700, 32, 64), (40, 1, 7)])
def test_given_maxima_lead_to_the_same(m: int, size: int, k: int) -> None:
    values = rows(m, 3, m * size, 50)
    groups = values.reshape(3, m, size)
    assert_largest(selection.largest_in_groups(groups, k, groups.max(axis=2)), values, k)


def test_no_long_row_is_sorted() -> None:
    """64 of 131072 in groups of 32 with known maxima: sorts see 512 numbers at most, and 64 groups are read."""
    groups, maxima = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4096, 32), (8, 4096)))
    program = jax.make_jaxpr(lambda g, x: selection.largest_in_groups(g, 64, x))(groups, maxima)
    sorted_lengths = [e.invars[0].aval.shape[1] for e in program.eqns if e.primitive.name in ("top_k", "sort")]
    assert sorted_lengths
    assert max(sorted_lengths) == 512
