"""The folder of a run: which one is used, and what may be overwritten in it.

    config.toml                the configuration in full; `--config` reads it back
    metrics.jsonl              see `experiments.lm.run.metrics`
    loss.png, difference.png
    checkpoints/<head>/<step>/

Nothing is ever deleted from a folder that is not such a run.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiments.files import write_atomically
from experiments.lm.config import TrainConfig, default_config, merge, read_toml, to_toml
from experiments.lm.errors import UsageError

DEFAULT = Path("runs/train_lm")
_CONFIG = "config.toml"
_OURS = (_CONFIG, "metrics.jsonl", "loss.png", "difference.png")


def metrics_path(run: Path) -> Path:
    """Where a run records its metrics."""
    return run / "metrics.jsonl"


def checkpoint_path(run: Path, head: str) -> Path:
    """Where a run keeps the checkpoints of one loss head."""
    return run / "checkpoints" / head


def choose_new(out: str, overwrite: bool) -> Path:
    """The folder a new run may write to; nothing is written yet.

    Args:
        out: the folder asked for; empty for `runs/train_lm`, or the first free of `runs/train_lm-2`, `-3` and so on.
        overwrite: whether an earlier run in the folder may be replaced.

    Raises:
        UsageError: if the folder is taken, or cannot be written.
    """
    path, number = Path(out) if out else DEFAULT, 1
    while not (out or overwrite or _is_free(path)):
        number += 1
        path = DEFAULT.with_name(f"{DEFAULT.name}-{number}")
    if not _is_free(path):
        if not path.is_dir():
            raise UsageError(f"--out is {path}, which is a file; give a folder")
        if not overwrite:
            raise UsageError(
                f"{path} is not empty; continue it with --resume, replace it with --overwrite, or change --out"
            )
        if not (path / _CONFIG).is_file():
            raise UsageError(f"{path} holds no training run, so --overwrite will not delete it; change --out")
    _check_writable(path)
    return path


def choose_existing(out: str) -> Path:
    """The folder of the run to resume: the one asked for, or the latest of the numbered default ones.

    Raises:
        UsageError: if there is no run, or its folder cannot be written.
    """
    configs = [run / _CONFIG for run in (DEFAULT, *DEFAULT.parent.glob(f"{DEFAULT.name}-*"))]
    latest = max(filter(Path.is_file, configs), key=lambda file: file.stat().st_mtime, default=DEFAULT / _CONFIG)
    path = Path(out) if out else latest.parent
    if not (path / _CONFIG).is_file():
        raise UsageError(f"there is no run to resume in {path}: it has no {_CONFIG}; start one without --resume")
    _check_writable(path)
    return path


def stored_config(run: Path) -> TrainConfig:
    """The configuration a run was started with.

    Raises:
        UsageError: if its file is damaged.
    """
    path = run / _CONFIG
    # The defaults underneath matter to no run of this version, which stores every option.
    return merge(default_config("cpu"), read_toml(path), str(path))


@contextlib.contextmanager
def claimed(run: Path) -> Iterator[None]:
    """Within the block no other command trains in the folder, which is made; ends with the process, however that ends.

    Raises:
        UsageError: if another does, or it cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        folder = os.open(run, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"the output folder {run} cannot be written: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):  # Not every file system has locks.
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is training in {run}; wait for it, or change --out") from None
        yield
    finally:
        os.close(folder)


def create(run: Path, config: TrainConfig, overwrite: bool) -> None:
    """Stores the configuration of a new run in its folder, which is claimed.

    Raises:
        UsageError: if that is not possible.
    """
    if not (overwrite or _is_free(run)):
        raise UsageError(f"another process has just written a run to {run}; change --out")
    try:
        if overwrite and run.is_dir():
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            for name in _OURS:
                (run / name).unlink(missing_ok=True)
        write_atomically(run / _CONFIG, to_toml(config))
    except OSError as error:
        raise UsageError(f"the output folder {run} cannot be written: {error.strerror}") from None


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _check_writable(path: Path) -> None:
    """Asks before minutes of training do: a file is made and removed in the nearest folder that exists."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(f"the output folder {path} cannot be written: {error.strerror}") from None
