"""Gradients that `linear_cross_entropy_and_gradients` adds to a sum, beside the oracle's, added in float64."""

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from pallas_ce import LossAndGradients, linear_cross_entropy_and_gradients
from pallas_ce.backends import select
from pallas_ce.head import HeadSpec
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import (
    Results,
    assert_as_accurate_as_rounded_dlogits,
    assert_near_oracle,
    call,
    kind_results,
)
from tests.pallas_ce.problems import Problem, kinds

LOSS_SCALES = st.sampled_from([1.0, 0.3, -8.0])
# How `assert_any_options` calls a kernel. Its interpreter's effects cannot be rematerialised.
ANY_CALL: dict[str, Any] = {
    "kind": kinds(("alone", "jit", "scan", "vmap")),
    "none_counts": st.sampled_from([False, False, False, True]),
    "backward": st.sampled_from(["recompute", "in_forward"]),
    "loss_scale": st.none() | LOSS_SCALES,
    "narrow": st.booleans(),
    "several": st.booleans(),
}
# Processes share the examples.
PARTS = pytest.mark.parametrize("part", range(16))


def drawn_in_parts(part: int, examples: int, problems: Any, implementation: str) -> None:
    """`assert_any_options` of other examples in each part."""

    @hypothesis.seed(part)
    @hypothesis.settings(max_examples=examples // 16, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(p=problems, **ANY_CALL)
    def run(p: Problem, **how: Any) -> None:
        assert_any_options(implementation, p, **how)

    run()


# The largest sizes for a GPU: products of more steps than a kernel's ring has slots, and several tiles each way.
ON_GPU = (1500, 750, 6000)


def add(p: Problem, before: dict[str, np.ndarray], loss_scale: float, **options: Any) -> LossAndGradients:
    """Adds the problem's gradients to `before`: a sum like the weight `[V, H]`, maybe one like the bias."""

    @jax.jit
    def run(arrays: dict[str, Any], before: dict[str, Any]) -> LossAndGradients:
        weight_sum = before["weight"] if p.vocab_axis == 0 else before["weight"].T
        given: dict[str, Any] = {"bias_sum": before["bias"]} if "bias" in before else {}
        given |= {"weight_sum": weight_sum, "loss_scale": loss_scale}
        found: LossAndGradients = call(linear_cross_entropy_and_gradients, p, arrays, **given, **options)
        return found if p.vocab_axis == 0 else found._replace(weight_sum=found.weight_sum.T)

    return run(p.arrays, before)


def _results(found: LossAndGradients) -> Results:
    loss, hidden, weight, bias = found
    return loss, {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})


def assert_adds(p: Problem, loss_scale: float, with_bias: bool = True, **options: Any) -> None:
    """Loss, hidden's gradient and both sums in float32."""
    rng = np.random.default_rng(p.labels.size)
    before = {name: 0.1 * rng.normal(size=p.arrays[name].shape) for name in ("weight", "bias") if name in p.arrays}
    before = {name: x.astype(np.float32) for name, x in before.items() if with_bias or name != "bias"}
    assert_near_oracle(p, _results(add(p, before, loss_scale, **options)), cotangent=loss_scale, before=before)


def assert_adds_16_bits(p: Problem, loss_scale: float, backward: Any, *, narrow: bool, **options: Any) -> None:
    """The same of 16-bit operands, relative to the errors of rounding; the sums are `narrow`, like those, or float32.

    They begin as large as the gradients, which therefore show. Of padding not a bit changes.
    """
    _, exact = oracle.cross_entropy(p.arrays, p.labels, p.options, loss_scale)
    rng, before = np.random.default_rng(0), {}
    for name in ("weight", "bias"):
        if name in p.arrays:
            start = np.sqrt(np.mean(exact[name] ** 2)) * rng.normal(size=exact[name].shape)
            before[name] = start.astype(p.arrays[name].dtype if narrow else np.float32)
    found = _results(add(p, before, loss_scale, backward=backward, **options))
    real = p.options.get("vocab_size", p.arrays["weight"].shape[0])
    for name, start in before.items():
        assert found[1][name].dtype == start.dtype
        np.testing.assert_array_equal(found[1][name][real:], start[real:])
    assert_as_accurate_as_rounded_dlogits(p, found, backward, cotangent=loss_scale, before=before)


def assert_any_options(
    implementation: str, p: Problem, backward: Any, loss_scale: float | None, narrow: bool, several: bool, kind: Any,
    none_counts: bool,
) -> None:  # fmt: skip
    """A loss of 16-bit operands and its gradients, in one block of rows or several, by any kind of call.

    With a loss scale they are added to sums.
    """
    p = dataclasses.replace(p, labels=np.full_like(p.labels, -100)) if none_counts else p
    budget = several_blocks(p, implementation, backward) if several else None
    given: dict[str, Any] = {"implementation": implementation, "scratch_bytes": budget}
    if loss_scale is None:
        assert_as_accurate_as_rounded_dlogits(p, kind_results(p, kind, backward=backward, **given), backward)
    else:
        assert_adds_16_bits(p, loss_scale, backward, narrow=narrow, **given)


def several_blocks(p: Problem, implementation: Any, backward: Any) -> int:
    """A budget for as few blocks of rows as may be, but for more than one; of a single row, the least that it takes."""
    (n, h), (v, _) = p.arrays["hidden"].shape, p.arrays["weight"].shape
    real, softcap = p.options.get("vocab_size", v), p.options.get("logit_softcap")
    rank, backend = len(p.arrays.get("down", ())), select.load(implementation)
    spec = HeadSpec(h, v, real, p.vocab_axis, p.arrays["hidden"].dtype, softcap, rank=rank)
    least = max(backend.minimum_scratch(spec, mode) for mode in (None, backward))
    most = backend.plan(spec, n, backward, 2**30).scratch_bytes
    budgets = {int(x): backend.plan(spec, n, backward, int(x)).rows for x in np.linspace(least, most, 50)}
    return max((x for x, rows in budgets.items() if rows < n), key=budgets.__getitem__, default=least)
