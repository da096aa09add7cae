"""The contract against the float64 oracle, for every backend and mode, over drawn shapes and options."""

import functools
import sys
from types import ModuleType
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import RowStatistics, linear_loss, linear_row_statistics
from pallas_ce.backends import select
from pallas_ce.statistics.row import STATISTICS
from tests.pallas_ce import kernel_cases, oracle
from tests.pallas_ce.checks import (
    assert_as_accurate_as_reference,
    assert_as_accurate_as_rounded_dlogits,
    assert_close,
    assert_near_oracle,
    call,
    kind_results,
    library_loss,
    library_results,
    oracle_results,
    with_gradients,
)
from tests.pallas_ce.problems import (
    STORED,
    STREAMED,
    TOY,
    WAYS,
    Problem,
    kinds,
    narrow_problems,
    problems,
    small_scratch,
    statistics_problems,
)
from tests.pallas_ce.toy_backend import ToyBackend

# The tests of kernels call the tests of statistics with these.
KERNELS = ("triton", "mosaic_gpu")
DIFFERENTIABLE = [name for name in STATISTICS if name != "argmax"]


@pytest.fixture(autouse=True)
def toy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it known by its name, as a folder of its own in `pallas_ce/backends` would."""
    module = ModuleType("pallas_ce.backends.toy")
    module.BACKEND = ToyBackend()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (*select.IMPLEMENTATIONS, "toy"))


HIGHEST = (None, "highest", "float32", jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.F32_F32_F32)


@pytest.mark.parametrize(("implementation", "backward"), [*WAYS, *TOY, *STORED])
@hypothesis.given(
    p=problems(scaled=True), wide=st.booleans(), divisor=st.none() | st.integers(2, 60),
    precision=st.sampled_from(HIGHEST), named=st.booleans(), kind=kinds(),
)  # fmt: skip
def test_loss_and_gradients_match_the_oracle(
    p: Problem, wide: bool, divisor: int | None, precision: Any, named: bool, kind: Any, implementation: str,
    backward: Any,
) -> None:  # fmt: skip
    """Float64 is served in float64; any kind of call gives the same result."""
    streams = (implementation, backward) in (*STREAMED, *TOY)
    options: dict[str, Any] = {"implementation": implementation if named or implementation != "xla" else None}
    if streams and divisor is not None:
        options["scratch_bytes"] = (1 + wide) * small_scratch(p, divisor)
    if not wide and (implementation, backward) not in STORED:
        options["precision"] = precision
    with jax.enable_x64(wide):
        p.arrays = oracle.to64(p.arrays) if wide else p.arrays
        found = kind_results(p, kind, backward=backward, **options)
        assert found[0].dtype == np.dtype(np.float64 if wide else np.float32)
    assert_near_oracle(p, found, wide=wide)


@hypothesis.given(p=narrow_problems(scaled=True), way=st.sampled_from(STREAMED), divisor=st.none() | st.integers(2, 60))
def test_operands_of_16_bits(p: Problem, way: Any, divisor: int | None) -> None:
    scratch = None if divisor is None else small_scratch(p, divisor)
    assert_as_accurate_as_rounded_dlogits(p, library_results(p, *way, scratch_bytes=scratch), way[1])


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_operands_of_16_bits_and_a_low_rank_term(backward: Any) -> None:
    p = kernel_cases.problem_of(kernel_cases.CASES["a term"])
    assert_as_accurate_as_reference(p, library_results(p, "xla", backward), oracle_results(p))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@hypothesis.given(p=statistics_problems(scaled=True), data=st.data())
def test_statistics_and_any_cotangents_match_the_oracle(p: Problem, data: Any, implementation: str) -> None:
    if implementation in KERNELS:
        p.arrays.pop("vocab_scale", None)
    names = data.draw(st.lists(st.sampled_from(STATISTICS), min_size=1, unique=True))
    real = p.options.get("vocab_size", p.arrays["weight"].shape[0])
    rng = np.random.default_rng(0)
    u = data.draw(st.sampled_from([None, rng.normal(size=real).astype(np.float32)]))
    n = p.labels.shape[0]
    mask = data.draw(st.sampled_from([None, rng.random(n) < 0.6]))
    logits = oracle.Logits(p.arrays, **p.options)
    values, slopes = oracle.statistics(logits, p.labels, u)
    cotangents = {k: rng.normal(size=values[k].shape).astype(np.float32) for k in names if k != "argmax"}

    def weighted(found: RowStatistics) -> Any:
        return sum((jnp.sum(getattr(found, k) * g) for k, g in cotangents.items()), 0.0)

    options = {"statistics": names, "row_mask": mask, "logit_weights": u, "implementation": implementation}
    found, gradients = with_gradients(lambda x: call(linear_row_statistics, p, x, **options), p.arrays, weighted)
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


@pytest.mark.parametrize(("implementation", "backward"), [*WAYS, *TOY])
@hypothesis.given(p=statistics_problems(scaled=True), data=st.data())
def test_a_summed_loss_of_any_statistics_matches_the_oracle(
    p: Problem, data: Any, implementation: str, backward: Any
) -> None:
    """Float64 is served in float64, if at all."""
    if implementation in KERNELS:
        p.arrays.pop("vocab_scale", None)
    names = data.draw(st.lists(st.sampled_from(DIFFERENTIABLE), min_size=1, max_size=4, unique=True))
    n, v = p.labels.shape[0], p.options.get("vocab_size", p.arrays["weight"].shape[0])
    wide = implementation not in KERNELS and data.draw(st.booleans())
    reduction = data.draw(st.sampled_from(["sum", "mean"]))
    budget = data.draw(st.sampled_from([None, 20])) if implementation == "xla" else None
    budget = budget and (1 + wide) * small_scratch(p, budget)
    rng, dtype, unit = np.random.default_rng(1), np.float64 if wide else np.float32, 1e-6 if wide else 1.0
    real = (p.labels >= 0) & (p.labels < v)
    counts = real.reshape(n, -1).any(axis=1)
    logits = oracle.Logits(p.arrays, **p.options)
    values, slopes = oracle.statistics(logits, p.labels)
    by_token = data.draw(st.sampled_from([None, rng.uniform(0.3, 2.0, n).astype(dtype)]))
    share = np.where(counts, 1.0 if by_token is None else by_token, 0.0)
    share = share / (1.0 if reduction == "sum" or not counts.any() else share.sum())
    weights = {name: rng.normal(size=values[name].shape).astype(dtype) for name in names}

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def ours(arrays: dict[str, Any], weights: dict[str, Any], factor: jax.Array) -> Any:
        def row_loss(s: RowStatistics, factor: jax.Array, *g: jax.Array) -> Any:
            return factor * _weighted(s, dict(zip(weights, g, strict=True)))

        def loss(*head: Any, **options: Any) -> Any:
            return linear_loss(row_loss, *head, factor, *weights.values(), token_weights=by_token, reduction=reduction,
                               backward=backward, scratch_bytes=budget, **options)  # fmt: skip

        return call(loss, p, arrays, implementation=implementation)

    with jax.enable_x64(wide):
        arrays, factor = jax.tree.map(lambda x: jnp.asarray(x, dtype), p.arrays), jnp.ones((), dtype)
        found = value, (gradients, by_weight, by_factor) = ours(arrays, weights, factor)
        assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(dtype)}
    counted = {k: share.reshape(n, *[1] * (x.ndim - 1)) * x for k, x in values.items()}
    total = sum((g * counted[name]).sum() for name, g in weights.items())
    # A log-probability and the expected logit are differences from the log-sum-exp, whose rounding they keep.
    rows = [np.abs(g.reshape(n, -1)) for g in weights.values()]
    sizes = [np.abs(counted[name].reshape(n, -1)) + np.abs(counted["lse"])[:, None] for name in weights]
    size = sum((g * x).sum() for g, x in zip(rows, sizes, strict=True))
    for x in (value, by_factor):
        assert_close(x, total, 1e-5 * unit, floor=1e-6 * unit * max(1.0, size))
    floor = 5e-6 * unit * max(1.0, np.abs(counted["lse"]).max(initial=0.0))
    assert_close(by_weight, {name: counted[name] for name in names}, 1e-5 * unit, floor=floor)
    # A probability near 1 is a few units in the last place of its logit off, which then meets the head's arrays, and
    # for the scale the products.
    largest = max(1.0, *(float(np.abs(x).max()) for x in p.arrays.values()))
    if "logit_scale" in p.arrays:
        largest = max(largest, float((np.abs(p.arrays["hidden"]) @ np.abs(p.arrays["weight"]).T).max()))
    terms = np.abs(logits.z).max() * np.abs(logits.slope).max() * largest
    want = logits.gradients(share[:, None] * oracle.pull_back(slopes, weights))
    assert_close(gradients, want, 1e-5 * unit, floor=unit * max(1e-5, 2.0**-21 * terms))


@pytest.mark.parametrize("implementation", ["reference", "xla", "stored logits"])
@hypothesis.given(p=problems(scaled=True))
def test_non_uniform_cotangents_under_reduction_none(p: Problem, implementation: Any) -> None:
    p.options = {k: v for k, v in p.options.items() if k != "normalizer"} | {"reduction": "none"}
    cotangent = np.random.default_rng(0).normal(size=p.labels.size).astype(np.float32)

    by_row = functools.partial(library_loss, p, implementation=implementation)
    values, gradients = with_gradients(by_row, p.arrays, lambda values: jnp.sum(values * cotangent))
    want, want_gradients = oracle.cross_entropy(p.arrays, p.labels, p.options, cotangent)
    floor = 1e-6 * max(1.0, np.max(np.abs(want)))
    assert_close(values, want, 1e-5, floor=floor)
    assert_close(gradients, want_gradients, 1e-5, floor=floor)
