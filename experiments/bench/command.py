"""The command lines of GPU benchmarks: dry runs, and sections that each have a result file of their own."""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench import timing
from experiments.bench.programs import Program, Shape
from experiments.bench.results import FOLDER, Record, ResultError, ResultFile, add_options, describe, run
from experiments.command_line import parser_of
from pallas_ce.backends.protocol import Implementation

_DRY_DIVISOR = 64


class Point(NamedTuple):
    """One measurement.

    Attributes:
        shape: N, V, H.
        programs: by name, of ours by that implementation and at that shape.
        measure: makes the record `{"n", "v", ..., "results": {program: numbers}}` of shape, programs, rounds and
            clock; None: `timing.measure`.
    """

    shape: Shape
    programs: Callable[[Implementation, Shape], dict[str, Program]]
    measure: Callable[..., Record] | None = None


Sections = Mapping[str, Mapping[str, Point]]


def dry(shape: Shape) -> Shape:
    """The sizes that a dry run measures in place of these."""
    n, v, h = (max(16, size // _DRY_DIVISOR) for size in shape)
    return n, v, h


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """The options, `--dry-run` among them, whose results must not stand among the published ones."""
    parser.add_argument("--dry-run", action="store_true", help="small sizes by XLA, to see that the commands work")
    options = parser.parse_args(words)
    if options.dry_run:
        if options.out is None:
            parser.error("--dry-run needs --out: its results are not those of the published sizes")
        print("DRY RUN: sizes are shrunk; these are not the published measurements", file=sys.stderr)
    return options


def point_options(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command that measures points; `doc` is what `--help` says."""
    parser = parser_of(doc)
    add_options(parser)
    parser.add_argument("--clock", choices=timing.CLOCKS, default="launches", help="back-to-back launches or profiler")
    return parser


def measure_and_report(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], int],
    write: Callable[[Path], list[Path]],
) -> int:
    """Measures, unless `--report` says not to, then writes the report of the results' folder; the exit status."""
    parser.add_argument("--report", action="store_true", help="only make the report from what is measured")
    options = parsed(parser, words)
    if not options.report and (status := measure(options)):
        return status
    try:
        print("\n".join(map(str, write(options.out or FOLDER))))
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run_sections(
    name: str,
    doc: str | None,
    sections: Sections,
    words: Sequence[str] | None,
) -> int:
    """Measures, prints and writes each point as it goes; returns the exit status.

    Args:
        name: of the module in `experiments`, and of its result files.
        doc: what `--help` says.
        sections: points by section and name.
        words: the command line; None for the process's.
    """
    parser = point_options(doc)
    parser.add_argument("sections", nargs="*", default=list(sections), metavar="SECTION", help=", ".join(sections))
    options = parsed(parser, words)
    if unknown := [section for section in options.sections if section not in sections]:
        parser.error(f"there is no section {unknown[0]!r}; choose from {', '.join(sections)}")
    command = f"python -m experiments.{name}"
    files = {f"{name}_{section}": (f"{command} {section}", sections[section]) for section in options.sections}
    return run_points(files, options)


def run_points(files: Mapping[str, tuple[str, Mapping[str, Point]]], options: argparse.Namespace) -> int:
    """Measures, prints and writes each point as it goes; returns the exit status.

    Args:
        files: by name without suffix, the command that makes a result file, and its points.
        options: those of `point_options`, as `parsed` returns them.
    """

    def measured(point: Point) -> Record:
        implementation: Implementation = "xla" if options.dry_run else "mosaic_gpu"
        shape = dry(point.shape) if options.dry_run else point.shape
        measure = point.measure or timing.measure
        return measure(shape, point.programs(implementation, shape), options.rounds, timing.CLOCKS[options.clock])

    made = [
        ResultFile(name, command, {key: functools.partial(measured, point) for key, point in points.items()})
        for name, (command, points) in files.items()
    ]
    machine = describe() | {"clock": options.clock, "rounds": options.rounds}
    return run(made, machine, _shown, options)


def _shown(_: str, record: dict[str, Any]) -> str:
    """Of each program the figure by which it is judged; programs that are only a yardstick have none."""
    judged = ("ratio", "share", "compile_seconds")
    found = {k: next((r[f] for f in judged if f in r), None) for k, r in record["results"].items()}
    figures = {k: round(number, 3) for k, number in found.items() if number is not None}
    left_out = "".join(f"; {program} left out, {why}" for program, why in record.get("left_out", {}).items())
    return f"N {record['n']} V {record['v']}: {figures}{left_out}"
