"""`sampled_softmax_cross_entropy`: the samplers' expected counts, and the loss against its definition in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import ClassSample, class_samplers, linear_cross_entropy, sampled_softmax_cross_entropy
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import Problem, make
from tests.pallas_ce.streamed import as_jax, no_stored_logits

KEY = jax.random.key(3)
SAMPLERS = [class_samplers.log_uniform, class_samplers.uniform]


def _definition(p: dict[str, Any], labels: np.ndarray, drawn: ClassSample, correction: bool) -> Any:
    """The mean loss from stored logits, accidental hits taken out of the sum."""
    counts = labels >= 0
    targets = np.where(counts, labels, 0)
    ids, shift = np.asarray(drawn.ids), np.asarray(drawn.log_expected, np.float64) * correction
    y = p["logit_scale"] * (p["hidden"] @ p["weight"].T + p["bias"]) - shift
    own = y[np.arange(len(labels)), targets]
    others = jnp.where(ids[None, :] == targets[:, None], -jnp.inf, y[:, ids])
    losses = jnp.logaddexp(own, jax.nn.logsumexp(others, axis=1)) - own
    return jnp.sum(jnp.where(counts, losses, 0)) / counts.sum()


def _problem(n: int = 40, h: int = 6, v: int = 50) -> Problem:
    p = make(0, n, h, v)
    p.arrays["bias"] = np.random.default_rng(1).normal(size=v).astype(np.float32)
    p.arrays["logit_scale"] = np.float32(1.4)
    return p


@pytest.mark.parametrize("sampler", ["log_uniform", "uniform"])
@pytest.mark.parametrize(("correction", "axis", "samples"), [(True, 0, 20), (False, 0, 20), (True, 1, 1)])
def test_loss_and_gradients_match_the_definition(sampler: Any, correction: bool, axis: int, samples: int) -> None:
    p, v = _problem(), 50
    drawn = class_samplers.find(sampler)(KEY, samples, v)
    hits = np.isin(p.labels, drawn.ids)
    assert samples == 1 or (hits.any() and not hits[p.labels >= 0].all())

    def ours(given: Any) -> Any:
        given = dict(given)
        weight = given.pop("weight")
        return sampled_softmax_cross_entropy(
            given.pop("hidden"), weight if axis == 0 else weight.T, p.labels, key=KEY, num_samples=samples,
            sampler=sampler, log_expected_correction=correction, vocab_axis=axis, **given,
        )  # fmt: skip

    got = jax.jit(jax.value_and_grad(ours))(as_jax(p.arrays))
    with jax.enable_x64(True):
        given = {k: jnp.asarray(x, jnp.float64) for k, x in p.arrays.items()}
        theirs = jax.jit(jax.value_and_grad(lambda given: _definition(given, p.labels, drawn, correction)))
        want = jax.tree.map(np.asarray, theirs(given))
    assert_close(got, want, 1e-5, floor=1e-6)


@pytest.mark.parametrize("sampler", ["log_uniform", "uniform"])
def test_with_every_class_sampled_it_is_the_whole_softmax(sampler: Any) -> None:
    p = _problem()
    options: Any = {k: jnp.asarray(p.arrays[k]) for k in ("bias", "logit_scale")}
    rows = [jnp.asarray(p.arrays[k]) for k in ("hidden", "weight")]
    weights = jnp.linspace(0, 2, 40)

    def whole(h: Any, w: Any) -> Any:
        return linear_cross_entropy(h, w, p.labels, token_weights=weights, **options)

    def sampled(h: Any, w: Any) -> Any:
        return sampled_softmax_cross_entropy(
            h, w, p.labels, key=KEY, num_samples=50, sampler=sampler, token_weights=weights, **options
        )

    want = jax.tree.map(np.asarray, jax.value_and_grad(whole, (0, 1))(*rows))
    assert_close(jax.value_and_grad(sampled, (0, 1))(*rows), want, 1e-5, floor=1e-6)


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


def test_a_log_uniform_first_class_follows_zipf() -> None:
    v = 9
    first = np.asarray(
        jax.vmap(lambda key: class_samplers.log_uniform(key, 1, v).ids[0])(jax.random.split(KEY, 20_000))
    )
    k = np.arange(v)
    p = np.log((k + 2) / (k + 1)) / np.log(v + 1)
    np.testing.assert_allclose(np.bincount(first, minlength=v) / 20_000, p, atol=5 * np.sqrt(0.25 / 20_000))


def _evens(key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    ids = 2 * jax.random.choice(key, vocab_size // 2, (num_samples,), replace=False)
    return ClassSample(ids, jnp.full(vocab_size, jnp.log(2 * num_samples / vocab_size)))


def test_a_sampler_of_the_users() -> None:
    p = _problem()
    got = sampled_softmax_cross_entropy(
        **as_jax(p.arrays), labels=p.labels, key=KEY, num_samples=5, sampler=_evens
    )  # fmt: skip
    want = _definition(p.arrays, p.labels, _evens(KEY, 5, 50), True)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_rows_that_do_not_count_and_per_token_losses() -> None:
    p = _problem(n=12)
    p.labels[:4] = [-100, 50, 3, 7]
    hidden = jnp.asarray(p.arrays["hidden"]).at[:2].set(jnp.nan).reshape(3, 4, -1)

    def losses(hidden: Any) -> Any:
        return sampled_softmax_cross_entropy(
            hidden, p.arrays["weight"], p.labels.reshape(3, 4), key=KEY, num_samples=9, reduction="none"
        )

    values, gradient = losses(hidden), jax.grad(lambda h: losses(h).sum())(hidden)
    counts = (p.labels.reshape(3, 4) >= 0) & (p.labels.reshape(3, 4) < 50)
    assert np.all((np.asarray(values) != 0) == counts)
    assert np.all(np.isfinite(gradient))
    assert np.all(np.any(np.asarray(gradient) != 0, axis=-1) == counts)


def test_neither_logits_nor_a_mask_of_hits_are_stored() -> None:
    n, h, v, samples = 8192, 64, 40_000, 4096
    run = jax.grad(
        lambda x, w, t: sampled_softmax_cross_entropy(x, w, t, key=KEY, num_samples=samples, scratch_bytes=2**24),
        (0, 1),
    )
    shapes = ((n, h), jnp.float32), ((v, h), jnp.float32), ((n,), jnp.int32)
    no_stored_logits(run, n, v, 96 * 2**20, *shapes)
    no_stored_logits(run, n, samples, 96 * 2**20, *shapes)


def _bad(key: Any, num_samples: int, vocab_size: int) -> Any:
    return ClassSample(jnp.zeros(num_samples + 1, int), jnp.zeros(vocab_size))


def _worse(key: Any, num_samples: int, vocab_size: int) -> Any:
    return ClassSample(jnp.zeros(num_samples, int), jnp.zeros(num_samples))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples=0 must be an int between 1 and vocab_size=5"),
        ({"num_samples": 6}, "num_samples=6 must be an int between 1 and vocab_size=5"),
        ({"sampler": "zipf"}, r"sampler='zipf' is unknown; choose from \('log_uniform', 'uniform'\)"),
        ({"sampler": _bad}, r"sampler returned ids int32\[3\]; they must be integers \[2\]"),
        ({"sampler": _worse}, r"sampler returned log_expected float32\[2\]; it must be floating \[5\]"),
    ],
)
def test_what_cannot_be_served_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampled_softmax_cross_entropy(
            jnp.ones((2, 3)), jnp.ones((5, 3)), jnp.zeros(2, int), **({"key": KEY, "num_samples": 2} | options)
        )
