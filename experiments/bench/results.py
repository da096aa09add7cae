"""Result files: points measured one after the other, the file whole after each, so that an interrupted run goes on."""

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from experiments.files import as_json, write_atomically

FOLDER = Path(__file__).parents[1] / "results"

# Of the machine: sizes are smaller than the points' names say.
DRY = "dry_run"

# What points of one file must share to be compared.
_SAME = (
    "device",
    "power_limit",
    "kernels",
    "jax",
    "torch",
    "clock",
    "rounds",
    "half_width",
    "calls",
    "implementation",
    DRY,
)

Record = dict[str, Any]


class ResultError(Exception):
    """A result file that cannot be read or gone on with; the message says what to do."""


class Point(NamedTuple):
    """A measurement, by its name in the file: its record is most often `{..., "results": {program: numbers}}`."""

    name: str
    measure: Callable[[], Record]


class ResultFile(NamedTuple):
    """What one result file holds, by its name without a suffix.

    `words` make it again behind `python -m experiments.bench`; `facts` stand beside the machine's.
    """

    name: str
    points: list[Point]
    words: str
    facts: Record = {}  # noqa: RUF012  # of a NamedTuple, and never changed


def describe() -> Record:
    """Device, its kernels, processor count, versions and date: what a result file says about where it was made."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        **({} if jax.default_backend() == "cpu" else power_limit() | {"kernels": kernels()}),
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def power_limit() -> dict[str, str]:
    """What NVIDIA's driver lets the GPUs take, each figure once, as "700.00 W"; empty where nothing tells."""
    try:
        command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"power_limit": ", ".join(dict.fromkeys(map(str.strip, lines)))}


def kernels() -> str:
    """The digest of the kernels, made in a process of its own, which leaves nothing traced and needs no GPU."""
    command, environment = [sys.executable, "-m", "tools.kernels_digest"], os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.check_output(command, cwd=FOLDER.parents[1], env=environment, text=True).strip()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def read(path: Path) -> Record:
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


def load(folder: Path) -> dict[str, Record]:
    """All result files of the folder, by name; `check_device`'s are others."""
    paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith("check_device"))
    return {path.stem: read(path) for path in paths}


def run(files: list[ResultFile], machine: Record, options: argparse.Namespace) -> None:
    """Measures the points that the files lack, prints each and writes it.

    A point is only begun if one as long as the longest so far would end before `options.rounds.end`.

    Raises:
        ResultError: a file is of another device or version.
        ExceptionGroup: of the points that failed, when all others are measured and written.
    """
    start = time.monotonic()
    longest, left = 0.0, 0
    failed: list[Exception] = []
    for file in files:
        path = (options.out or FOLDER) / f"{file.name}.json"
        here = machine | file.facts
        document: Record = {"command": f"python -m experiments.bench {file.words}", "machine": here, "points": {}}
        if path.exists() and not options.again:
            document["points"] = _points(path, here)
        for name, measure in file.points:
            if name in document["points"]:
                continue
            began = time.monotonic()
            if began + longest >= options.rounds.end:
                left += 1
                continue
            try:
                record = measure()
            except Exception as error:
                error.add_note(f"while {name} was measured")
                failed.append(error)
            else:
                document["points"][name] = record
                write_atomically(path, as_json(document) + "\n")
                print(f"[{time.monotonic() - start:5.0f}s] {file.name} {name}: {_shown(record)}", flush=True)
            longest = max(longest, time.monotonic() - began)
    if left:
        print(f"time is up with {left} points left; run the same command again to go on")
    if failed:
        raise ExceptionGroup(f"{len(failed)} points failed", failed)


def _points(path: Path, machine: Record) -> Record:
    """The points of an earlier run."""
    old = read(path)
    for name in _SAME:
        ours, theirs = machine.get(name), old["machine"].get(name)
        if ours != theirs:
            raise ResultError(
                f"{path} was measured with {name} {theirs!r} and this is {ours!r}: ratios would mix. Pass --again "
                "to measure all of it anew, or --out for another folder"
            )
    return dict(old["points"])


def _shown(record: Record) -> str:
    """Of each program its numbers; what was left out, and why."""
    shown = []
    for program, found in record.get("results", {"": record}).items():
        numbers = [f"{name} {number:.4g}" for name, number in found.items() if isinstance(number, int | float)]
        shown.append(f"{program} {', '.join(numbers)}".strip())
    return "; ".join([*shown, *(f"{name} left out, {why}" for name, why in record.get("left_out", {}).items())])
