"""`linear_top_k` and its tournament of groups against `lax.top_k` of stored logits: exact, ties to the lowest id."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pallas_ce import linear_top_k
from pallas_ce.streaming import selection
from tests.pallas_ce import oracle
from tests.pallas_ce.problems import make
from tests.pallas_ce.streamed import assert_top_k, exact_head, stored_logits


@hypothesis.given(data=st.data())
def test_equals_the_top_k_of_stored_logits(data: Any) -> None:
    n, h, v = (data.draw(st.integers(1, top)) for top in (20, 6, 90))
    arrays = exact_head(data.draw(st.integers(0, 99)), n, h, v, data.draw(st.sampled_from([0.0, 0.5, 0.95])))
    vocab_size = data.draw(st.integers(1, v))
    k = data.draw(st.integers(1, vocab_size))
    options = {"vocab_size": vocab_size, "logit_softcap": data.draw(st.sampled_from([None, 2.0]))}
    axis = data.draw(st.sampled_from([0, 1]))
    temperature = data.draw(st.sampled_from([1.0, 0.3, np.linspace(0.5, 4, n).astype(np.float32)]))
    mask = data.draw(st.sampled_from([None, np.arange(n) % 3 != 1]))
    wide = data.draw(st.booleans())
    least = (1 + wide) * (16 * k + 4 * h * (1 + k))
    scratch = data.draw(st.sampled_from([None, least, 4 * least]))
    with jax.enable_x64(wide):
        dtype = np.dtype(np.float64 if wide else np.float32)
        given = {name: x.astype(dtype) for name, x in arrays.items()}
        weight = given["weight"] if axis == 0 else given["weight"].T
        found = linear_top_k(
            given["hidden"], weight, k, bias=given["bias"], vocab_axis=axis, temperature=temperature, row_mask=mask,
            scratch_bytes=scratch, **options,
        )  # fmt: skip
        found = jax.tree.map(np.asarray, found)
    assert found.logits.dtype == found.log_probs.dtype == dtype
    z = stored_logits(**oracle.to64(arrays), **options)
    assert_top_k(found, z, k, temperature, mask, np.finfo(dtype).eps)


@pytest.mark.parametrize("k", [1, 64, 700])
def test_bfloat16_products_accumulate_in_float32(k: int) -> None:
    p = make(1, 33, 48, 700)
    hidden, weight = (jnp.asarray(p.arrays[name].astype(ml_dtypes.bfloat16)) for name in ("hidden", "weight"))
    found = linear_top_k(hidden, weight, k)
    z = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(found.logits, lax.top_k(z, k)[0], rtol=1e-6, atol=1e-6)
    assert found.logits.dtype == found.log_probs.dtype == jnp.float32
    assert np.all(np.diff(found.logits, axis=1) <= 0)
    assert all(len(set(row)) == k for row in np.asarray(found.ids).tolist())


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
