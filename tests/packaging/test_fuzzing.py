"""What `make fuzz` runs pytest with: it ends in time, and what it prints about a failure runs that alone."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

DRAWN = """
import hypothesis
import hypothesis.strategies as st

@hypothesis.given(x=st.integers(0, 10**6))
def test_holds(x):
    assert x >= 0

@hypothesis.given(x=st.integers(0, 10**6))
def test_fails_from_1000_on(x):
    assert x < 1000, f"found {x}"
"""


def run(folder, *arguments):
    """Pytest in a process of its own, as `make` and the printed command run it."""
    ours = {"PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


def test_a_failure_comes_with_the_command_that_runs_it_alone(tmp_path):
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    said = run(tmp_path, "-p", "tests.fuzzing", "--hypothesis-profile=fuzz", "-m", "drawn", "--minutes=0.02")
    assert "1 failed, 1 passed" in said, said
    assert "found 1000\n" in said
    cases = re.search(r"([\d,]+) cases of 2 drawn tests", said)
    assert cases is not None, said
    assert int(cases[1].replace(",", "")) > 10 + 10  # more than each draws when it is run once
    printed = re.search(r"JAX_PLATFORMS=cpu python -m pytest (-p tests\.fuzzing .*--reproduce=\S+)", said)
    assert printed is not None, said
    again = run(tmp_path, *shlex.split(printed[1]))
    assert "found 1000\n" in again, again
    assert "1 failed" in again
    assert "passed" not in again
