"""On two devices: shard_map, pmap and sharded arrays, in a process that has two CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_devices_give_the_result_of_one() -> None:
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_ce.mesh_program"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 10
