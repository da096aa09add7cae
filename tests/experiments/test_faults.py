"""What may befall a training, done to it: `docs/robustness.md` has the list. Nothing is lost, and nothing executes."""

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.files import write_atomically
from experiments.lm.programs_kept import programs_kept
from experiments.lm.records import read_records
from pallas_ce import linear_cross_entropy

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


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("operation", [12, 20])
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_exactly(
    train: Train, arguments: Any, whole: Path, tmp_path: Path, operation: int
) -> None:
    """At one of the file operations of the second checkpoint."""
    words = [sys.executable, "-c", KILLED, str(operation), *arguments(out=tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert train("--resume", out=tmp_path / "run").code == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert not [path for path in (tmp_path / "run").rglob("*") if "orbax-checkpoint-tmp" in path.name]


def test_what_a_crash_cut_short_is_made_again(stopped_at: Train, train: Train, whole: Path, tmp_path: Path) -> None:
    stopped_at(6, out=tmp_path)  # after the checkpoint of step 5
    kept = tmp_path / "checkpoints" / "fused"
    newest = max((path for path in kept.iterdir()), key=lambda path: int(path.name))
    assert newest.name != "5"
    newest.rename(kept / f"{newest.name}.orbax-checkpoint-tmp")  # as while it was written
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "head": "fused", "step": 8, "loss": 99.0}\n{"kind": "tra')
    assert train("--resume", out=tmp_path).code == 0
    assert losses(tmp_path) == losses(whole)


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
