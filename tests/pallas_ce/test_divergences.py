"""Pair statistics joined from any parts of the vocabulary equal the whole's, whatever lies in a part."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.statistics import divergences as pairs
from pallas_ce.statistics.divergences import Divergence
from tests.pallas_ce import oracle
from tests.pallas_ce.streamed import log_softmax

N, V = 4, 12
# Open in both heads, closed in one, closed in both.
PATTERNS = [(0.0, 0.0), (-np.inf, 0.0), (0.0, -np.inf), (-np.inf, -np.inf)]
EVERY = [Divergence("forward_kl", 0.5), Divergence("reverse_kl", 0.5), Divergence("jsd", 0.3)]


def _logits(data: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    scale = data.draw(st.sampled_from([0.01, 1.0, 8.0]))
    closed = np.array(data.draw(st.lists(st.sampled_from(PATTERNS), min_size=V, max_size=V))).T
    student, teacher = (rng.normal(size=(N, V)) * scale + closed[i] for i in range(2))
    return student.astype(np.float32), teacher.astype(np.float32)


def _joined(divergence: Divergence, student: np.ndarray, teacher: np.ndarray, cuts: list[int]) -> Any:
    edges = [0, *sorted(cuts), V]
    parts = [
        pairs.partial_of_tiles(divergence, jnp.asarray(student[:, a:b]), jnp.asarray(teacher[:, a:b]),
                               jnp.arange(a, b), None)
        for a, b in itertools.pairwise(edges)
    ]  # fmt: skip
    while len(parts) > 1:
        parts = [pairs.merge_pairs(divergence, parts[0], parts[1]), *parts[2:]]
    return pairs.finalise_pairs(divergence, parts)


@pytest.mark.parametrize("divergence", EVERY, ids=lambda d: d.name)
@hypothesis.given(data=st.data())
def test_parts_join_to_the_definition(divergence: Divergence, data: Any) -> None:
    student, teacher = _logits(data)
    cuts = data.draw(st.sampled_from([[], [6], [1, 11], [3, 4, 9]]))
    offsets = data.draw(st.sampled_from([(0.0, 0.0), (512.0, 0.0), (0.0, -512.0)]))
    student, teacher = (
        np.float32(z * 64).round() / 64 + np.float32(o) for z, o in zip((student, teacher), offsets, strict=True)
    )  # exact
    found = _joined(divergence, student, teacher, cuts)
    if np.isneginf(student).all() or np.isneginf(teacher).all():
        assert np.all(np.asarray(found.value) == 0)
        assert np.all(np.isposinf(found.student.log_sum))
        assert np.all(np.isposinf(found.teacher.log_sum))
        return
    p, q = (np.exp(log_softmax(z)) for z in (student, teacher))
    want = oracle.divergence(divergence.name, divergence.beta, p, q)
    log_p, log_q = (
        np.asarray(side.log_probs(jnp.asarray(z), None))
        for side, z in ((found.student, student), (found.teacher, teacher))
    )
    np.testing.assert_allclose(np.exp(log_p), p, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.exp(log_q), q, rtol=1e-5, atol=1e-7)
    if divergence.name == "jsd":
        m = divergence.beta * q + (1 - divergence.beta) * p
        value, expected = pairs.mixture_sums(divergence, jnp.asarray(log_p), jnp.asarray(log_q))
        np.testing.assert_allclose(expected, oracle.kl(p, m), rtol=1e-5, atol=1e-5)
    else:
        value, expected = found.value, found.expected
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)
    if np.isfinite(want).all():
        slope = pairs.slope(divergence, jnp.asarray(log_p), jnp.asarray(log_q), jnp.asarray(expected))
        assert np.all(np.isfinite(slope))
        bound = np.asarray(pairs.largest_slope(divergence, jnp.asarray(expected)))[:, None]
        assert np.all(np.abs(slope) <= bound * (1 + 1e-5))
        np.testing.assert_allclose(np.sum(slope, 1), 0, atol=1e-4)
