"""Gradients added to a sum by the Hopper kernels, under the GPU interpreter, beside the float64 oracle's."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.pallas_ce.problems import Problem, make, narrow_problems
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
    p=narrow_problems(), loss_scale=LOSS_SCALES, backward=st.sampled_from(["recompute", "in_forward"]),
    narrow=st.booleans(), several=st.booleans(),
)  # fmt: skip
def test_any_options(
    interpreted: Any, p: Problem, loss_scale: float, backward: Any, narrow: bool, several: bool
) -> None:
    check(p, loss_scale, backward, narrow=narrow, several=several)
