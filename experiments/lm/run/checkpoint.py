"""Checkpoints with Orbax: the whole training state and a description of the run that it belongs to.

Orbax writes to a temporary name and renames once all of it is on disk, so one cut short by a crash is passed over. It
does not notice an array whose bytes have changed, so checksums of its files are stored and compared before it is read.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.files import write_record
from experiments.lm.errors import RunError, UsageError
from experiments.lm.run.memory import as_text
from experiments.lm.run.processes import is_first

# One older checkpoint is kept in case the newest is damaged.
_KEPT = 2
_CHECKSUMS = "checksums.json"
_ARRAYS = "state/_METADATA"


class Checkpoints[State]:
    """The checkpoints of one loss head, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        with self._manager() as manager:
            return sorted(manager.all_steps())

    def save(self, step: int, state: State, description: dict[str, Any]) -> None:
        """Writes `state` and returns once it is complete on disk; older checkpoints beyond the kept ones go.

        Args:
            step: the number of optimiser steps taken.
            state: a pytree of arrays.
            description: what `description` returns and a resumed run compares; anything JSON holds.

        Raises:
            RunError: if it cannot be written.
        """
        folder = self.folder / str(step)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_path(state)), description=ocp.args.JsonSave(description)
        )
        try:
            self._check_space(state)
            with self._manager() as manager:
                manager.save(step, args=items)
            if is_first():
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                checksums = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
                write_record(folder / _CHECKSUMS, checksums)
        except Exception as error:  # A full disk surfaces as many types, from OSError to tensorstore's own.
            raise RunError(f"the checkpoint {folder} cannot be written: {_first_line(error)}") from error

    def description(self, step: int) -> dict[str, Any]:
        """What was stored beside the state at `step`.

        Raises:
            UsageError: if the checkpoint is damaged.
        """
        return dict(self._restore(step, description=ocp.args.JsonRestore())["description"])

    def restore(self, step: int, like: State) -> State:
        """Reads the state saved at `step`.

        Args:
            step: one of `steps()`.
            like: a pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes to expect.

        Raises:
            UsageError: if the checkpoint is damaged or holds other arrays.
        """
        wanted = _by_path(like)
        restored = self._restore(step, state=ocp.args.StandardRestore(wanted))["state"]
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def _restore(self, step: int, **items: Any) -> Any:
        folder = self.folder / str(step)
        damage = _damage(folder)
        if damage is None:
            try:
                with self._manager() as manager:
                    return manager.restore(step, args=ocp.args.Composite(**items))
            except Exception as error:  # As many types as when writing.
                damage = _first_line(error)
        older = [kept for kept in self.steps() if kept < step]
        remedy = f"delete that folder to resume from step {older[-1]}" if older else "start afresh without --resume"
        raise UsageError(f"the checkpoint {folder} cannot be read: {damage}; {remedy}")

    def _check_space(self, state: State) -> None:
        # A write that fails half-way makes the libraries below print tracebacks of their own.
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"it needs {as_text(needed)} and {as_text(free)} are free")

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, enable_async_checkpointing=False, create=True, cleanup_tmp_directories=True
        )
        return ocp.CheckpointManager(self.folder, options=options)


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves by their path in the tree, so that a checkpoint does not depend on the classes of its containers."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None; one whose checksums were not written in time may pass."""
    path = folder / _CHECKSUMS
    if not path.is_file():
        # Orbax would go on without its own description of the arrays.
        return None if (folder / _ARRAYS).is_file() else f"its file {_ARRAYS} is missing"
    try:
        for name, checksum in json.loads(path.read_text(encoding="utf-8")).items():
            if not (folder / name).is_file():
                return f"its file {name} is missing"
            if _checksum(folder / name) != checksum:
                return f"its file {name} has changed since it was written"
    except (OSError, ValueError, AttributeError) as error:
        return _first_line(error)
    return None


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
