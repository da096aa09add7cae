"""`--mesh`: refusals on one device, and trainings on eight CPU devices in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"mesh": mesh}, ["write for instance data=2,tensor=2", "each axis once"])
            for mesh in ("model=2", "data=2,,tensor=2", "data", "data=two", "tensor=0", "data=2,data=2")
        ),
        ({"mesh": "data=2,sequence"}, ["sequence splits tokens over the tensor axis", "at least 2"]),
        ({"mesh": "data=2,tensor=2"}, ["of 4 devices, but there are 1", "data=1"]),
        ({"mesh": "data=3"}, ["batch_size is 4", "data=3", "3 or 6 would"]),
        ({"mesh": "data=2,fsdp=3"}, ["batch_size is 4", "data·fsdp=6", "; 6 would"]),
        ({"mesh": "fsdp=3", "batch_size": 6}, ["width is 16", "fsdp=3", "15 or 18 would"]),
        ({"mesh": "tensor=4"}, ["attention_heads is 2", "tensor=4", "; 4 would"]),
        ({"mesh": "tensor=2", "mlp_width": 33}, ["mlp_width is 33", "tensor=2", "32 or 34 would"]),
        ({"mesh": "tensor=2,sequence", "sequence_length": 15}, ["sequence_length is 15", "14 or 16 would"]),
    ],
)
def test_a_mesh_that_cannot_be_served_is_refused_with_what_would_work(
    train: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    finished = train(out=tmp_path / "run", **changes)
    assert finished.code == 2
    assert finished.err.count("\n") == 1
    for word in (*words, "error: "):
        assert word in finished.err
    assert not (tmp_path / "run").exists()


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
@pytest.mark.parametrize(("section", "checks"), [("widest", 1), pytest.param("others", 7, marks=pytest.mark.nightly)])
def test_every_mesh_gives_the_losses_of_one_device(section: str, checks: int) -> None:
    assert _run(section).count("passed") == checks


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_begun_on_one_mesh_goes_on_on_another(text: Path, tmp_path: Path) -> None:
    (tmp_path / "text").symlink_to(text)
    out = _run("command", str(tmp_path))
    assert "passed" in out
    assert "mesh: data=2, tensor=2, sequence; 4 of 8 devices" in out
    assert "mesh: data=2, fsdp=2, tensor=2\n" in out


@pytest.mark.gpu
def test_every_mesh_of_gpus_gives_the_curve_of_one() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    # Neither this process nor that one may take the GPUs' memory beforehand.
    out = _run("gpus", devices={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"})
    print(out)
    assert out.count("passed") == 4
