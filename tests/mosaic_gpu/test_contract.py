"""The contract of every implementation, with implementation="mosaic_gpu" under the GPU interpreter."""

import itertools
from typing import Any

import hypothesis
import pytest

from tests.pallas_ce import spoilt
from tests.pallas_ce.cases import CASES, Sizes
from tests.pallas_ce.kernel_cases import nightly_but_for
from tests.pallas_ce.problems import Problem, narrow_problems, readable
from tests.pallas_ce.sums import ANY_CALL, assert_any_options

MODES = ["recompute", "in_forward"]

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.slow]


@hypothesis.settings(max_examples=2, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(p=narrow_problems().map(readable), **ANY_CALL)
def test_any_options(p: Problem, **how: Any) -> None:
    assert_any_options("mosaic_gpu", p, **how)


SMALL = Sizes(rows=70, width=64, classes=131, padded=136, dtype="bfloat16", scratch_bytes=None)
# Temperatures of each row are none of the kernels'.
SPOILT = [
    (name, backward, tuple(x for x in CASES[name].inputs if x != "temperature"))
    for name in ("linear_cross_entropy", "linear_cross_entropy, low rank", "linear_row_statistics", "linear_loss")
    for backward in ([""] if name == "linear_row_statistics" else MODES)
]


@pytest.mark.usefixtures("maxima_keep_nan")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is NumPy's
@pytest.mark.parametrize(
    ("name", "backward", "inputs"), nightly_but_for([("linear_cross_entropy", "recompute", ("hidden",))], SPOILT)
)
def test_what_is_not_finite_is_where_plain_jax_has_it(name: str, backward: str, inputs: tuple[str, ...]) -> None:
    case = CASES[name].without("temperature")
    for seed, only in itertools.product(range(2), inputs):
        spoilt.check(case, SMALL, ("mosaic_gpu", backward), seed, [only])
