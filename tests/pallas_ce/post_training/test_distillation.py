"""Divergences on a teacher's most likely tokens, against plain JAX in float64."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import top_k_distillation_loss
from tests.pallas_ce import oracle, plain
from tests.pallas_ce.cases import DISTILLATIONS
from tests.pallas_ce.checks import assert_close, with_gradients
from tests.pallas_ce.streamed import assert_distills

every_kind = pytest.mark.parametrize(
    ("divergence", "tail"), [(divergence, tail) for divergence in DISTILLATIONS for tail in (True, False)]
)


def ours(x: Any, **options: Any) -> Any:
    return top_k_distillation_loss(**x, aggregation="none", **options)


def exact(x: Any, divergence: str, **options: Any) -> Any:
    mask = np.ones(x["log_probs"].shape[:-1], bool)
    return plain.top_k_distillation(divergence, x, mask, **options).reshape(mask.shape)


def _drawn(seed: int, places: int, absent: bool) -> dict[str, np.ndarray]:
    """Log-probabilities `[2, 3, K]` of distributions over twelve tokens, as float32."""
    rng = np.random.default_rng(seed)
    student, teacher = (rng.dirichlet(np.ones(12), size=(2, 3)) for _ in range(2))
    ids = np.argsort(-teacher, axis=-1)[..., :places]
    log_p, log_q = (np.log(np.take_along_axis(x, ids, -1)).astype(np.float32) for x in (student, teacher))
    if absent:
        log_q[0, :, places // 2 + 1 :] = -np.inf
    return {"log_probs": log_p, "teacher_log_probs": log_q}


@pytest.mark.nightly(keep=3)
@every_kind
@hypothesis.given(seed=st.integers(0, 2**16), places=st.sampled_from([5, 1]), absent=st.booleans(),
                  beta=st.sampled_from([0.1, 0.5, 0.9]))  # fmt: skip
def test_values_and_gradients_are_those_of_the_definition(
    divergence: Any, tail: bool, seed: int, places: int, absent: bool, beta: float
) -> None:
    options = {"divergence": divergence, "beta": beta, "tail": tail}
    given = (functools.partial(loss, **options) for loss in (ours, exact))
    assert_distills(*given, _drawn(seed, places, absent), 1.0)


def test_sums_are_of_the_tokens_that_count_over_each_divisor() -> None:
    x, mask = _drawn(0, 5, False), np.array([[True, True, False], [True, False, True]])
    by_token = np.where(mask, ours(x), 0)
    found = [
        top_k_distillation_loss(**x, mask=mask, **given)
        for given in ({"aggregation": "fixed_length", "length": 3}, {"normalizer": 7.0})
    ]
    np.testing.assert_allclose(found, [by_token.sum() / 6, by_token.sum() / 7], rtol=1e-6)


@every_kind
def test_every_token_is_the_whole_divergence_and_fewer_a_lower_bound(divergence: Any, tail: bool) -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(6), size=4) for _ in range(2))
    whole = oracle.divergence(divergence, 0.5, p, q)
    everything = top_k_distillation_loss(jnp.log(p), jnp.log(q), divergence=divergence, tail=tail, aggregation="none")
    assert_close(everything, whole, 1e-5, floor=1e-5)
    if tail:
        part = top_k_distillation_loss(jnp.log(p[:, :3]), jnp.log(q[:, :3]), divergence=divergence, aggregation="none")
        assert np.all(np.asarray(part) <= whole + 1e-6)
        assert np.all(np.asarray(part) >= -1e-6)


@every_kind
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


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6])
def test_a_mixture_that_is_almost_one_side_has_relative_accuracy(beta: float, tail: bool) -> None:
    x = jax.tree.map(lambda *each: np.stack(each), *(_drawn(seed, 5, False) for seed in range(4)))
    options = {"divergence": "jsd", "beta": beta, "tail": tail}
    got, gradient = with_gradients(functools.partial(ours, **options), x)
    with jax.enable_x64(True):
        want, needs_grad = with_gradients(functools.partial(exact, **options), oracle.to64(x))
    # The tail's probability, of a tenth and more, is rounded at the size of 1.
    np.testing.assert_allclose(got, want, rtol=2e-5)
    found, right = (np.asarray(of["log_probs"]) for of in (gradient, needs_grad))
    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-4 * np.abs(right).max())


@every_kind
def test_the_mean_of_a_row_with_a_nan_is_nan(divergence: Any, tail: bool) -> None:
    """Also where the student has no probability at all."""
    for student, teacher in (([-1.0, np.nan], [-1.0, -1.0]), ([-np.inf, -np.inf], [np.nan, -1.0])):
        assert np.isnan(top_k_distillation_loss([student], [teacher], divergence=divergence, tail=tail))


@pytest.mark.parametrize(("divergence", "want"), [("forward_kl", np.inf), ("reverse_kl", 0.0), ("jsd", np.log(2) / 2)])
def test_a_student_without_probability_at_the_teachers_tokens(divergence: Any, want: float) -> None:
    loss = functools.partial(top_k_distillation_loss, divergence=divergence, tail=False)
    value, gradient = jax.value_and_grad(loss)(jnp.full((1, 2), -jnp.inf), jnp.log(jnp.array([[0.5, 0.3]])))
    assert value == pytest.approx(want, rel=1e-6)
    assert jnp.isfinite(gradient).all()
