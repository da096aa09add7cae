"""Several CPU devices: every parallelism, in processes of their own, on one host and as on two."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def started(devices: int, module: str, *arguments: str, **environment: str) -> subprocess.Popen[Any]:
    """Starts a module as a program in a process with `devices` CPUs."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def assert_passed(processes: list[subprocess.Popen[Any]], checks: int, timeout: int | None = None) -> None:
    """Each process ends well and has printed that `checks` checks passed."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.count("passed") == checks, output


@pytest.mark.parametrize(
    ("program", "section", "checks"),
    [
        ("mesh_program", "auto", 24),
        pytest.param("mesh_program", "explicit", 17, marks=pytest.mark.slow),
        pytest.param("mesh_program", "checked", 35, marks=pytest.mark.slow),
        pytest.param("mesh_program", "unchecked", 34, marks=[pytest.mark.slow, pytest.mark.nightly]),
        ("mesh_calls_program", "others", 10),
        pytest.param("mesh_calls_program", "running", 20, marks=pytest.mark.slow),
        ("mesh_calls_program", "unsaid", 4),
        ("mesh_calls_program", "shifted", 2),
        pytest.param("partly_manual_program", "", 22, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_eight_devices_give_the_result_of_one(program: str, section: str, checks: int) -> None:
    assert_passed([started(8, f"tests.pallas_ce.{program}", section)], checks)


@pytest.mark.parametrize("chosen", ["not any", pytest.param("any", marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_any_options_and_any_layout_on_eight_devices(chosen: str) -> None:
    """The layouts that were refused once, and drawn ones."""
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    assert_passed([started(8, "pytest", *plugins, "tests/pallas_ce/on_a_mesh.py", "-k", chosen)], 1)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one() -> None:
    """JAX's distributed runtime, collectives over sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    assert_passed(
        [started(4, "tests.pallas_ce.hosts_program", address, str(index), **gloo) for index in range(2)], 8, timeout=600
    )
