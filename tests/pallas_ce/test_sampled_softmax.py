"""`sampled_softmax_cross_entropy`: the samplers' expected counts, and the loss against its definition in float64."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import ClassSample, sampled_softmax_cross_entropy
from pallas_ce.objectives import sampled_softmax
from tests.pallas_ce import oracle, plain
from tests.pallas_ce.checks import assert_close, call, with_gradients
from tests.pallas_ce.problems import Problem, make
from tests.pallas_ce.streamed import no_stored_logits

KEY = jax.random.key(3)
FIRST_ON = st.sampled_from([True, False])  # of few examples the first is the simplest: here that is the richest
SAMPLERS = sampled_softmax.SAMPLERS.values()


def _evens(key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    ids = 2 * jax.random.choice(key, vocab_size // 2, (num_samples,), replace=False)
    return ClassSample(ids, jnp.linspace(-3.0, 0.5, vocab_size))


def _definition(p: Problem, arrays: Any, drawn: ClassSample, correction: bool) -> Any:
    """The loss: a softmax over the sampled classes and the row's label."""
    n, rows = p.labels.size, np.flatnonzero(oracle.counted(p.labels, arrays, p.options))
    given = p.labels[rows], rows, drawn.ids, drawn.log_expected * correction, plain.FORMS["logsumexp"]
    weights = arrays.get("token_weights", jnp.ones(n))[rows]
    values = weights * plain.sampled_softmax(arrays, *given)
    reduction = p.options.get("reduction", "mean")
    if reduction == "none":
        return jnp.zeros(n).at[rows].set(values)
    norm = p.options.get("normalizer", jnp.sum(weights)) if reduction == "mean" else 1.0
    return jnp.sum(values) / jnp.where(norm == 0, 1.0, norm)


@st.composite
def _problems(draw: Any) -> Problem:
    n, v = draw(st.sampled_from([30, 1])), draw(st.sampled_from([12, 50]))
    p = make(draw(st.integers(0, 99)), n, 6, v, draw(st.sampled_from([1.0, 6.0])), draw(st.sampled_from([0, 1])))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    more = {"bias": rng.normal(size=v), "logit_scale": np.array(-0.7), "token_weights": rng.uniform(0, 2, n)}
    p.arrays |= {name: x.astype(np.float32) for name, x in more.items() if draw(FIRST_ON)}
    p.options = draw(st.sampled_from([{}, {"reduction": "none"}, {"normalizer": 11.0}, {"reduction": "sum"}]))
    p.options |= draw(st.sampled_from([{}, {"ignore_index": 0}, {"ignore_index": None}]))
    p.options |= {"vocab_size": v - 3} if draw(FIRST_ON) else {}
    return p


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("sampler", ["log_uniform", "uniform", _evens])
@hypothesis.given(p=_problems(), data=st.data())
def test_loss_and_gradients_match_the_definition(sampler: Any, p: Problem, data: Any) -> None:
    n, v = p.labels.size, p.options.get("vocab_size", p.arrays["weight"].shape[0])
    samples = data.draw(st.sampled_from([4, 1, v // 2 if sampler is _evens else v]))
    correction, wide = data.draw(FIRST_ON), data.draw(FIRST_ON)
    cotangent = np.linspace(-1, 2, n)
    options = {"key": KEY, "num_samples": samples, "sampler": sampler, "log_expected_correction": correction}

    def weighted(loss: Any) -> Any:
        return jnp.sum(loss * cotangent) if loss.ndim else loss

    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        drawn = jax.jit(sampled_softmax.SAMPLERS.get(sampler, sampler), static_argnums=(1, 2))(KEY, samples, v)
        got = with_gradients(
            lambda x: call(sampled_softmax_cross_entropy, p, x, **options),
            {name: x.astype(dtype) for name, x in p.arrays.items()},
            weighted,
        )
        assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(dtype)}
    with jax.enable_x64(True):
        exact = ClassSample(drawn.ids, np.float64(drawn.log_expected))
        want = with_gradients(lambda x: _definition(p, x, exact, correction), oracle.to64(p.arrays), weighted)
    assert_close(got, want, 1e-11 if wide else 1e-5, floor=2e-12 if wide else 2e-6)


def _two_of_the_keys(key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    """The key's own two words, so that one program serves all ids."""
    ids = jax.lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)
    return ClassSample(ids, jnp.linspace(-1.0, 0.0, vocab_size))


@hypothesis.settings(max_examples=60)
@hypothesis.given(ids=st.lists(st.integers(-2, 7) | st.sampled_from([-(2**31), 2**31 - 1]), min_size=2, max_size=2))
@hypothesis.example(ids=[3, 3])
@hypothesis.example(ids=[-1, 4])
@hypothesis.example(ids=[0, 5])
def test_ids_that_repeat_or_are_no_classes_make_the_loss_nan(ids: list[int]) -> None:
    p = make(0, 8, 3, 5)
    p.labels[:] = [0, 1, 2, 3, 4, -100, 5, 3]
    p.options["reduction"] = "none"
    key = jax.random.wrap_key_data(np.array(ids, np.int32).view(np.uint32), impl="threefry2x32")
    got = sampled_softmax_cross_entropy(
        **p.arrays, labels=p.labels, key=key, num_samples=2, sampler=_two_of_the_keys, **p.options
    )
    if len({*ids} & {*range(5)}) == 2:
        want = _definition(p, p.arrays, _two_of_the_keys(key, 2, 5), True)
    else:
        want = np.where((p.labels >= 0) & (p.labels < 5), np.nan, 0.0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_classes_are_drawn_as_often_as_is_expected(sampler: Any) -> None:
    """Over many keys a class's frequency is the mean of its expected count, and `Σ x/Q` is unbiased for `Σ x`."""
    draws, samples, v = 4000, 6, 23
    ids, log_expected = jax.vmap(lambda key: sampler(key, samples, v))(jax.random.split(KEY, draws))
    ids, expected = np.asarray(ids), np.exp(np.asarray(log_expected, np.float64))
    assert all(len(set(row)) == samples for row in ids.tolist())
    inside = np.zeros((draws, v))
    np.put_along_axis(inside, ids, 1, axis=1)
    five_sigma = 5 * np.sqrt(0.25 / draws)
    np.testing.assert_allclose(inside.mean(0), expected.mean(0), atol=five_sigma)
    x = np.linspace(1, 2, v)
    estimates = (inside * x / expected).sum(1)
    assert abs(estimates.mean() - x.sum()) < 5 * estimates.std() / np.sqrt(draws)
    np.testing.assert_allclose(sampler(KEY, v, v).log_expected, 0, atol=1e-6)


def test_a_log_uniform_first_class_follows_zipf() -> None:
    v = 9
    first = np.asarray(
        jax.vmap(lambda key: sampled_softmax.log_uniform(key, 1, v).ids[0])(jax.random.split(KEY, 20_000))
    )
    k = np.arange(v)
    p = np.log((k + 2) / (k + 1)) / np.log(v + 1)
    np.testing.assert_allclose(np.bincount(first, minlength=v) / 20_000, p, atol=5 * np.sqrt(0.25 / 20_000))


def test_no_mask_of_hits_is_stored() -> None:
    n, h, v, samples = 8192, 64, 40_000, 4096
    run = jax.grad(
        lambda x, w, t: sampled_softmax_cross_entropy(x, w, t, key=KEY, num_samples=samples, scratch_bytes=2**24),
        (0, 1),
    )
    shapes = ((n, h), jnp.float32), ((v, h), jnp.float32), ((n,), jnp.int32)
    no_stored_logits(run, n, samples, 96 * 2**20, *shapes)


def test_ids_do_not_wrap_around_into_the_vocabulary() -> None:
    p = make(0, 8, 3, 5)
    options = {"key": KEY, "num_samples": 2, "sampler": lambda *_: ClassSample(jnp.array([1, 2**32 + 3]), jnp.zeros(5))}
    with jax.enable_x64(True):
        assert np.isnan(sampled_softmax_cross_entropy(**p.arrays, labels=p.labels, **options))
