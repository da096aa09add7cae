"""Several processes: one training of theirs, and what each says when another is missing, misled or lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.lm.errors import UsageError
from experiments.lm.run.metrics import curve, read_records
from experiments.lm.run.processes import WAIT_SECONDS, Group, read_group

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize(
    ("given", "environment", "group"),
    [
        ((None, None, None), SLURM, None),
        (("node1:1234", 2, 1), {}, Group("node1", 1234, 2, 1)),
        (("node1:1234", None, None), SLURM, Group("node1", 1234, 4, 3)),
        (("node1:1234", None, None), OPEN_MPI, Group("node1", 1234, 4, 2)),
        (("node1:1234", 2, 1), SLURM, Group("node1", 1234, 2, 1)),
    ],
)
def test_processes_are_those_of_the_command_line_or_of_the_launcher(
    given: tuple[Any, ...], environment: dict[str, str], group: Group | None
) -> None:
    assert read_group(*given, environment) == group


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((None, 2, 1), "need --coordinator HOST:PORT"),
        (("node1", 2, 1), "--coordinator is 'node1'; it must be HOST:PORT"),
        (("node1:port", 2, 1), "--coordinator is 'node1:port'"),
        (("node1:65535", 2, 1), "--coordinator is 'node1:65535'"),
        (("node1:1234", None, None), "needs --num-processes and --process-id"),
        (("node1:1234", 2, None), "needs --num-processes and --process-id"),
        (("node1:1234", 2, 2), r"--process-id is 2; of 2 processes it must be in 0\.\.1"),
    ],
)
def test_what_does_not_name_a_process_is_refused(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_group(*given, {})


def test_waiting_for_others_ends_within_a_minute() -> None:
    assert WAIT_SECONDS <= 45


@pytest.fixture
def coordinator() -> str:
    """An address whose port is free, and the next one, too."""
    while True:
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            try:
                with socket.create_server(("", port + 1)):
                    return f"127.0.0.1:{port}"
            except OSError:
                continue


@pytest.fixture
def start(coordinator: str) -> Iterator[Start]:
    """Starts the command as one process of a group, with two CPU devices; it waits for the others for `wait` s."""
    started = []

    def begin(index: int, *arguments: str, size: int = 2, wait: int = 60) -> "subprocess.Popen[str]":
        code = "import sys; from experiments.lm.run import processes; from experiments.train_lm import main\n"
        code += f"processes.WAIT_SECONDS = {wait}; sys.exit(main(sys.argv[1:]))"
        group = ("--coordinator", coordinator, "--num-processes", str(size), "--process-id", str(index))
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, *group],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def errors(process: "subprocess.Popen[str]") -> list[str]:
    """The lines of its standard error, once it has ended, that are not a progress bar's."""
    _, err = process.communicate(timeout=60)
    return [line for line in err.splitlines() if line.startswith("error: ") or "Traceback" in line or "stack" in line]


@pytest.mark.slow
def test_two_processes_train_as_one(train: Any, arguments: Any, start: Start, tmp_path: Path) -> None:
    both = [start(i, *arguments(out=tmp_path / "two", mesh="data=2,tensor=2,sequence")) for i in range(2)]
    out, silent = (process.communicate(timeout=300) for process in both)
    assert [process.returncode for process in both] == [0, 0], (out, silent)
    for words in ("mesh: data=2, tensor=2, sequence", "final validation loss", "step needs"):
        assert words in out[0]
        assert words not in silent[0]
    assert "tokens/s" in out[1]
    assert "tokens/s" not in silent[1]

    train(out=tmp_path / "one")
    two, one = (list(read_records(tmp_path / name / "metrics.jsonl")) for name in ("two", "one"))
    assert [(r["kind"], r["step"]) for r in two] == [(r["kind"], r["step"]) for r in one]
    for kind in ("train", "validation"):
        losses = [list(curve(records, kind, "fused").values()) for records in (two, one)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    # What two processes saved, one goes on with.
    assert train("--resume", out=tmp_path / "two", mesh="").code == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_all_processes_stop_after_the_same_step(arguments: Any, start: Start, tmp_path: Path) -> None:
    options = arguments(out=tmp_path, mesh="tensor=2,data=2", steps=100_000)
    both = [start(i, *options) for i in range(2)]
    wait_until_trained(tmp_path)
    both[1].send_signal(signal.SIGTERM)
    ended = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [143, 143], ended
    said = [err.splitlines()[-1] for _, err in ended]
    assert "stopped after step" in said[0]
    assert said[0] == said[1]


def test_a_process_whose_peers_never_come_says_so(start: Start, arguments: Any, tmp_path: Path) -> None:
    options = arguments(out=tmp_path / "run", mesh="data=4")
    (line,) = errors(first := start(0, *options, size=3, wait=2))
    assert first.returncode == 2
    assert "process 1, 2 of 3 did not come within 2 s; start one for each --process-id in 0..2" in line
    (line,) = errors(second := start(1, *options, wait=2))
    assert second.returncode == 2
    assert "process 0 did not answer at 127.0.0.1:" in line
    assert "check --coordinator" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("next_one", [0, 1])
def test_a_port_that_is_taken_is_named(
    start: Start, arguments: Any, coordinator: str, tmp_path: Path, next_one: int
) -> None:
    port = int(coordinator.rpartition(":")[2]) + next_one
    with socket.create_server(("", port)):
        (line,) = errors(first := start(0, *arguments(out=tmp_path / "run", mesh="data=4")))
    assert first.returncode == 2
    assert f"port {port} cannot be used here (Address already in use)" in line


def test_processes_that_disagree_all_say_so(start: Start, arguments: Any, tmp_path: Path) -> None:
    options = arguments(out=tmp_path / "run", mesh="data=4")
    several = [start(0, *options), start(1, *options, size=3)]
    lines = [errors(process) for process in several]
    assert [process.returncode for process in several] == [2, 2]
    assert lines[0] == lines[1] == ["error: process 1 was started with --num-processes 3, process 0 with 2"]


@pytest.mark.slow
def test_a_process_whose_peer_is_lost_says_so(start: Start, arguments: Any, tmp_path: Path) -> None:
    options = arguments(out=tmp_path, mesh="data=6", batch_size=6, steps=100_000)
    first, second, third = (start(i, *options, size=3) for i in range(3))
    wait_until_trained(tmp_path)
    second.kill()
    (line,) = errors(first)
    assert line.startswith("error: process ")
    assert line.endswith("see its output")
    # The third may notice by its own collective, or by the loss of JAX's coordinator.
    third.communicate(timeout=60)
    assert first.returncode == 1
    assert third.returncode not in (0, None)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_that_loses_the_first_one_ends_too(start: Start, arguments: Any, tmp_path: Path) -> None:
    first, second = (start(i, *arguments(out=tmp_path, mesh="data=4", steps=100_000)) for i in range(2))
    wait_until_trained(tmp_path)
    first.kill()
    _, err = second.communicate(timeout=60)
    assert second.returncode not in (0, None)
    # JAX's coordinator died with it, and its client may be the first to notice.
    assert "see its output" in err or "another task died" in err


def test_all_processes_refuse_what_the_first_one_refuses(start: Start, arguments: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    both = [start(i, *arguments(out=tmp_path, mesh="data=4")) for i in range(2)]
    for lines in map(errors, both):
        assert lines == [f"error: {tmp_path} is not empty; continue it with --resume, replace it with --overwrite, or "
                         "change --out"]  # fmt: skip
    assert [process.returncode for process in both] == [2, 2]


def wait_until_trained(run: Path) -> None:
    """Returns once the run has recorded a step."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
