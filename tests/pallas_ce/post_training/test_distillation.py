"""Divergences on a teacher's most likely tokens, against their definitions in float64 NumPy."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_log_probs, top_k_distillation_loss
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close

DIVERGENCES = ["forward_kl", "reverse_kl", "jsd"]


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0), axis=-1)


def defined(p: np.ndarray, q: np.ndarray, divergence: str, beta: float, tail: bool) -> np.ndarray:
    """Of probabilities at the teacher's tokens `[..., K]`, p the student's; 0 of both where the teacher has none."""
    p = np.where(q > 0, p, 0)
    if tail:
        p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], axis=-1) for x in (p, q))
    else:
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    m = beta * q + (1 - beta) * p
    return {"forward_kl": _kl(q, p), "reverse_kl": _kl(p, q), "jsd": beta * _kl(q, m) + (1 - beta) * _kl(p, m)}[
        divergence
    ]


def _drawn(seed: int, places: int, absent: bool) -> tuple[np.ndarray, np.ndarray]:
    """Student and teacher log-probabilities `[2, 3, K]` of distributions over twelve tokens, as float32."""
    rng = np.random.default_rng(seed)
    student, teacher = (rng.dirichlet(np.ones(12), size=(2, 3)) for _ in range(2))
    ids = np.argsort(-teacher, axis=-1)[..., :places]
    log_p, log_q = (np.log(np.take_along_axis(x, ids, -1)).astype(np.float32) for x in (student, teacher))
    if absent:
        log_q[0, :, places // 2 + 1 :] = -np.inf
    return log_p, log_q


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
@hypothesis.given(seed=st.integers(0, 2**16), places=st.sampled_from([1, 5]), absent=st.booleans(),
                  beta=st.sampled_from([0.1, 0.5, 0.9]))  # fmt: skip
def test_values_are_the_definition(
    divergence: Any, tail: bool, seed: int, places: int, absent: bool, beta: float
) -> None:
    log_p, log_q = _drawn(seed, places, absent)
    got = top_k_distillation_loss(log_p, log_q, divergence=divergence, beta=beta, tail=tail, aggregation="none")
    p, q = (np.exp(x.astype(np.float64)) for x in (log_p, log_q))
    assert_close(got, defined(p, q, divergence, beta, tail), 1e-5, floor=2e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("absent", [True, False])
def test_gradients_are_those_of_the_definition(divergence: Any, tail: bool, absent: bool) -> None:
    log_p, log_q = _drawn(3, 5, absent)
    q = np.exp(log_q.astype(np.float64))
    gradient, constant = jax.grad(
        lambda p, q: jnp.sum(top_k_distillation_loss(p, q, divergence=divergence, tail=tail, aggregation="none")),
        (0, 1),
    )(log_p, log_q)
    assert not np.any(constant)
    numeric = oracle.differences(
        lambda x: np.sum(defined(np.exp(x["log_p"]), q, divergence, 0.5, tail)), {"log_p": log_p}, "log_p"
    )
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
def test_every_token_is_the_whole_divergence_and_fewer_a_lower_bound(divergence: Any, tail: bool) -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(6), size=4) for _ in range(2))
    whole = defined(p, q, divergence, 0.5, False)
    everything = top_k_distillation_loss(jnp.log(p), jnp.log(q), divergence=divergence, tail=tail, aggregation="none")
    assert_close(everything, whole, 1e-5, floor=1e-5)
    if tail:
        part = top_k_distillation_loss(jnp.log(p[:, :3]), jnp.log(q[:, :3]), divergence=divergence, aggregation="none")
        assert np.all(np.asarray(part) <= whole + 1e-6)
        assert np.all(np.asarray(part) >= -1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
def test_masked_tokens_contribute_nothing_whatever_they_hold(tail: bool, divergence: Any) -> None:
    log_p, log_q = _drawn(1, 4, False)
    mask = np.array([[True, False, True], [False, False, False]])
    contents = np.array([np.nan, np.inf, -np.inf, np.nan], np.float32)
    bad = [np.where(mask[..., None], x, contents) for x in (log_p, log_q)]

    def loss(log_p: Any, log_q: Any) -> Any:
        return top_k_distillation_loss(
            log_p, log_q, mask, divergence=divergence, tail=tail, aggregation="sequence_mean"
        )

    want, got = (jax.value_and_grad(loss)(*x) for x in ((log_p, log_q), bad))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.all(np.asarray(got[1])[~mask] == 0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
def test_certain_teachers_impossible_tokens_and_empty_rows_keep_finite_gradients(divergence: Any, tail: bool) -> None:
    teacher = jnp.array([[0.0, -200.0], [-0.7, -0.7], [-jnp.inf, -jnp.inf], [-300.0, -301.0]])
    student = jnp.array([[-200.0, 0.0], [0.0, -jnp.inf], [-1.0, -jnp.inf], [-0.1, -3.0]])
    gradient = jax.grad(
        lambda p: jnp.sum(
            jnp.where(jnp.array([True, divergence != "forward_kl", True, True]),
                      top_k_distillation_loss(p, teacher, divergence=divergence, tail=tail, aggregation="none"), 0)
        )
    )(student)  # fmt: skip
    assert np.all(np.isfinite(gradient))


def test_it_trains_a_streamed_student_towards_the_teacher() -> None:
    rng = np.random.default_rng(0)
    hidden, weight, other = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 6), (30, 6), (30, 6)))
    logits = 2 * hidden @ other.T
    teacher = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-teacher, axis=1)[:, :4]
    top = np.take_along_axis(teacher, ids, 1)

    def loss(weight: Any) -> Any:
        return top_k_distillation_loss(linear_log_probs(hidden, weight, ids), top)

    step = jax.jit(jax.value_and_grad(loss))
    first = step(weight)[0]
    for _ in range(50):
        weight = weight - 0.5 * step(weight)[1]
    assert step(weight)[0] < 0.3 * first
