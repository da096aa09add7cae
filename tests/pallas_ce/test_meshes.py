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


def outputs(*processes: subprocess.Popen[Any], timeout: int | None = None) -> list[str]:
    """What each process prints, which ends well."""
    try:
        found = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, found, strict=True):
        assert process.returncode == 0, output
    return found


@pytest.mark.parametrize("file", ["split_losses", "split_calls", "on_a_mesh"])
@pytest.mark.parametrize(
    "marked",
    ["not nightly and not drawn", pytest.param("nightly or drawn", marks=[pytest.mark.slow, pytest.mark.nightly])],
)
def test_eight_devices_give_the_result_of_one(file: str, marked: str) -> None:
    if (file, marked) == ("split_calls", "nightly or drawn"):
        pytest.skip("all of it is in the other case")
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q")
    outputs(started(8, "pytest", *plugins, f"tests/pallas_ce/{file}.py", "-m", marked, "--in-all=8"))


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_give_the_result_of_one() -> None:
    """JAX's distributed runtime, collectives over sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    programs = [started(4, "tests.pallas_ce.hosts_program", address, str(i), **gloo) for i in range(2)]
    assert [said.count("passed") for said in outputs(*programs, timeout=600)] == [5, 5]
