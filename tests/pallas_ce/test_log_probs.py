"""`linear_log_probs`: against the float64 oracle, through everything it returns together."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import LogProbs, linear_log_probs
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, call, with_gradients
from tests.pallas_ce.problems import Problem, statistics_problems
from tests.pallas_ce.streamed import no_stored_logits

HIDDEN, WEIGHT = jnp.ones((4, 3)), jnp.ones((5, 3))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@hypothesis.given(p=statistics_problems(), ignore_index=st.sampled_from([-100, 0, None]))
def test_everything_returned_has_its_own_upstream_weights(p: Problem, ignore_index: Any, implementation: str) -> None:
    n, v = p.labels.shape[0], p.options.get("vocab_size", p.arrays["weight"].shape[0])
    real = (p.labels >= 0) & (p.labels < v) & (p.labels != ignore_index)
    counts = real.reshape(n, -1).any(axis=1)
    logits = oracle.Logits(p.arrays, **p.options)
    values, slopes = oracle.statistics(logits, p.labels)
    rng = np.random.default_rng(2)
    upstream = {"log_prob": real * rng.normal(size=p.labels.shape), "entropy": counts * rng.normal(size=n),
                "sum_sq_probs": counts * rng.normal(size=n)}  # fmt: skip

    def weighted(found: LogProbs) -> Any:
        # Weights where nothing counts must not matter.
        weights = (np.where(g == 0, 5.0, g).astype(np.float32) for g in upstream.values())
        return sum(jnp.sum(x * g) for x, g in zip(found[:3], weights, strict=True))

    everything = functools.partial(linear_log_probs, return_entropy=True, return_sum_sq_probs=True, return_hit=True)
    options = {"ignore_index": ignore_index, "implementation": implementation}
    found, gradients = with_gradients(lambda x: call(everything, p, x, **options), p.arrays, weighted)
    want = LogProbs(
        np.where(real, values["log_prob"], 0), np.where(counts, values["entropy"], 0),
        np.where(counts, values["sum_sq_probs"], 0), None,
    )  # fmt: skip
    assert_close(found[:3], want[:3], 1e-5, floor=5e-6)
    argmax = values["argmax"].reshape(n, *[1] * (p.labels.ndim - 1))
    np.testing.assert_array_equal(found.hit, real & (p.labels == argmax))
    assert_close(gradients, logits.gradients(oracle.pull_back(slopes, upstream)), 1e-5, floor=1e-5)


def test_only_what_is_asked_for_is_returned() -> None:
    labels = jnp.array([0, 1, -100, 4])
    plain = linear_log_probs(HIDDEN, WEIGHT, labels)
    assert plain.shape == (4,)
    assert plain.dtype == jnp.float32
    found = linear_log_probs(HIDDEN, WEIGHT, labels, return_hit=True)
    np.testing.assert_array_equal(found.log_probs, plain)
    np.testing.assert_array_equal(found.hit, [True, False, False, False])
    assert found.entropy is None
    assert found.sum_sq_probs is None


def test_a_temperature_has_no_gradient() -> None:
    def total(temperature: Any) -> Any:
        return jnp.sum(linear_log_probs(HIDDEN, WEIGHT.at[0].set(2.0), jnp.arange(4), temperature=temperature))

    assert np.all(np.asarray(jax.grad(total)(jnp.full(4, 0.5))) == 0)
    assert jax.grad(total)(0.5) == 0


def test_no_array_of_rows_times_vocabulary() -> None:
    n, v, k = 512, 4096, 64

    def total(hidden: Any, weight: Any, labels: Any) -> Any:
        found = linear_log_probs(hidden, weight, labels, return_entropy=True, scratch_bytes=2**20)
        return jnp.sum(found.log_probs**2) + jnp.sum(found.entropy)

    # The budget, hidden's float32 gradient, and a few numbers for each label: fewer than K.
    limit = 2**20 + 4 * n * 64 + 48 * n * k
    shapes = ((n, 64), jnp.bfloat16), ((v, 64), jnp.bfloat16), ((n, k), jnp.int32)
    no_stored_logits(jax.grad(total, (0, 1)), n, v, limit, *shapes)
