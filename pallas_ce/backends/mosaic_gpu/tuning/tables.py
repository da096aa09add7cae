"""Tuning tables: tiles that were measured to be the fastest for a class of shapes, one JSON file for each GPU model.

A table is data and treated as such: it is read, never executed, and every value in it is checked against what the
kernels can do, so that a broken or hostile file can be refused but not believed. This is a table with one entry:

    {"format": 3, "device": "NVIDIA H200", "made": {...},
     "entries": [{"kernel": "forward", "rows": 8192, "vocab_size": 131072, "hidden_size": 4096, "vocab_axis": 0,
                  "config": {"rows": 128, "columns": 128, "piece": null, "ping_pong": false, "stages": 4,
                             "cluster": "columns", "in_flight": 0, "lead": 0, "row_group": 8},
                  "microseconds": 1.0, "rule_microseconds": 1.0}]}

where `made` says with what the table was made, for people. A shape belongs to the class of the powers of two that are
nearest to its sizes.
"""

import dataclasses
import json
import math
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages

FORMAT = 3

# A table with an entry for every class that exists is far smaller.
_LARGEST_BYTES = 2**20

_CONFIG_FIELDS = ("rows", "columns", "piece", "ping_pong", "stages", "cluster", "in_flight", "lead", "row_group")
_LARGEST_ROW_GROUP = 64
_LARGEST_SIZE = 2**40
_LONGEST_MICROSECONDS = 24 * 3600 * 10**6


class TableError(ValueError):
    """A table that cannot be used; the message names the file, what is wrong with it, and how to repair it."""


class ShapeClass(NamedTuple):
    """Which products an entry is for: sizes are powers of two."""

    kernel: Kernel
    rows: int
    vocab_size: int
    hidden_size: int
    vocab_axis: int


class Entry(NamedTuple):
    """A measured choice: its tiles, its time, and that of the rule's tiles in turn with it."""

    config: Config
    microseconds: float
    rule_microseconds: float


@dataclasses.dataclass
class Table:
    """The entries for one GPU model, and what made them: versions and date, for people."""

    device: str
    entries: dict[ShapeClass, Entry] = dataclasses.field(default_factory=dict)
    made: dict[str, Any] = dataclasses.field(default_factory=dict)


def class_of(kernel: Kernel, rows: int, vocab_size: int, hidden_size: int, vocab_axis: int) -> ShapeClass:
    """The class of a kernel's shape."""
    n, v, h = (2 ** round(math.log2(max(1, size))) for size in (rows, vocab_size, hidden_size))
    return ShapeClass(kernel, n, v, h, vocab_axis)


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
        return _parse(_read(path), device)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise TableError(
            f"the tuning table {path} cannot be used: {reason}. Delete it, or make a new one with "
            "`python -m pallas_ce.backends.mosaic_gpu.tune`; until then the default tiles are used."
        ) from error


def save(path: Path, table: Table) -> None:
    """Writes the table in one step: a reader finds the old file or the new one, whole."""
    entries = [
        dict(key._asdict())
        | {"config": {name: getattr(entry.config, name) for name in _CONFIG_FIELDS}}
        | {"microseconds": entry.microseconds, "rule_microseconds": entry.rule_microseconds}
        for key, entry in sorted(table.entries.items())
    ]
    document = {"format": FORMAT, "device": table.device, "made": table.made, "entries": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=2) + "\n")
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: Path) -> Any:
    """The JSON value in a regular file of reasonable size; a pipe is not waited for, and a link not followed."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise ValueError(f"it is larger than {_LARGEST_BYTES} bytes")
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error


def _parse(document: Any, device: str) -> Table:
    _check_keys("the table", document, ("format", "device", "made", "entries"))
    if document["format"] != FORMAT or isinstance(document["format"], bool):
        raise ValueError(f"its format is {_shown(document['format'])} and not {FORMAT}")
    if document["device"] != device:
        raise ValueError(f"it is for the device {_shown(document['device'])} and not for {device!r}")
    if not isinstance(document["entries"], list) or not isinstance(document["made"], dict):
        raise ValueError('"entries" must be a list and "made" an object')
    table = Table(device, made=document["made"])
    for index, raw in enumerate(document["entries"]):
        where = f"entry {index}"
        _check_keys(where, raw, (*ShapeClass._fields, *Entry._fields))
        key = _shape_class(where, raw)
        if key in table.entries:
            raise ValueError(f"{where} is for the same class as an earlier one")
        times = (_time(f"{name} of {where}", raw[name]) for name in ("microseconds", "rule_microseconds"))
        table.entries[key] = Entry(_config(where, key.kernel, raw["config"]), *times)
    return table


def _shape_class(where: str, raw: dict[str, Any]) -> ShapeClass:
    kernel = raw["kernel"]
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel of {where} is {_shown(kernel)} and not one of {get_args(Kernel)}")
    n, v, h = (_whole(f"{name} of {where}", raw[name], 1, _LARGEST_SIZE) for name in ShapeClass._fields[1:4])
    if any(size & (size - 1) for size in (n, v, h)):
        raise ValueError(f"the sizes of {where} are {(n, v, h)} and not powers of two")
    return ShapeClass(kernel, n, v, h, _whole(f"vocab_axis of {where}", raw["vocab_axis"], 0, 1))


def _config(where: str, kernel: Kernel, raw: Any) -> Config:
    """A `Config` that runs: only tiles and numbers of stages that are known to."""
    where = f"the config of {where}"
    _check_keys(where, raw, _CONFIG_FIELDS)
    sizes = (None if raw[n] is None else _whole(f"{n} of {where}", raw[n], 0, 256) for n in _CONFIG_FIELDS[:3])
    if type(raw["ping_pong"]) is not bool:
        raise ValueError(f"ping_pong of {where} is {_shown(raw['ping_pong'])} and not true or false")
    tile = (*sizes, raw["ping_pong"])
    if tile not in TILES[kernel]:
        raise ValueError(f"(rows, columns, piece, ping_pong) of {where} is {tile} and not one of {TILES[kernel]}")
    rows, columns, piece, ping_pong = next(known for known in TILES[kernel] if known == tile)
    if raw["cluster"] not in ("rows", "columns", None):
        raise ValueError(f"cluster of {where} is {_shown(raw['cluster'])} and not 'rows', 'columns' or null")
    config = Config(
        rows=rows,
        columns=columns,
        piece=piece,
        ping_pong=ping_pong,
        cluster=raw["cluster"],
        in_flight=_whole(f"in_flight of {where}", raw["in_flight"], 0, 1),
        lead=_whole(f"lead of {where}", raw["lead"], 0, 0 if ping_pong else 2),
        row_group=_whole(f"row_group of {where}", raw["row_group"], 1, _LARGEST_ROW_GROUP),
    )
    stages = _whole(f"stages of {where}", raw["stages"], 2, most_stages(kernel, config))
    return dataclasses.replace(config, stages=stages)


def _check_keys(where: str, raw: Any, needs_grad: tuple[str, ...]) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is {_shown(raw)} and not an object")
    if missing := [name for name in needs_grad if name not in raw]:
        raise ValueError(f"{where} lacks {missing}")
    if unknown := [name for name in raw if name not in needs_grad]:
        raise ValueError(f"{where} has unknown keys: {_shown(unknown)}")


def _whole(what: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {_shown(value)} and not a whole number from {least} to {most}")
    return value


def _time(what: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_MICROSECONDS:
        raise ValueError(f"{what} is {_shown(value)} and not a positive number, of a day at most")
    return float(value)


def _shown(value: Any) -> str:
    """A value from a file as part of a message: short, and without control characters."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return "a huge number"
    text = repr(value) if not isinstance(value, dict | list) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
