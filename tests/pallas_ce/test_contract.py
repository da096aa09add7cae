"""The contract against the float64 oracle, for every backend and mode, over drawn shapes and options."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import RowStatistics, linear_loss, linear_row_statistics
from pallas_ce.statistics.row import STATISTICS
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, float32_floor, library_loss, library_results, oracle_results
from tests.pallas_ce.problems import STREAMED, WAYS, Problem, make, problems, statistics_problems

DIFFERENTIABLE = [name for name in STATISTICS if name != "argmax"]


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
@hypothesis.given(p=problems())
def test_loss_and_gradients_match_the_oracle_in_float32(p: Problem, implementation: str, backward: Any) -> None:
    got, want = library_results(p, implementation, backward), oracle_results(p)
    assert_close(got, want, 1e-5, floor=float32_floor(want[0]))


@pytest.mark.parametrize(("implementation", "backward"), STREAMED)
@hypothesis.given(p=problems(), divisor=st.integers(2, 60))
def test_any_scratch_budget_gives_the_same_result(p: Problem, divisor: int, implementation: str, backward: Any) -> None:
    (n, h), v = p.arrays["hidden"].shape, p.arrays["weight"].shape[0]
    small = max(12 * n * v // divisor, 4 * v + 12 + 24 * h)
    got = library_results(p, implementation, backward, scratch_bytes=small)
    want = oracle_results(p)
    terms = np.abs(p.arrays["hidden"]) @ np.abs(p.arrays["weight"]).T * abs(p.arrays.get("logit_scale", 1.0))
    assert_close(got, want, 1e-5, floor=float32_floor(want[0], terms.max()))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@hypothesis.given(p=statistics_problems(), data=st.data())
def test_statistics_and_any_cotangents_match_the_oracle(p: Problem, data: Any, implementation: str) -> None:
    names = data.draw(st.lists(st.sampled_from(STATISTICS), min_size=1, unique=True))
    real = p.options.get("vocab_size", p.arrays["weight"].shape[0])
    rng = np.random.default_rng(0)
    u = data.draw(st.sampled_from([None, rng.normal(size=real).astype(np.float32)]))
    n = p.labels.shape[0]
    mask = data.draw(st.sampled_from([None, rng.random(n) < 0.6]))
    logits = oracle.Logits(p.arrays, **p.options)
    values, slopes = oracle.statistics(logits, p.labels, u)
    cotangents = {k: rng.normal(size=values[k].shape).astype(np.float32) for k in names if k != "argmax"}

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def ours(arrays: dict[str, Any]) -> Any:
        arrays = dict(arrays)
        weight = arrays.pop("weight")
        found = linear_row_statistics(
            arrays.pop("hidden"), weight if p.vocab_axis == 0 else weight.T, p.labels, statistics=names,
            row_mask=mask, logit_weights=u, vocab_axis=p.vocab_axis, implementation=implementation,
            **arrays, **p.options,
        )  # fmt: skip
        return sum(jnp.sum(getattr(found, k) * g) for k, g in cotangents.items()) + 0.0, found

    (_, found), gradients = ours(jax.tree.map(jnp.asarray, p.arrays))
    counts = np.ones(n, bool) if mask is None else mask
    dz = counts[:, None] * (oracle.pull_back(slopes, cotangents) + np.zeros_like(logits.z))

    assert {k for k, x in found._asdict().items() if x is not None} == set(names)
    for name in names:
        want = np.where(counts.reshape(n, *[1] * (values[name].ndim - 1)), values[name], 0)
        assert_close(getattr(found, name), want, 1e-5, floor=5e-6)
    assert_close(gradients, logits.gradients(dz), 1e-5, floor=1e-5)


def _weighted(s: RowStatistics, weights: dict[str, Any]) -> Any:
    products = (getattr(s, name) * g for name, g in weights.items())
    return sum(jnp.sum(x.reshape(x.shape[0], -1), axis=1) for x in products)


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
@hypothesis.given(p=statistics_problems(), data=st.data())
def test_a_summed_loss_of_any_statistics_matches_the_oracle(
    p: Problem, data: Any, implementation: str, backward: Any
) -> None:
    names = data.draw(st.lists(st.sampled_from(DIFFERENTIABLE), min_size=1, max_size=4, unique=True))
    n, v = p.labels.shape[0], p.options.get("vocab_size", p.arrays["weight"].shape[0])
    rows, width = p.arrays["weight"].shape
    small = max(12 * n * rows // 20, 4 * rows + 12 + 24 * width)
    budget = data.draw(st.sampled_from([None, small])) if implementation == "xla" else None
    rng = np.random.default_rng(1)
    real = (p.labels >= 0) & (p.labels < v)
    counts = real.reshape(n, -1).any(axis=1)
    logits = oracle.Logits(p.arrays, **p.options)
    values, slopes = oracle.statistics(logits, p.labels)
    weights = {name: rng.normal(size=values[name].shape).astype(np.float32) for name in names}

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def ours(arrays: dict[str, Any], weights: dict[str, Any]) -> Any:
        arrays = dict(arrays)
        weight = arrays.pop("weight")
        return linear_loss(
            lambda s, *rest: _weighted(s, dict(zip(names, rest, strict=True))),
            arrays.pop("hidden"), weight if p.vocab_axis == 0 else weight.T, p.labels, *(weights[k] for k in names),
            reduction="sum", vocab_axis=p.vocab_axis, implementation=implementation, backward=backward,
            scratch_bytes=budget, **arrays, **p.options,
        )  # fmt: skip

    value, (gradients, by_weight) = ours(jax.tree.map(jnp.asarray, p.arrays), weights)
    counted = {k: np.where(counts.reshape(n, *[1] * (x.ndim - 1)), x, 0) for k, x in values.items()}
    products = [g * counted[name] for name, g in weights.items()]
    size = sum(np.abs(x).sum() for x in products)
    assert_close(value, sum(x.sum() for x in products), 1e-5, floor=1e-6 * max(1.0, size))
    assert_close(by_weight, {name: counted[name] for name in names}, 1e-5, floor=5e-6)
    assert_close(gradients, logits.gradients(counts[:, None] * oracle.pull_back(slopes, weights)), 1e-5, floor=1e-5)


def _every_statistic(s: Any, advantage: Any, pair: Any, beta: Any) -> Any:
    ratio = jnp.exp(0.1 * s.log_prob + pair[:, 0])
    spread = (s.lse - s.expected_logit) ** 2 + s.max_logit * s.mean_logit
    return ratio * advantage - beta * s.entropy + s.sum_sq_probs * pair[:, 1] + 0.1 * s.varentropy + spread


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
def test_a_row_loss_on_every_statistic_and_its_row_inputs(implementation: str, backward: Any) -> None:
    p = make(3, 37, 12, 71)
    rng = np.random.default_rng(5)
    inputs = (rng.normal(size=37), rng.normal(size=(37, 2)), 0.3, rng.uniform(0.5, 2, size=37))

    def ours(hidden: Any, weight: Any, *rest: Any) -> Any:
        return linear_loss(_every_statistic, hidden, weight, p.labels, *rest[:-1], token_weights=rest[-1],
                           implementation=implementation, backward=backward)  # fmt: skip

    def theirs(hidden: Any, weight: Any, *rest: Any) -> Any:
        z = hidden @ weight.T
        log_p = jax.nn.log_softmax(z)
        prob = jnp.exp(log_p)
        labels, counts = jnp.where(p.labels < 0, 0, p.labels), p.labels >= 0
        found = RowStatistics(
            lse=jax.nn.logsumexp(z, 1), log_prob=jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0],
            mean_logit=z.mean(1), entropy=-(prob * log_p).sum(1), expected_logit=(prob * z).sum(1),
            sum_sq_probs=(prob * prob).sum(1), max_logit=z.max(1),
            varentropy=(prob * log_p**2).sum(1) - (prob * log_p).sum(1) ** 2,
        )  # fmt: skip
        return jnp.where(counts, _every_statistic(found, *rest[:-1]) * rest[-1], 0).sum() / rest[-1][counts].sum()

    arguments = (p.arrays["hidden"], p.arrays["weight"], *inputs)
    argnums = tuple(range(len(arguments)))
    got = jax.value_and_grad(ours, argnums)(*(jnp.asarray(x, jnp.float32) for x in arguments))
    with jax.enable_x64(True):
        want = jax.value_and_grad(theirs, argnums)(*(jnp.asarray(np.float32(x), jnp.float64) for x in arguments))
        want = jax.tree.map(np.asarray, want)
    assert_close(got, want, 1e-5, floor=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@hypothesis.given(p=problems())
def test_non_uniform_cotangents_under_reduction_none(p: Problem, implementation: Any) -> None:
    p.options = {k: v for k, v in p.options.items() if k != "normalizer"} | {"reduction": "none"}
    cotangent = np.random.default_rng(0).normal(size=p.labels.size).astype(np.float32)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def weighted(arrays: dict[str, Any]) -> Any:
        values = library_loss(p, arrays, implementation=implementation)
        return jnp.sum(values * cotangent), values

    (_, values), gradients = weighted(jax.tree.map(jnp.asarray, p.arrays))
    want, want_gradients = oracle.cross_entropy(p.arrays, p.labels, p.options, cotangent)
    floor = 1e-6 * max(1.0, np.max(np.abs(want)))
    assert_close(values, want, 1e-5, floor=floor)
    assert_close(gradients, want_gradients, 1e-5, floor=floor)


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
def test_float64_is_served_in_float64(implementation: str, backward: Any) -> None:
    p = make(2, 20, 9, 40)
    p.options = {"z_loss": 0.01, "label_smoothing": 0.1}
    with jax.enable_x64(True):
        q = Problem(oracle.to64(p.arrays), p.labels, p.options, 0)
        got = library_results(q, implementation, backward)
        assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float64)}
        got = jax.tree.map(np.asarray, got)
    assert_close(got, oracle_results(p), 1e-12, floor=1e-14)
