"""NaN and infinities in the inputs of calls through the Hopper kernels, under the GPU interpreter."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ce import linear_cross_entropy
from tests.mosaic_gpu.test_backend import arrays, bias_of
from tests.pallas_ce.spoilt import Sizes, check, without
from tests.pallas_ce.spoilt_functions import FUNCTIONS

pytestmark = [
    pytest.mark.usefixtures("small_backend"), pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # the interpreter is NumPy's
]  # fmt: skip
SMALL = Sizes(rows=70, width=64, classes=201, padded=208, dtype="bfloat16", scratch_bytes=None)
CASES = [
    (name, backward, only)
    for name in ("linear_cross_entropy", "linear_cross_entropy, low rank", "linear_row_statistics", "linear_loss")
    for backward in ([""] if name == "linear_row_statistics" else ["in_forward", "recompute"])
    for only in FUNCTIONS[name].inputs
    if only != "temperature"  # of each row, which the kernels do not know
]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("name", "backward", "only"), CASES)
def test_what_is_not_finite_is_where_plain_jax_has_it(name: str, backward: str, only: str, interpreted: Any) -> None:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        for seed in range(4):
            check(without(FUNCTIONS[name], "temperature"), SMALL, ("mosaic_gpu", backward), seed, [only])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_one_nan_in_the_head_makes_every_row_and_every_gradient_nan(
    backward: Any, where: str, interpreted: Any
) -> None:
    given = arrays(70, 64, 208, bias=bias_of(208))
    given[where] = given[where].at[7].set(np.nan)
    labels = np.arange(70) + 8

    def loss(given: Any, implementation: Any = "mosaic_gpu") -> Any:
        return linear_cross_entropy(**given, labels=labels, implementation=implementation, backward=backward)

    value, gradients = interpreted(jax.value_and_grad(loss))(given)
    assert all(np.all(np.isnan(np.asarray(x, np.float32))) for x in (value, *gradients.values()))
