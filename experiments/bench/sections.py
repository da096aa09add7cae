"""What commands in sections share: each section has a result file, each of its points a shape and programs."""

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from experiments.bench import timing
from experiments.bench.programs import Program, Shape
from experiments.bench.results import Point, Record, ResultFile
from pallas_ce.backends.protocol import Implementation

_DRY_DIVISOR = 64

# What result files say of how time was taken: by launches that follow each other (`timing`).
CLOCK = {"clock": "launches"}

# What serves in an implementation's place, or by default: XLA in a dry run.
Serve = Callable[[Implementation | None], Implementation | None]


class Case(NamedTuple):
    """A point: its shape N, V, H, its programs for an implementation and shape, and what makes the record of them."""

    name: str
    shape: Shape
    programs: Callable[[Serve, Shape], dict[str, Program]]
    measure: Callable[..., Record] = lambda *given: timing.measure(*given)


def sized(shape: Shape, options: argparse.Namespace) -> Shape:
    """The shape, or the smaller one that a dry run measures in its place."""
    n, v, h = (max(16, size // _DRY_DIVISOR) if options.dry_run else size for size in shape)
    return n, v, h


def points(cases: list[Case], options: argparse.Namespace) -> list[Point]:
    """Of these cases, of their size or a dry run's."""

    def measured(case: Case) -> Record:
        shape = sized(case.shape, options)
        programs = case.programs((lambda name: "xla") if options.dry_run else (lambda name: name), shape)
        return case.measure(shape, programs, options.rounds)

    return [Point(case.name, functools.partial(measured, case)) for case in cases]


def files(name: str, sections: Mapping[str, list[Case]], options: argparse.Namespace) -> list[ResultFile]:
    """A result file for each section that is asked for."""
    if unknown := [section for section in options.sections if section not in sections]:
        options.usage_error(f"there is no section {unknown[0]!r}; choose from {', '.join(sections)}")
    return [
        ResultFile(f"{name}_{section}", points(sections[section], options), f"{name} {section}", CLOCK)
        for section in options.sections
    ]
