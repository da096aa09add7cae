"""Result files: points measured one after the other, the file whole after each, so that an interrupted run goes on."""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.command_line import Progress, positive, write_record

FOLDER = Path(__file__).parents[1] / "results"

# Of the machine: that sizes are not those of the points' names.
DRY = "dry_run"

# What points of one file must share to be compared.
SAME = ("device", "jax", "torch", "clock", "implementation", DRY)

# How often each was measured, at least.
AT_LEAST = ("rounds", "calls")

Record = dict[str, Any]


class ResultError(Exception):
    """A result file that cannot be read or gone on with; the message says what to do."""


class ResultFile(NamedTuple):
    """What one result file holds.

    Attributes:
        name: of the file, without its suffix.
        command: how it is made.
        points: by name, what measures a point and returns its record.
    """

    name: str
    command: str
    points: Mapping[str, Callable[[], Record]]


def add_options(parser: argparse.ArgumentParser, rounds: str | None = "times each program of a point is timed") -> None:
    """The options of a command that calls `run`; `rounds` says what is repeated, None that nothing is."""
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=7, help=rounds)
    parser.add_argument("--minutes", type=float, default=None, help="begin no point that may end later")
    parser.add_argument("--again", action="store_true", help="measure points that the results already hold")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")


def describe() -> dict[str, Any]:
    """Device, processor count, versions and date: what a result file says about where it was made."""
    return {
        "device": jax.devices()[0].device_kind,
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def read(path: Path) -> dict[str, Any]:
    """A result file: `{"command", "machine", "points": {name: record}}`.

    Raises:
        ResultError: it is not one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if set(document) != {"command", "machine", "points"} or not isinstance(document["points"], dict):
            raise ValueError("it lacks the keys of a result file")
    except (OSError, ValueError, TypeError) as error:
        raise ResultError(f"{path} is not a result file: {error}; move it away and run again") from error
    return dict(document)


def run(
    files: Sequence[ResultFile],
    machine: Record,
    shown: Callable[[str, Record], str],
    options: argparse.Namespace,
) -> int:
    """Measures the points that the files lack, prints each and writes it; returns the exit status.

    Args:
        files: what is measured, in order.
        machine: what measures; a file of another device or version is not gone on with.
        shown: what to print of a point's name and record.
        options: those of `add_options`. A point is only begun if one as long as the longest so far would end in time.

    Raises:
        ExceptionGroup: of the points that failed, when all others are measured and written.
    """
    if getattr(options, "dry_run", False):  # which not every command has
        machine = machine | {DRY: True}
    start = time.monotonic()
    end = math.inf if options.minutes is None else start + 60 * options.minutes
    longest, left = 0.0, 0
    failed: list[Exception] = []
    with Progress(sum(len(file.points) for file in files), "point") as bar:
        for file in files:
            path = (options.out or FOLDER) / f"{file.name}.json"
            document: dict[str, Any] = {"command": file.command, "machine": machine, "points": {}}
            if path.exists() and not options.again:
                try:
                    document |= _gone_on_with(path, machine)
                except ResultError as error:
                    print(error, file=sys.stderr)
                    return 2
            missing = [name for name in file.points if name not in document["points"]]
            bar.update(len(file.points) - len(missing))
            for name in missing:
                began = time.monotonic()
                if began + longest >= end:
                    left += 1
                    continue
                try:
                    record = file.points[name]()
                except Exception as error:
                    error.add_note(f"while {name} was measured")
                    failed.append(error)
                else:
                    document["points"][name] = record
                    write_record(path, document)
                    seconds = time.monotonic() - start
                    bar.print(f"[{seconds:5.0f}s] {file.name} {name}: {shown(name, record)}")
                longest = max(longest, time.monotonic() - began)
                bar.update(1)
    if left:
        print(f"time is up with {left} points left; run the same command again to go on")
    if failed:
        raise ExceptionGroup(f"{len(failed)} points failed", failed)
    return 0


def _gone_on_with(path: Path, machine: Record) -> dict[str, Any]:
    """The file's points, and the machine with what holds of them and of those to come."""
    old = read(path)
    for name in SAME:
        ours, theirs = machine.get(name), old["machine"].get(name)
        if ours != theirs:
            raise ResultError(
                f"{path} was measured with {name} {theirs!r} and this is {ours!r}: ratios would mix. Pass --again "
                "to measure all of it anew, or --out for another folder"
            )
    fewest = {name: min(machine[name], old["machine"].get(name, machine[name])) for name in AT_LEAST if name in machine}
    return {"machine": machine | fewest, "points": old["points"]}
