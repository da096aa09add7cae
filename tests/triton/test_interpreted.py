"""Runs `in_interpreter.py`: kernels are interpreted in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = Path(__file__).with_name("in_interpreter.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marked", "tiles"),
    [
        ("not nightly and not drawn", ""),
        *(pytest.param("nightly or drawn", tiles, marks=pytest.mark.nightly) for tiles in ("pointers", "descriptors")),
    ],
)
def test_the_contract_holds_in_the_interpreter(marked: str, tiles: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(CONTRACT)]
    without = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"TRITON_INTERPRET": "1"}
    root = CONTRACT.parents[2]
    done = subprocess.run(
        [*command, "-m", marked, "-k", tiles], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
