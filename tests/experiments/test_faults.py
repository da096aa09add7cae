"""What may befall a training, done to it: `docs/robustness.md` has the list. Nothing is lost, and nothing executes."""

import dataclasses
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.files import write_atomically
from experiments.lm.model.program import Program
from experiments.lm.run import run_directory, session
from experiments.lm.run.metrics import read_records
from experiments.lm.run.programs_kept import programs_kept
from pallas_ce import linear_cross_entropy
from tests.experiments.conftest import command

Train = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(x["kind"], x["step"], x["loss"]) for x in read_records(run / "metrics.jsonl") if x["kind"] != "summary"]


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def run_as_process(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


KILLED = """
import os, signal, sys
left = int(sys.argv.pop(1))

def count(event, arguments):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.remove") and "/checkpoints/fused/10" in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

from experiments.train_lm import main
sys.addaudithook(count)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("operation", [26, 1, 12, 21, 44])
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_exactly(
    train: Train, arguments: Any, whole: Path, tmp_path: Path, operation: int
) -> None:
    """At one of the file operations of the second checkpoint: 26 make it whole, and the 44th ends its checksums."""
    killed = run_as_process(KILLED, str(operation), *arguments(out=tmp_path / "run"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert train("--resume", out=tmp_path / "run").code == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert not [path for path in (tmp_path / "run").rglob("*") if "orbax-checkpoint-tmp" in path.name]


def test_after_running_out_of_memory_a_run_goes_on_exactly(
    train: Train, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, steps = session.build, iter(range(1, 100))

    def built(*given: Any) -> Program:
        program = build(*given)

        def train(*state_and_rows: Any) -> Any:
            if next(steps) == 8:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
            return program.train(*state_and_rows)

        return dataclasses.replace(program, train=train)

    with monkeypatch.context() as patch:
        patch.setattr(session, "build", built)
        finished = train(out=tmp_path)
    assert finished.code == 1
    assert "does not fit the device's memory; lower --batch-size" in finished.err
    assert train("--resume", out=tmp_path).code == 0
    assert losses(tmp_path) == losses(whole)


FULL = """
import resource, sys
from experiments.train_lm import main
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, most))  # Python ignores the signal
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_the_disk_leaves_the_older_ones(
    train: Train, arguments: Any, whole: Path, stopped_run: Path
) -> None:
    """Neither do the compiled programs, of which JAX warns."""
    finished = run_as_process(FULL, *arguments("--resume", out=stopped_run))
    assert finished.returncode == 1
    assert "checkpoints/fused/10 cannot be written" in finished.stderr
    assert train("--resume", out=stopped_run).code == 0
    assert losses(stopped_run) == losses(whole)


def test_a_file_that_does_not_fit_the_disk_stays_what_it_was(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(tmp_path / "file", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_a_run_that_another_process_trains_is_refused(train: Train, refused: Any, stopped_run: Path) -> None:
    fresh = stopped_run.parent / "fresh"
    with run_directory.claimed(stopped_run), run_directory.claimed(fresh):
        sentence = f"another process is training in {stopped_run}; wait for it, or change --out"
        assert sentence in refused("--resume", out=stopped_run)
        assert sentence in refused("--overwrite", out=stopped_run)
        assert "another process is training in" in refused(out=fresh)
    assert train("--resume", out=stopped_run).code == 0
    with pytest.raises(run_directory.UsageError, match="has just written a run"):
        run_directory.create(stopped_run, run_directory.stored_config(stopped_run), overwrite=False)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("checksums", [True, False])
def test_nothing_in_a_checkpoint_is_executed(
    arguments: Any, stopped_run: Path, tmp_path: Path, checksums: bool
) -> None:
    """Each of its files is replaced by one that would execute, if it were unpickled.

    In another process: Orbax leaves coroutines behind that it never awaits, and Python tells of them at any later time.
    """
    newest = stopped_run / "checkpoints" / "fused" / "7"
    if not checksums:
        (newest / "checksums.json").unlink()
    files = sorted(path.relative_to(stopped_run) for path in newest.rglob("*") if path.is_file())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        for number, file in enumerate(files):
            run = shutil.copytree(stopped_run, tmp_path / f"{number}")
            (run / file).write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
            finished = process.submit(command, arguments("--resume", out=run)).result(timeout=300)
            assert finished.code in ((2,) if checksums else (0, 2)), (file, finished.err)
            assert finished.code == 0 or "cannot be read" in finished.err
    assert not (tmp_path / "executed").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_two_trainings_at_once_share_caches_that_neither_has_filled(
    arguments: Any, whole: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "one", tmp_path / "two"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "experiments.train_lm", *arguments(out=run, **{"cache-dir": tmp_path / "cache"})],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) for run in runs
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert losses(runs[0]) == losses(runs[1]) == losses(whole)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_compilation_cache_that_is_damaged_is_told_of_and_compiled_past(tmp_path: Path) -> None:
    run = jax.jit(jax.value_and_grad(linear_cross_entropy))
    given = jnp.ones((7, 3)), jnp.ones((5, 3)), jnp.arange(7) % 5
    want = run(*given)
    with programs_kept(tmp_path / "cache"):
        jax.clear_caches()
        run(*given)
        (entry,) = [path for path in (tmp_path / "cache").glob("*linear_cross_entropy*") if "atime" not in path.name]
        whole = entry.read_bytes()
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for content in (b"", whole[:middle], changed, pickle.dumps(Hostile(tmp_path / "executed"))):
            entry.write_bytes(content)
            jax.clear_caches()
            with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
                got = run(*given)
            assert all(map(jnp.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))
    assert not (tmp_path / "executed").exists()
