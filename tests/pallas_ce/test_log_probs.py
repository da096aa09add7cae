"""`linear_log_probs`: what it returns of the statistics that `test_contract.py` compares with the oracle."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce import LogProbs, linear_log_probs, linear_row_statistics
from tests.pallas_ce.checks import assert_close, call, with_gradients
from tests.pallas_ce.problems import Problem, statistics_problems
from tests.pallas_ce.streamed import no_stored_logits

HIDDEN, WEIGHT = jnp.ones((4, 3)), jnp.ones((5, 3))


@hypothesis.given(p=statistics_problems(), ignore_index=st.sampled_from([-100, 0, None]))
def test_everything_returned_is_the_rows_statistics_where_labels_count(p: Problem, ignore_index: Any) -> None:
    """Values and gradients; upstream weights where nothing counts do not matter."""
    v = p.options.get("vocab_size", p.arrays["weight"].shape[0])
    real = (p.labels >= 0) & (p.labels < v) & (p.labels != ignore_index)
    counts = real.reshape(len(real), -1).any(axis=1)

    def weighted(found: LogProbs) -> Any:
        return sum(jnp.sum(x * np.sin(1.0 + np.arange(x.size)).reshape(x.shape)) for x in found[:3] if x is not None)

    def of_statistics(x: Any) -> LogProbs:
        names = ("log_prob", "entropy", "sum_sq_probs", "argmax")
        s = call(linear_row_statistics, p, x, statistics=names, row_mask=counts)
        hit = real & (p.labels == jnp.reshape(s.argmax, (-1, *[1] * (real.ndim - 1))))
        return LogProbs(jnp.where(real, s.log_prob, 0.0), s.entropy, s.sum_sq_probs, hit)

    everything = functools.partial(linear_log_probs, return_entropy=True, return_sum_sq_probs=True, return_hit=True)
    found = with_gradients(lambda x: call(everything, p, x, ignore_index=ignore_index), p.arrays, weighted)
    assert_close(found, with_gradients(of_statistics, p.arrays, weighted), 1e-5, floor=1e-6)


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
