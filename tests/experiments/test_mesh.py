"""`--mesh`: trainings on eight CPU devices, or all GPUs, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[2]
_CPUS = {
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
}


def _run(section: str, *arguments: str, devices: dict[str, str] = _CPUS) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.experiments.mesh_program", section, *arguments],
        cwd=ROOT, env=os.environ | devices | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("section", "checks"), [("widest", 1), pytest.param("others", 5, marks=pytest.mark.nightly)])
def test_every_mesh_gives_the_losses_of_one_device(section: str, checks: int) -> None:
    assert _run(section).count("passed") == checks


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_begun_on_one_mesh_goes_on_on_another(arguments: Any, tmp_path: Path) -> None:
    out = _run("command", str(tmp_path), *arguments(steps=8, batch_size=8, attention_heads=4))
    assert "passed" in out
    assert "mesh: data=2, tensor=2, sequence; 4 of 8 devices" in out
    assert "mesh: data=2, fsdp=2, tensor=2\n" in out


@pytest.mark.gpu
def test_every_mesh_of_gpus_gives_the_curve_of_one() -> None:
    if (gpus := len(jax.devices())) < 2:
        pytest.skip("one GPU")
    # Neither this process nor that one may take the GPUs' memory beforehand.
    out = _run("gpus", devices={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"})
    print(out)
    assert out.count("passed") == (5 if gpus >= 4 else 4)
