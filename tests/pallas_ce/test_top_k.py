"""`linear_top_k` against `lax.top_k` of stored logits: exact, in order, ties to the lowest id."""

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
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import make
from tests.pallas_ce.streamed import counted_rows, exact_head, log_softmax, no_stored_logits, stored_logits


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
    least = 16 * k + 4 * h * (1 + k)
    scratch = data.draw(st.sampled_from([None, least, 4 * least]))
    weight = arrays["weight"] if axis == 0 else arrays["weight"].T
    found = linear_top_k(
        arrays["hidden"], weight, k, bias=arrays["bias"], vocab_axis=axis, temperature=temperature, row_mask=mask,
        scratch_bytes=scratch, **options,
    )  # fmt: skip
    z = stored_logits(**arrays, **options).astype(np.float32)
    logits, ids = lax.top_k(jnp.asarray(z), k)
    counts = np.ones((n, 1), bool) if mask is None else mask[:, None]
    np.testing.assert_array_equal(found.ids, np.where(counts, ids, -1))
    np.testing.assert_allclose(found.logits, np.where(counts, logits, 0), rtol=1e-6)
    tempered = z / np.reshape(temperature, (-1, 1))
    with np.errstate(invalid="ignore"):
        log_probs = np.take_along_axis(log_softmax(tempered), np.asarray(ids), 1)
    log_probs = np.where(np.isneginf(logits), -np.inf, log_probs)
    np.testing.assert_allclose(found.log_probs, np.where(counts, log_probs, 0), rtol=1e-5, atol=2e-6)


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


def test_leading_shapes_and_no_rows() -> None:
    weight = jnp.arange(10.0).reshape(5, 2)
    assert linear_top_k(jnp.ones((2, 3, 2)), weight, 4).ids.shape == (2, 3, 4)
    assert linear_top_k(jnp.ones(2), weight, 4).ids.shape == (4,)
    assert linear_top_k(jnp.ones((2, 0, 2)), weight, 4).log_probs.shape == (2, 0, 4)


def test_float64_is_served_in_float64() -> None:
    p = make(0, 9, 5, 31)
    with jax.enable_x64(True):
        arrays = [p.arrays[name].astype(np.float64) for name in ("hidden", "weight")]
        found = linear_top_k(*arrays, 3)
        z = stored_logits(*arrays)
        np.testing.assert_allclose(found.logits, -np.sort(-z, axis=1)[:, :3], rtol=1e-13)
        np.testing.assert_allclose(found.log_probs, -np.sort(-log_softmax(z), axis=1)[:, :3], rtol=1e-12)


def test_masked_rows_cost_nothing_and_may_hold_anything(monkeypatch: Any) -> None:
    hidden = jnp.full((64, 4), jnp.nan).at[8:16].set(1.0)
    weight, mask = jnp.ones((32, 4)), (jnp.arange(64) >= 8) & (jnp.arange(64) < 16)
    with counted_rows(monkeypatch) as seen:
        found = linear_top_k(hidden, weight, 2, row_mask=mask, scratch_bytes=2500)
        jax.block_until_ready(found)
        jax.effects_barrier()
        assert 0 < sum(seen) * 4 <= 64 * 8
        seen.clear()
        jax.block_until_ready(linear_top_k(hidden, weight, 2, row_mask=jnp.zeros(64, bool), scratch_bytes=2500))
        jax.effects_barrier()
        assert seen == []
    assert np.all(np.isfinite(found.log_probs))
    np.testing.assert_array_equal(found.ids[7:10], [[-1, -1], [0, 1], [0, 1]])


def test_vmap_shares_the_weight_and_maps_over_several() -> None:
    p, weights = make(0, 12, 5, 31), np.random.default_rng(0).normal(size=(3, 31, 5)).astype(np.float32)
    hidden = p.arrays["hidden"].reshape(3, 4, 5)
    shared: Any = jax.vmap(lambda x: linear_top_k(x, weights[0], 3))
    assert_close(shared(hidden), jax.tree.map(np.asarray, linear_top_k(hidden, weights[0], 3)), 1e-6)
    assert "12x31xf32" in jax.jit(shared).lower(hidden).as_text()
    each: Any = jax.vmap(lambda x, w: linear_top_k(x, w, 3))
    for i in range(3):
        assert_close(jax.tree.map(lambda x, i=i: x[i], each(hidden, weights)),
                     jax.tree.map(np.asarray, linear_top_k(hidden[i], weights[i], 3)), 1e-6)  # fmt: skip


def test_the_results_are_constants() -> None:
    p = make(0, 12, 5, 31)

    def summed(hidden: Any, weight: Any, temperature: Any) -> Any:
        found = linear_top_k(hidden, weight, 3, temperature=temperature)
        return jnp.sum(found.logits + found.log_probs)

    gradients = jax.grad(summed, (0, 1, 2))(*(jnp.asarray(p.arrays[k]) for k in ("hidden", "weight")), 2.0)
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


def test_no_logits_are_stored() -> None:
    n, h, v = 8192, 64, 40_000
    no_stored_logits(
        lambda x, w: linear_top_k(x, w, 64), n, v, 160 * 2**20, ((n, h), jnp.float32), ((v, h), jnp.float32)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"k=0 must be an int between 1 and vocab_size=5"),
        ({"k": 6}, r"k=6 must be an int between 1 and vocab_size=5"),
        ({"k": 4, "vocab_size": 3}, r"k=4 must be an int between 1 and vocab_size=3"),
        ({"k": 2.0}, r"k=2.0 must be an int"),
        ({"k": True}, r"k=True must be an int"),
        ({"k": 1, "temperature": 0.0}, r"temperature=0 must be a finite number above 0"),
        ({"k": 1, "temperature": np.array([1.0, -2.0])}, r"temperature=-2 must be"),
        ({"k": 1, "temperature": np.ones(3)}, r"temperature has shape \(3,\)"),
        ({"k": 3, "scratch_bytes": 50}, r"scratch_bytes=50 cannot hold one row in the forward pass"),
    ],
)
def test_what_cannot_be_served_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_top_k(jnp.ones((2, 3)), jnp.ones((5, 3)), **options)
