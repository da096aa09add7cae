"""What the command lines of GPU benchmarks share: options, and points measured in turn within a budget of time."""

import argparse
import functools
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiments.bench import timing
from experiments.bench.machine import describe
from experiments.bench.points import Point, Setting
from experiments.bench.results import FOLDER, Budget, ResultError, Results, run_points
from experiments.command_line import positive

_DRY_DIVISOR = 64


class Clocked(NamedTuple):
    """How often and by which clock a program is timed."""

    rounds: int
    clock: timing.Clock


class Measure(Protocol):
    """Measures a point."""

    def __call__(self, point: Point, how: Clocked) -> dict[str, Any]:
        """Its record."""


class Section(NamedTuple):
    """Points of one result file.

    Attributes:
        points: what is measured; empty where the implementation has no such thing.
        measure: makes a point's record `{"n", "v", ..., "results": {program: numbers}}`.
    """

    points: list[Point]
    measure: Measure


def add_options(parser: argparse.ArgumentParser, rounds: str = "times each program of a point is timed") -> None:
    """The options that every command has; `rounds` says what is repeated."""
    parser.add_argument("--rounds", type=positive, default=7, help=rounds)
    parser.add_argument("--minutes", type=float, default=None, help="begin no point that may end later")
    parser.add_argument("--again", action="store_true", help="measure points that the results already hold")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")


def without_torch(on_gpu: bool, or_else: str) -> str | None:
    """Why PyTorch cannot measure here, and what to do `or_else` without a GPU; None where it can."""
    try:
        import torch
    except ImportError:
        return "this is measured in PyTorch, which is missing: pip install 'pallas-ce[torch]'"
    return f"PyTorch finds no GPU{or_else}" if on_gpu and not torch.cuda.is_available() else None


def run_file[P](
    name: str,
    machine: dict[str, Any],
    points: Iterable[P],
    name_of: Callable[[P], str],
    measure: Callable[[P], dict[str, Any]],
    told: Callable[[str, dict[str, Any]], None],
    options: argparse.Namespace,
    chosen: Sequence[str] = (),
) -> int:
    """Measures the points of a command with one result file, writes each as it goes; returns the exit status.

    Args:
        name: of the module in `experiments`, and of its result file.
        machine: what has measured.
        points: all of them.
        name_of: a point's key in the file.
        measure: makes a point's record.
        told: prints a point's name and record.
        options: those of `add_options`.
        chosen: an option of the command and its values, which have a file of their own.
    """
    try:
        words = "".join(f" {shlex.quote(word)}" for word in chosen)
        file = re.sub(r"\W+", "_", "_".join([name, *chosen[1:]]))
        results = _opened(file, f"python -m experiments.{name}{words}", machine, options)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    _tell_left(run_points(points, name_of, measure, results, _budget(options), told))
    return 0


def run(
    name: str, doc: str | None, sections: Callable[[Setting], dict[str, Section]], words: Sequence[str] | None
) -> int:
    """Measures, prints and writes each section as it goes; returns the exit status.

    Args:
        name: of the module in `experiments`, and of its result files.
        doc: what `--help` says.
        sections: by name.
        words: the command line; None for the process's.
    """
    names = list(sections(Setting()))
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=names, metavar="SECTION", help=", ".join(names))
    add_options(parser)
    parser.add_argument("--clock", choices=timing.CLOCKS, default="launches", help="back-to-back launches or profiler")
    parser.add_argument("--dry-run", action="store_true", help="small sizes by XLA, to see that the commands work")
    options = parser.parse_args(words)
    if unknown := [section for section in options.sections if section not in names]:
        parser.error(f"there is no section {unknown[0]!r}; choose from {', '.join(names)}")
    if options.dry_run and options.out is None:
        parser.error("--dry-run needs --out: its results are not those of the published sizes")
    setting = Setting("xla", _DRY_DIVISOR) if options.dry_run else Setting()
    clocked = Clocked(options.rounds, timing.CLOCKS[options.clock])
    start, budget, left = time.monotonic(), _budget(options), 0
    for section, (points, measure) in ((s, sections(setting)[s]) for s in options.sections):
        if not points:
            print(f"{section}: left out, implementation {setting.implementation!r} has no such thing")
            continue

        def told(point: str, record: dict[str, Any], section: str = section) -> None:
            after = f"[{time.monotonic() - start:5.0f}s]"
            print(f"{after} {section} {point} N {record['n']} V {record['v']}: {_shown(record)}", flush=True)

        machine = describe() | {"clock": options.clock, "rounds": options.rounds}
        try:
            results = _opened(f"{name}_{section}", f"python -m experiments.{name} {section}", machine, options)
        except ResultError as error:
            print(error, file=sys.stderr)
            return 2
        measured = functools.partial(measure, how=clocked)
        left += run_points(points, lambda point: point.name, measured, results, budget, told)
    _tell_left(left)
    return 0


def _opened(name: str, command: str, machine: dict[str, Any], options: argparse.Namespace) -> Results:
    return Results((options.out or FOLDER) / f"{name}.json", command, machine, options.again)


def _budget(options: argparse.Namespace) -> Budget:
    return Budget(None if options.minutes is None else 60 * options.minutes, time.monotonic)


def _tell_left(points: int) -> None:
    if points:
        print(f"time is up with {points} points left; run the same command again to go on")


def _shown(record: dict[str, Any]) -> dict[str, float]:
    """Of each program the figure by which it is judged; programs that are only a yardstick have none."""
    judged = ("ratio", "share", "compile_seconds")
    found = {k: next((r[f] for f in judged if f in r), None) for k, r in record["results"].items()}
    return {k: round(number, 3) for k, number in found.items() if number is not None}
