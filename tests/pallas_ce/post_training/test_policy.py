"""Policy losses against the published formulas, written out and differentiated in float64."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import group_advantages, kl_estimate, policy_loss
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close

KL: dict[Any, Any] = {
    "k1": lambda lp, ref: lp - ref,
    "k2": lambda lp, ref: (lp - ref) ** 2 / 2,
    "k3": lambda lp, ref: jnp.exp(ref - lp) - (ref - lp) - 1,
}


def published(x: dict[str, Any], mask: np.ndarray, o: dict[str, Any]) -> Any:
    """The loss as TRL's `grpo`, `bnpo` and `dr_grpo` have it, with PPO's entropy bonus; constants have no gradient."""
    constant, m = jax.lax.stop_gradient, mask.astype(float)
    x = {"old_log_probs": x["log_probs"], **x}
    x = {name: value if name in ("log_probs", "entropy") else constant(value) for name, value in x.items()}
    log_ratio = (x["log_probs"] - x["old_log_probs"]) * m
    if o["level"] != "token":
        log_ratio = log_ratio.sum(-1, keepdims=True) / np.maximum(m.sum(-1, keepdims=True), 1) + 0 * log_ratio
    if o["level"] == "sequence_token":
        log_ratio = constant(log_ratio) + x["log_probs"] - constant(x["log_probs"])
    r = jnp.exp(log_ratio)
    a = x["advantages"] if x["advantages"].ndim == m.ndim else x["advantages"][..., None]
    clipped = jnp.clip(r, 1 - o["clip_low"], 1 + o["clip_high"])
    first = jnp.minimum(r, o.get("ratio_limit") or np.inf) * a
    t = jnp.where(a > 0, *o["gate_temperatures"])
    gained = {
        "clip": jnp.minimum(first, clipped * a),
        "cispo": constant(clipped) * a * x["log_probs"],
        "sapo": 4 / t / (1 + jnp.exp(-t * (r - 1))) * a,
    }[o["objective"]]
    v, (least, most) = jnp.exp(x["old_log_probs"] - x["sampler_log_probs"]), o["sampler_range"]
    inside = (v >= least) & (v <= most)
    per_token = -gained * (jnp.clip(v, least, most) if o["sampler_weights"] == "truncate" else v * inside)
    per_token = per_token + o["kl_coefficient"] * KL[o["kl_estimator"]](x["log_probs"], x["ref_log_probs"])
    per_token = per_token - o["entropy_coefficient"] * x["entropy"]
    how, given = o["aggregation"], o.get("normalizer")
    if how == "token_mean":
        return (per_token * m).sum() / (given or max(m.sum(), 1))
    if how == "sequence_mean":
        return ((per_token * m).sum(-1) / np.maximum(m.sum(-1), 1)).sum() / (given or m[..., 0].size)
    return (per_token * m).sum() / (o["length"] * (given or m[..., 0].size))


@st.composite
def rollouts(draw: Any, objective: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Log-probabilities that wander off the sampling policy's, some sequences without tokens; any options."""
    shape = draw(st.sampled_from([(5,), (2, 2, 4)]))  # two shapes: each operation is compiled for each
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    log_probs = -rng.exponential(1.5, shape)
    off = draw(st.sampled_from([0.01, 0.5]))
    x = {
        "log_probs": log_probs,
        "old_log_probs": log_probs + off * rng.normal(size=shape),
        "ref_log_probs": log_probs + off * rng.normal(size=shape),
        "sampler_log_probs": log_probs + off * rng.normal(size=shape),
        "entropy": rng.exponential(1.0, shape),
        "advantages": rng.normal(size=draw(st.sampled_from([shape, shape[:-1]]))),
    }
    x = {name: value.astype(np.float32) for name, value in x.items()}
    if draw(st.booleans()):
        del x["old_log_probs"]
    x["mask"] = rng.random(shape) < draw(st.sampled_from([0.7, 1.0, 0.0]))
    o = {
        "level": draw(st.sampled_from(["token", "sequence", "sequence_token"])),
        "clip_low": draw(st.sampled_from([0.2, 3e-4])),
        "clip_high": draw(st.sampled_from([0.2, 0.28])),
        "objective": objective,
        "gate_temperatures": draw(st.sampled_from([(1.0, 1.05), (0.5, 3.0)])),
        "sampler_weights": draw(st.sampled_from(["truncate", "mask"])),
        "sampler_range": draw(st.sampled_from([(0.0, 2.0), (0.7, 1.3)])),
        "kl_coefficient": draw(st.sampled_from([0.0, 0.3])),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"])),
        "entropy_coefficient": draw(st.sampled_from([0.0, 0.1])),
        "aggregation": draw(st.sampled_from(["token_mean", "sequence_mean", "fixed_length"])),
        "normalizer": draw(st.sampled_from([None, 11.0])),
    }
    if o["aggregation"] == "fixed_length":
        o["length"] = 9
    if objective == "clip":
        o["ratio_limit"] = draw(st.sampled_from([None, 1.5]))
    return x, o


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
@hypothesis.given(data=st.data())
def test_value_and_gradients_are_those_of_the_published_formula(objective: str, data: Any) -> None:
    x, o = data.draw(rollouts(objective))
    mask = x.pop("mask")
    value, gradients = jax.value_and_grad(lambda given: policy_loss(**given, mask=mask, **o))(x)
    with jax.enable_x64(True):
        want, exact = jax.value_and_grad(lambda given: published(given, mask, o))(oracle.to64(x))
    assert_close(value, want, 1e-5, floor=1e-6)
    assert_close(gradients, exact, 1e-5, floor=1e-6)


def test_a_samplers_weights_are_measured() -> None:
    sampler = jnp.log(jnp.array([[0.5, 0.1, 0.9]]))  # weights 1, 5 and 5/9
    given = jnp.log(jnp.full((1, 3), 0.5)), jnp.ones(1)
    for how, want in (("truncate", [1, 2, 5 / 9]), ("mask", [1, 0, 5 / 9])):
        options: dict[str, Any] = {"sampler_weights": how, "return_metrics": True}
        metrics = policy_loss(*given, sampler_log_probs=sampler, **options)[1]
        np.testing.assert_allclose(metrics.sampler_weight, np.mean(want), rtol=1e-5)


def test_ratios_that_would_overflow_keep_finite_gradients() -> None:
    log_probs = jnp.array([[0.0, -1000.0, 0.0, 0.0]])
    old = jnp.array([[-1000.0, 0.0, -1000.0, -1000.0]])
    advantages = jnp.array([[1.0, 1.0, -1e-30, 0.0]])
    for level in ("token", "sequence", "sequence_token"):
        gradient = jax.grad(policy_loss)(
            log_probs, advantages, old_log_probs=old, ref_log_probs=old, kl_coefficient=1e-30, level=level
        )
        assert np.all(np.isfinite(gradient)), level


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_at_its_bound_has_its_whole_gradient(advantage: float) -> None:
    """As the first of several updates has it where a bound is 0: all ratios are 1."""
    old = jnp.zeros((1, 2))
    for bounds in ({"clip_low": 0.0}, {"clip_high": 0.0}, {"clip_low": 0.0, "clip_high": 0.0, "ratio_limit": 3.0}):
        gradient = jax.grad(policy_loss)(old, jnp.full(1, advantage), old_log_probs=old, **bounds)
        np.testing.assert_array_equal(gradient, np.full((1, 2), -advantage / 2))


def test_metrics_count_the_tokens_whose_gradient_is_clipped() -> None:
    log_probs = jnp.log(jnp.array([[0.1, 0.1, 0.9, 0.9, 0.5]]))
    advantages = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
    mask = jnp.array([[True, True, True, True, False]])
    old = jnp.log(jnp.full((1, 5), 0.5))
    (_, metrics), gradient = jax.value_and_grad(policy_loss, has_aux=True)(
        log_probs, advantages, mask, old_log_probs=old, ref_log_probs=old, return_metrics=True
    )
    assert metrics.clipped_low == metrics.clipped_high == 0.25
    np.testing.assert_array_equal(np.asarray(gradient)[0] == 0, [False, True, True, False, True])
    np.testing.assert_allclose(metrics.ratio, 1.0, rtol=1e-6)
    np.testing.assert_allclose(metrics.kl, np.mean([4 + np.log(0.2)] * 2 + [5 / 9 - 1 - np.log(5 / 9)] * 2), rtol=1e-5)
    assert metrics.entropy is None
    options: dict[str, Any] = {"old_log_probs": old, "return_metrics": True}
    bounded = policy_loss(log_probs, advantages, mask, objective="cispo", **options)[1]
    assert bounded.clipped_low == bounded.clipped_high == 0.5
    assert policy_loss(log_probs, advantages, mask, objective="sapo", **options)[1].clipped_low is None


def test_kl_estimates_are_accurate_where_both_are_close_unbiased_and_zero_of_a_token_that_no_policy_allows() -> None:
    """The published formulas are the penalties of `published`."""
    assert_close(kl_estimate(jnp.float32(0.001), jnp.float32(0.0), "k3"), np.expm1(-1e-3) + 1e-3, 1e-3, floor=0)
    p, q = np.random.default_rng(0).dirichlet(np.ones(5), size=2)
    mean = np.sum(p * np.asarray(kl_estimate(jnp.log(p), jnp.log(q), "k1")))
    np.testing.assert_allclose(mean, np.sum(p * np.log(p / q)), rtol=1e-5)
    for estimator in KL:
        assert kl_estimate(jnp.array(-jnp.inf), jnp.array(-jnp.inf), estimator) == 0


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: Any, baseline: Any) -> None:
    rewards = np.random.default_rng(0).normal(size=12)
    groups = rewards.reshape(3, 4)
    want = groups - groups.mean(1, keepdims=True)
    if baseline == "leave_one_out":
        want = groups - (groups.sum(1, keepdims=True) - groups) / 3
    deviation = {"group": groups.std(1, ddof=1, keepdims=True), "batch": rewards.std(ddof=1), "none": 1 - 1e-4}[scale]
    assert_close(
        group_advantages(rewards, 4, baseline=baseline, scale=scale), (want / (deviation + 1e-4)).reshape(-1), 1e-5
    )


def test_advantages_of_equal_rewards_are_zero_and_none_has_a_gradient() -> None:
    assert np.all(np.asarray(group_advantages(jnp.full(6, 0.1), 3)) == 0)
    assert np.all(np.asarray(jax.grad(lambda r: group_advantages(r, 2)[0])(jnp.array([1.0, 2.0]))) == 0)


def test_a_fixed_length_of_a_large_batch_does_not_overflow() -> None:
    x = -jnp.ones((2, 3)), jnp.ones(2)
    want = policy_loss(*x, aggregation="fixed_length", length=1) / (32768.0 * 65536 / 2)
    for count in (65536, jnp.int32(65536), jnp.float16(64) * jnp.float32(1024)):
        got = policy_loss(*x, aggregation="fixed_length", length=32768, normalizer=count)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    small = policy_loss(*x, aggregation="fixed_length", length=4096, normalizer=jnp.float16(64))
    np.testing.assert_allclose(small, want * 8192, rtol=1e-6)


OUTSIDE = ("log_probs", "old_log_probs", "ref_log_probs", "sampler_log_probs")


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
@pytest.mark.parametrize("outside", [OUTSIDE, *((name,) for name in OUTSIDE)], ids=str)
def test_a_token_outside_a_support_is_as_one_that_is_masked(objective: Any, outside: tuple[str, ...]) -> None:
    """In value, gradient and metrics; no token of the second sequence counts."""
    rng, at = np.random.default_rng(0), ([0, 1, 1, 1], [1, 0, 1, 2])
    clean = {name: -rng.exponential(1.0, (3, 3)).astype(np.float32) for name in OUTSIDE}
    spoilt, mask = {name: x.copy() for name, x in clean.items()}, np.ones((3, 3), bool)
    mask[at] = False
    for name in outside:
        spoilt[name][at] = -np.inf

    def run(x: Any, mask: Any, **how: Any) -> Any:
        options = {"objective": objective, "kl_coefficient": 0.1, "return_metrics": True}
        value, metrics = policy_loss(**x, advantages=np.float32([1, -2, 3]), mask=mask, **options, **how)
        return jnp.sum(value), (value, metrics)

    for level, aggregation in (("token", "none"), ("sequence", "sequence_mean"), ("sequence_token", "token_mean")):
        taken = functools.partial(jax.value_and_grad(run, has_aux=True), level=level, aggregation=aggregation)
        got, want = taken(spoilt, None), taken(clean, mask)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(got))
