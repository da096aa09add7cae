"""The contract's drawn problems through the Hopper kernels, under the GPU interpreter."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.pallas_ce.checks import assert_as_accurate_as_rounded_dlogits, library_results
from tests.pallas_ce.problems import Problem, narrow_problems, readable


@pytest.mark.slow
@pytest.mark.usefixtures("small_backend")
@hypothesis.settings(
    max_examples=max(1, hypothesis.settings.default.max_examples // 8),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(p=narrow_problems().map(readable), backward=st.sampled_from(["recompute", "in_forward"]))
def test_any_options(interpreted: Any, p: Problem, backward: Any) -> None:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = library_results(p, "mosaic_gpu", backward)
    assert_as_accurate_as_rounded_dlogits(p, got, backward)
