"""Gradients added to a sum by the Hopper kernels, under the GPU interpreter, beside the float64 oracle's."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ce.backends.mosaic_gpu import plans, recomputation
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import HeadSpec
from tests.pallas_ce.problems import Problem, make, narrow_problems, readable
from tests.pallas_ce.sums import LOSS_SCALES, assert_adds_16_bits, several_blocks


def check(p: Problem, loss_scale: float, backward: Any, *, narrow: bool, several: bool) -> None:
    options: dict[str, Any] = {"implementation": "mosaic_gpu"}
    if several:
        options["scratch_bytes"] = several_blocks(p, "mosaic_gpu", backward)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        assert_adds_16_bits(p, loss_scale, backward, narrow=narrow, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("small_backend")
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize(("vocab_axis", "narrow"), [(0, False), (1, False), (1, True)])
def test_several_blocks_are_added(interpreted: Any, vocab_axis: int, narrow: bool, backward: Any) -> None:
    p, rng = make(3, 150, 40, 136, vocab_axis=vocab_axis), np.random.default_rng(0)
    p.arrays["bias"] = rng.normal(size=136).astype(np.float32)
    p.arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in p.arrays.items()}
    p.arrays["token_weights"] = rng.uniform(0, 2, size=150).astype(np.float32)
    p.options["vocab_size"] = 131
    check(p, -3.0, backward, narrow=narrow, several=True)


@pytest.mark.slow
@pytest.mark.usefixtures("small_backend")
@hypothesis.settings(
    max_examples=max(1, hypothesis.settings.default.max_examples // 8),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    p=narrow_problems().map(readable), loss_scale=LOSS_SCALES, backward=st.sampled_from(["recompute", "in_forward"]),
    narrow=st.booleans(), several=st.booleans(),
)  # fmt: skip
def test_any_options(
    interpreted: Any, p: Problem, loss_scale: float, backward: Any, narrow: bool, several: bool
) -> None:
    check(p, loss_scale, backward, narrow=narrow, several=several)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("rows", [256, 128])
def test_a_sum_is_added_to_where_it_lies(interpreted: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Recompute of all rows has the product kernel add to the sum, of several blocks to that of a tile."""
    n, h, v = 256, 256, 320
    monkeypatch.setattr(plans, "recompute", lambda *given: Plan(rows, 256, 2**20, v, skips_rows=True))
    p = make(5, n, h, v)
    p.arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in p.arrays.items()}
    assert recomputation.in_place(HeadSpec(h, v, v, 0, p.arrays["hidden"].dtype, None), rows, 256)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        assert_adds_16_bits(p, 0.3, "recompute", narrow=False, implementation="mosaic_gpu", scratch_bytes=2**20)
