"""The calls of `tests/pallas_ce/test_calls.py` through the kernels, under the GPU interpreter."""

from typing import Any

import pytest

from tests.pallas_ce.test_calls import CALLS, check

pytestmark = [pytest.mark.usefixtures("small_backend"), pytest.mark.slow]


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
# The interpreter's effects cannot be rematerialised.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "rematerialised"])
def test_each_call(name: str, backward: str, interpreted: Any) -> None:
    check(name, "mosaic_gpu", backward, compiled=interpreted)
