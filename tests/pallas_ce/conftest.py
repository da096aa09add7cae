"""The tests of the contract know one more backend, "toy"."""

import sys
from types import ModuleType

import pytest

from pallas_ce.backends import select
from tests.pallas_ce.toy_backend import ToyBackend


@pytest.fixture(autouse=True)
def toy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it known by its name, as a folder of its own in `pallas_ce/backends` would."""
    module = ModuleType("pallas_ce.backends.toy")
    module.BACKEND = ToyBackend()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (*select.IMPLEMENTATIONS, "toy"))
