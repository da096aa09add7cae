"""The calls of `tests/pallas_ce/test_calls.py` through the kernels, under the GPU interpreter."""

from typing import Any

import pytest

from tests.pallas_ce.test_calls import CALLS, check, rematerialised

pytestmark = [pytest.mark.usefixtures("small_backend"), pytest.mark.slow]


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
# The interpreter's effects cannot be rematerialised.
@pytest.mark.parametrize("call", [c for c in CALLS if c is not rematerialised], ids=lambda call: call.__name__)
def test_each_call(call: Any, backward: str, interpreted: Any) -> None:
    check(call, "mosaic_gpu", backward, compiled=interpreted)
