"""`linear_sample`: the distribution it draws from, and what the sample may not depend on."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_sample
from pallas_ce.api import sampling
from tests.pallas_ce import oracle
from tests.pallas_ce.problems import make
from tests.pallas_ce.streamed import exact_head, log_softmax, no_stored_logits, stored_logits

KEY = jax.random.key(7)


def _p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square test; the draws are the same in every run, so that a small threshold never flakes."""
    assert np.all(observed[expected == 0] == 0)
    kept = expected > 0
    statistic = (((observed - expected) ** 2)[kept] / expected[kept]).sum()
    return float(jax.scipy.stats.chi2.sf(statistic, kept.sum() - 1))


def _kept(logits: np.ndarray, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits with -inf for excluded tokens, and the least distance of a sum that decides from p, by row."""
    inverse = 1 / np.where(np.equal(temperature, 0), 1.0, temperature)
    order = np.argsort(-logits, axis=1, kind="stable")
    z = np.take_along_axis(logits, order, axis=1)
    z[:, top_k or z.shape[1] :] = -np.inf
    with np.errstate(invalid="ignore"):
        p = np.nan_to_num(np.exp((z - z[:, :1]) * np.broadcast_to(inverse, len(z))[:, None]))
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1e-300)
    before, left = np.cumsum(p, axis=1) - p, np.ones(z.shape, bool)
    distance = np.ones(len(z))
    if top_p is not None:
        limit = np.broadcast_to(top_p, len(z))[:, None]
        left &= (before < limit) | (limit == 1)
        distance = np.where(limit[:, 0] == 1, 1, np.abs(before - limit).min(axis=1))
    if min_p is not None:
        limit = np.broadcast_to(min_p, len(z))[:, None] * p[:, :1]
        left &= (p >= limit) | (z == z[:, :1])
        near = np.abs(p - limit) + (p == p[:, :1])
        distance = np.minimum(distance, (near / np.maximum(limit, 1e-300)).min(axis=1))
    kept = np.full(z.shape, -np.inf)
    np.put_along_axis(kept, order, np.where(left, z, -np.inf), axis=1)
    return kept, distance


def _drawn(z: np.ndarray, added: np.ndarray, temperature: Any) -> tuple[Any, Any, Any]:
    """By rows: ids, their log-probabilities, and by how much the best sum of logit and noise leads where T > 0."""
    rows, temperature = np.arange(len(z)), np.broadcast_to(temperature, len(z))
    scores = z + temperature[:, None] * added
    ids = scores.argmax(1)
    best = np.sort(np.pad(scores, ((0, 0), (1, 0)), constant_values=-np.inf), axis=1)
    with np.errstate(invalid="ignore"):
        lead = np.where((temperature == 0) | np.isneginf(best[:, -2]), np.inf, best[:, -1] - best[:, -2])
        log_p = log_softmax(z / np.where(temperature == 0, 1.0, temperature)[:, None])[rows, ids]
    log_p = np.where(temperature == 0, 0.0, log_p)
    return ids, np.where(np.isneginf(z[rows, ids]), -np.inf, log_p), lead


@hypothesis.given(data=st.data())
def test_the_sample_is_the_best_sum_of_logit_and_noise(data: Any) -> None:
    """Noise of key, row and column alone: no budget, mask or left-out token changes it."""
    n, h, v = data.draw(st.sampled_from([20, 1])), 6, data.draw(st.sampled_from([90, 7, 1]))
    arrays = exact_head(data.draw(st.integers(0, 99)), n, h, v, data.draw(st.sampled_from([0.3, 0.0, 0.95])))
    key = jax.random.key(data.draw(st.integers(0, 99)))
    vocab_size = data.draw(st.sampled_from([v, (v + 1) // 2]))
    top_k = data.draw(st.sampled_from([None, min(5, vocab_size), vocab_size]))
    limits = {
        "temperature": data.draw(st.sampled_from([np.linspace(0, 3, n).astype(np.float32), 1.0, 0.5, 0.0])),
        "top_k": top_k,
        "top_p": data.draw(st.sampled_from([None, 0.37, np.linspace(1e-3, 1, n).astype(np.float32), 0.9999])),
        "min_p": data.draw(st.sampled_from([None, 0.11, np.linspace(0, 1, n).astype(np.float32)])),
    }
    wide = data.draw(st.booleans())
    least = (1 + wide) * (80 if top_k is None else 16 * top_k + 4 * h * (1 + top_k))
    if top_k is None and not (limits["top_p"] is None and limits["min_p"] is None):
        least += (1 + wide) * 32 * vocab_size  # whole rows
    head = {
        "vocab_size": vocab_size,
        "logit_softcap": data.draw(st.sampled_from([None, 2.0])),
        "logit_scale": data.draw(st.sampled_from([1.0, 0.5])),
    }
    mask = data.draw(st.sampled_from([None, np.arange(n) % 3 != 1]))
    scratch, axis = data.draw(st.sampled_from([None, least, 4 * least])), data.draw(st.sampled_from([0, 1]))
    with jax.enable_x64(wide):
        dtype = np.dtype(np.float64 if wide else np.float32)
        given = {name: x.astype(dtype) for name, x in arrays.items()}
        weight = given["weight"] if axis == 0 else given["weight"].T
        found = linear_sample(
            key, given["hidden"], weight, bias=given["bias"], row_mask=mask, vocab_axis=axis, scratch_bytes=scratch,
            **head, **limits,
        )  # fmt: skip
        added = np.asarray(sampling.gumbel(sampling.row_keys(key, n), jnp.arange(vocab_size), dtype), np.float64)
        got = jax.tree.map(np.asarray, found)
    assert got.log_probs.dtype == dtype
    temperature, z = limits["temperature"], stored_logits(**oracle.to64(arrays), scale=head["logit_scale"], **head)
    z, distance = _kept(z, **limits)
    ids, log_p, lead = _drawn(z, added, temperature)
    counts, unit = np.ones(n, bool) if mask is None else mask, np.finfo(dtype).eps
    clear = ~counts | ((lead > 64 * unit) & (distance > 64 * unit))
    np.testing.assert_array_equal(got.ids[clear], np.where(counts, ids, -1)[clear])
    # It is the difference of a tempered logit, of up to 6/T here, and a log-sum-exp, both rounded at their own size.
    size = 5.0 + 6.0 / np.where(np.equal(temperature, 0), 1.0, temperature)
    want = np.where(counts, log_p, 0)
    off = np.subtract(got.log_probs, want, where=got.log_probs != want, out=np.zeros(n))
    assert np.all(np.abs(off)[clear] <= 4 * unit * np.broadcast_to(size, n)[clear])


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("temperature", "limits"), [(1.0, {}), (0.5, {"min_p": 0.2}), (3.0, {"top_k": 9, "top_p": 0.8})]
)
def test_samples_pass_a_chi_square_test(temperature: float, limits: dict[str, Any]) -> None:
    rows, v = 20_000, 37
    row, weight = jax.random.normal(jax.random.key(0), (1, 8)), 0.5 * jax.random.normal(jax.random.key(1), (v, 8))
    found = linear_sample(KEY, jnp.tile(row, (rows, 1)), weight, temperature=temperature, **limits)
    z = stored_logits(np.asarray(row, np.float64), np.asarray(weight, np.float64))
    z, _ = _kept(z, temperature, *(limits.get(name) for name in ("top_k", "top_p", "min_p")))
    log_p = log_softmax(z / temperature)[0]
    assert _p_value(np.bincount(found.ids, minlength=v), rows * np.exp(log_p)) > 1e-3
    np.testing.assert_allclose(found.log_probs, log_p[np.asarray(found.ids)], rtol=1e-5, atol=1e-6)


def test_rows_and_keys_are_independent() -> None:
    """Two rows under many keys: each pair of ids as often as the product of their probabilities."""
    hidden, weight = jnp.array([[0.0, 1.0], [1.0, 0.5]]), jnp.array([[0.0, 0.0], [1.0, 0.3], [-0.5, 0.2]])
    keys = jax.random.split(KEY, 10_000)
    ids = np.asarray(jax.vmap(lambda key: linear_sample(key, hidden, weight).ids)(keys))
    p = np.exp(log_softmax(stored_logits(np.asarray(hidden), np.asarray(weight))))
    observed = np.bincount(3 * ids[:, 0] + ids[:, 1], minlength=9)
    assert _p_value(observed, 10_000 * np.outer(p[0], p[1]).ravel()) > 1e-3


def test_the_largest_of_a_million_noises_are_all_different() -> None:
    """The largest decide samples from large vocabularies; of 24 bits, dozens of the first thousand would be equal."""
    keys = sampling.row_keys(KEY, 1)
    largest = np.sort(np.asarray(sampling.gumbel(keys, jnp.arange(2**20), np.dtype(np.float32)))[0])[-1000:]
    assert len(np.unique(largest)) > 990
    # The cumulative distribution exp(-exp(-g)) is uniform; the largest of n lies at about 1 - 1/n.
    assert 2e-8 < -np.expm1(-np.exp(-np.float64(largest[-1]))) < 2e-5


def test_a_row_without_probability_has_the_first_column_and_no_log_probability() -> None:
    nothing = linear_sample(KEY, jnp.ones((2, 2)), jnp.ones((40, 2)), bias=jnp.full(40, -jnp.inf), temperature=0.0)
    assert np.all(np.asarray(nothing.ids) == 0)
    assert np.all(np.isneginf(nothing.log_probs))


def test_a_key_for_each_example_traced_limits_of_each_row_and_keys_of_the_old_kind() -> None:
    p = make(0, 12, 5, 31)
    hidden, weight = jnp.asarray(p.arrays["hidden"]).reshape(3, 4, 5), jnp.asarray(p.arrays["weight"])
    keys, shares = jax.random.split(KEY, 3), jnp.linspace(0.1, 1.0, 4)

    def sample(key: Any, hidden: Any, limits: Any) -> Any:
        return linear_sample(key, hidden, weight, **limits)

    for limits in ({}, {"top_p": shares, "min_p": 1 - shares}):
        found = jax.jit(jax.vmap(sample, (0, 0, None)))(keys, hidden, limits)
        for i in range(3):
            one = sample(keys[i], hidden[i], limits)
            np.testing.assert_array_equal(found.ids[i], one.ids)
            np.testing.assert_allclose(found.log_probs[i], one.log_probs, rtol=1e-5, atol=1e-6)
    old, new = (linear_sample(key, hidden[0], weight).ids for key in (jax.random.PRNGKey(7), KEY))
    np.testing.assert_array_equal(old, new)


def _ids(probabilities: list[float], **limits: Any) -> set[int]:
    """All that is drawn in a thousand rows of these probabilities."""
    bias = jnp.log(jnp.array(probabilities))
    found = linear_sample(KEY, jnp.ones((1000, 1)), jnp.zeros((len(probabilities), 1)), bias=bias, **limits)
    return set(np.asarray(found.ids).tolist())


@pytest.mark.parametrize("top_k", [None, 4])
def test_the_column_that_reaches_p_is_kept_and_the_next_is_not(top_k: int | None) -> None:
    p = [0.125, 0.5, 0.25, 0.125]
    two, three, everything = {1, 2}, {0, 1, 2}, {0, 1, 2, 3}
    of_top_p = {1e-6: {1}, 0.5: {1}, 0.51: two, 0.75: two, 0.76: three, 0.9: everything, 1: everything}
    of_min_p = {0: everything, 0.24: everything, 0.26: two, 0.51: {1}, 1: {1}}
    assert {top_p: _ids(p, top_p=top_p, top_k=top_k) for top_p in of_top_p} == of_top_p
    assert {min_p: _ids(p, min_p=min_p, top_k=top_k) for min_p in of_min_p} == of_min_p


def test_limits_store_the_logits_of_a_few_rows() -> None:
    n, v = 257, 30_011
    scratch = 2**23

    def sample(hidden: Any, weight: Any) -> Any:
        return linear_sample(KEY, hidden, weight, top_p=0.9, min_p=0.01, scratch_bytes=scratch)

    no_stored_logits(sample, n, v, scratch, ((n, 4), jnp.float32), ((v, 4), jnp.float32))
