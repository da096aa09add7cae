"""On eight CPU devices: every parallelism, each section of `mesh_program.py` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("section", "checks"),
    [
        ("auto", 32),
        ("others", 10),
        pytest.param("explicit", 17, marks=pytest.mark.slow),
        pytest.param("checked", 35, marks=pytest.mark.slow),
        pytest.param("unchecked", 34, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_eight_devices_give_the_result_of_one(section: str, checks: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_ce.mesh_program", section],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == checks, done.stdout
