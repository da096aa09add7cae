"""What commands in sections share: each section has a result file, each of its points a shape and programs."""

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.bench import timing
from experiments.bench.programs import Program, Shape
from experiments.bench.results import Point, Record, ResultFile
from pallas_ce.backends.protocol import Implementation

_DRY_DIVISOR = 64


class Case(NamedTuple):
    """What a point measures.

    Attributes:
        name: of the point.
        shape: N, V, H.
        programs: by name, of ours by that implementation and at that shape.
        measure: makes the record of shape, programs, rounds and clock.
    """

    name: str
    shape: Shape
    programs: Callable[[Implementation, Shape], dict[str, Program]]
    measure: Callable[..., Record] = lambda *given: timing.measure(*given)


def dry(shape: Shape) -> Shape:
    """The sizes that a dry run measures in place of these."""
    n, v, h = (max(16, size // _DRY_DIVISOR) for size in shape)
    return n, v, h


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option of commands that time compiled programs of JAX."""
    parser.add_argument("--clock", choices=timing.CLOCKS, default="launches", help="back-to-back launches or profiler")


def add_options(parser: argparse.ArgumentParser, sections: Mapping[str, Any]) -> None:
    """The clock, and which sections."""
    add_clock(parser)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(sections))
    parser.set_defaults(sections=list(sections))


def points(cases: list[Case], options: argparse.Namespace) -> list[Point]:
    """Of these cases, of their size or a dry run's."""

    def measured(case: Case) -> Record:
        implementation: Implementation = "xla" if options.dry_run else "mosaic_gpu"
        shape = dry(case.shape) if options.dry_run else case.shape
        programs = case.programs(implementation, shape)
        return case.measure(shape, programs, options.rounds, timing.CLOCKS[options.clock])

    return [Point(case.name, functools.partial(measured, case)) for case in cases]


def files(name: str, sections: Mapping[str, list[Case]], options: argparse.Namespace) -> list[ResultFile]:
    """A result file for each section that is asked for."""
    if unknown := [section for section in options.sections if section not in sections]:
        options.usage_error(f"there is no section {unknown[0]!r}; choose from {', '.join(sections)}")
    clock = {"clock": options.clock}
    return [
        ResultFile(f"{name}_{section}", points(sections[section], options), f"{name} {section}", clock)
        for section in options.sections
    ]
