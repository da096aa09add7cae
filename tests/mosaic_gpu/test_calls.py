"""The calls of `tests/pallas_ce/test_calls.py` through the kernels, under the GPU interpreter."""

from typing import Any

import pytest

from tests.pallas_ce.test_calls import CALLS, check, of_each_row, rematerialised, summed

pytestmark = [pytest.mark.usefixtures("small_backend"), pytest.mark.slow]


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
# The interpreter's effects cannot be rematerialised.
@pytest.mark.parametrize("call", [c for c in CALLS if c is not rematerialised], ids=lambda call: call.__name__)
def test_each_call(call: Any, backward: str, interpreted: Any) -> None:
    check(call, "mosaic_gpu", backward, compiled=interpreted)


def test_a_loss_for_each_row(interpreted: Any) -> None:
    check(of_each_row, "mosaic_gpu", "recompute", compiled=interpreted)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("differentiated", [(0,), (1,)], ids=["frozen weight", "frozen hidden"])
def test_what_is_frozen(differentiated: tuple[int, ...], backward: str, interpreted: Any) -> None:
    check(summed, "mosaic_gpu", backward, differentiated, compiled=interpreted)
