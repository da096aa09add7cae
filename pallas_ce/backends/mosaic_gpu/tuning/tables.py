"""Tuning tables: tiles that were measured to be the fastest for a class of shapes, one JSON file for each GPU model.

This is a table with one entry:

    {"format": 3, "device": "NVIDIA H200", "made": {...},
     "entries": [{"kernel": "forward", "rows": 8192, "vocab_size": 131072, "hidden_size": 4096, "vocab_axis": 0,
                  "config": {"rows": 128, "columns": 128, "piece": null, "ping_pong": false, "stages": 4,
                             "cluster": "columns", "in_flight": 0, "lead": 0, "row_group": 8},
                  "microseconds": 1.0, "rule_microseconds": 1.0}]}

where `made` says with what the table was made, for people. A shape belongs to the class of the powers of two that are
nearest to its sizes. A table is data: each value that is used must be one of those that the kernels are known to run
with, so that a broken file can be refused but never believed.
"""

import contextlib
import dataclasses
import json
import math
import os
import reprlib
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages

FORMAT = 3

_TILE = ("rows", "columns", "piece", "ping_pong")
_SCHEDULE: dict[str, Collection[Any]] = {
    "cluster": ("rows", "columns", None),
    "in_flight": (0, 1),
    "lead": (0, 1, 2),
    "row_group": range(1, 65),
}
_CONFIG = (*_TILE, "stages", *_SCHEDULE)
_SIZES = tuple(2**power for power in range(41))
_SHAPE: dict[str, Collection[Any]] = {
    "kernel": get_args(Kernel),
    "rows": _SIZES,
    "vocab_size": _SIZES,
    "hidden_size": _SIZES,
    "vocab_axis": (0, 1),
}
_LONGEST_MICROSECONDS = 24 * 3600 * 10**6


class TableError(ValueError):
    """A table that cannot be used; the message names the file, what is wrong with it, and how to repair it."""


class Shape(NamedTuple):
    """One kernel at one size, as a call would launch it; of a class of shapes the one whose sizes are powers of two."""

    kernel: Kernel
    rows: int
    vocab_size: int
    hidden_size: int
    vocab_axis: int

    @property
    def nearest(self) -> "Shape":
        """The class that it belongs to."""
        rows, vocab_size, hidden_size = (2 ** round(math.log2(max(1, size))) for size in self[1:4])
        return Shape(self.kernel, rows, vocab_size, hidden_size, self.vocab_axis)


class Entry(NamedTuple):
    """A measured choice: its tiles, its time, and that of the rule's tiles in turn with it."""

    config: Config
    microseconds: float
    rule_microseconds: float

    @property
    def ratio(self) -> float:
        """Less than 1 for tiles that are faster than the rule's."""
        return self.microseconds / self.rule_microseconds


@dataclasses.dataclass
class Table:
    """The entries for one GPU model, and what made them: versions and date, for people."""

    device: str
    entries: dict[Shape, Entry] = dataclasses.field(default_factory=dict)
    made: Any = None


def file_name(device: str) -> str:
    """The name of the table for a GPU model: "nvidia_h200.json"."""
    return "_".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json"


def load(path: Path, device: str) -> Table:
    """Reads the table for `device`.

    Raises:
        FileNotFoundError: there is none.
        TableError: it cannot be used.
    """
    try:
        return _table(json.loads(path.read_bytes()), device)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(
            f"the tuning table {path} cannot be used: {error}. Delete it, or make a new one with "
            "`python -m pallas_ce.tune`; until then it is left out."
        ) from error


def save(path: Path, table: Table) -> None:
    """Writes the table in one step: a reader finds the old file or the new one, whole."""
    entries = [
        key._asdict() | entry._asdict() | {"config": {name: getattr(entry.config, name) for name in _CONFIG}}
        for key, entry in sorted(table.entries.items())
    ]
    document = {"format": FORMAT, "device": table.device, "made": table.made, "entries": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        new = Path(folder) / path.name
        new.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(new, path)


def add(path: Path, table: Table, entries: Mapping[Shape, Entry]) -> None:
    """Adds entries to a table and saves it, with what other processes have added to the file since it was read."""
    import fcntl  # tables are made where the kernels run: on Linux

    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError, TableError):
            table.entries = load(path, table.device).entries
        table.entries |= entries
        save(path, table)
    finally:
        os.close(folder)


def _table(document: Any, device: str) -> Table:
    _check_keys(document, ("format", "device", "made", "entries"))
    _one_of("format", document["format"], (FORMAT,))
    _one_of("device", document["device"], (device,))
    if not isinstance(document["entries"], list):
        raise ValueError("entries is not a list")
    table = Table(device, made=document["made"])
    for index, raw in enumerate(document["entries"]):
        try:
            key, entry = _entry(raw)
            if key in table.entries:
                raise ValueError("an earlier one is for the same class")
        except ValueError as error:
            raise ValueError(f"in entry {index}, {error}") from error
        table.entries[key] = entry
    return table


def _entry(raw: Any) -> tuple[Shape, Entry]:
    _check_keys(raw, (*Shape._fields, *Entry._fields))
    key = Shape(**{name: _one_of(name, raw[name], known) for name, known in _SHAPE.items()})
    given = raw["config"]
    _check_keys(given, _CONFIG)
    tile = _one_of(f"the tile {_TILE}", tuple(given[name] for name in _TILE), TILES[key.kernel])
    schedule = {name: _one_of(name, given[name], known) for name, known in _SCHEDULE.items()}
    config = Config(**dict(zip(_TILE, tile, strict=True)), **schedule)
    stages = _one_of("stages", given["stages"], range(2, most_stages(key.kernel, config) + 1))
    times = (_time(name, raw[name]) for name in ("microseconds", "rule_microseconds"))
    return key, Entry(dataclasses.replace(config, stages=stages), *times)


def _check_keys(raw: Any, names: tuple[str, ...]) -> None:
    if not isinstance(raw, dict) or raw.keys() != set(names):
        raise ValueError(f"{reprlib.repr(raw)} is not an object of {', '.join(names)}")


def _one_of(name: str, value: Any, known: Collection[Any]) -> Any:
    """`value`, which must be one of a few, also in its type."""
    if repr(value) not in map(repr, known):
        raise ValueError(f"{name} is {reprlib.repr(value)} and not one of {reprlib.repr(known)}")
    return value


def _time(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_MICROSECONDS:
        raise ValueError(f"{name} is {reprlib.repr(value)} and not a positive number, of a day at most")
    return float(value)
