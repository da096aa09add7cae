"""What the tuner tries: tiles that are known to fit registers and shared memory, refined from the best in steps."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pallas_ce.backends.mosaic_gpu.schedule import config
from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages
from pallas_ce.backends.mosaic_gpu.tuning import tables
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, ShapeClass, Table
from pallas_ce.head import HeadSpec

_ROW_GROUPS = (4, 8, 12, 16)

# A candidate that gains less than the noise of a measurement leaves the rule's choice in place. The best of many is
# measured once more: to be the best it may have needed luck.
_LEAST_GAIN = 0.99


class Case(NamedTuple):
    """One kernel at one size, as a call would launch it."""

    kernel: Kernel
    spec: HeadSpec
    rows: int
    columns: int

    @property
    def shape_class(self) -> ShapeClass:
        """The class that the case stands for."""
        return tables.class_of(self.kernel, self.rows, self.columns, self.spec.hidden_size, self.spec.vocab_axis)

    @property
    def rule(self) -> Config:
        """What is taken where no table knows better."""
        return config.with_least_padding(config.choose(self.kernel, 2, 0), self.rows)


class Times(NamedTuple):
    """Microseconds of a candidate, and of the rule's tiles measured in turn with it."""

    candidate: float
    rule: float


# Times a candidate, or says why it cannot be taken.
Measure = Callable[[Case, Config], Times | str]


def first_candidates(kernel: Kernel) -> Iterator[Config]:
    """Every tile with every schedule, and as many stages as fit."""
    for (rows, columns, piece, ping_pong), cluster in itertools.product(TILES[kernel], ("columns", "rows", None)):
        for lead in (0,) if ping_pong else (0, 2):
            candidate = Config(
                rows=rows,
                columns=columns,
                piece=piece,
                ping_pong=ping_pong,
                cluster=cluster,  # type: ignore[arg-type]
                in_flight=1,
                lead=lead,
                row_group=12 if cluster is None else 8,
            )
            yield dataclasses.replace(candidate, stages=most_stages(kernel, candidate))


def refinements(kernel: Kernel, best: Config) -> Iterator[Config]:
    """Neighbours of the best tile: row groups, and one stage fewer."""
    for row_group in _ROW_GROUPS:
        if row_group != best.row_group:
            yield dataclasses.replace(best, row_group=row_group)
    if best.stages > 2:
        yield dataclasses.replace(best, stages=best.stages - 1)


def number_of_candidates(kernel: Kernel) -> int:
    """How many a case tries, at most."""
    return len(list(first_candidates(kernel))) + len(_ROW_GROUPS)


def best_of(
    case: Case, measure: Measure, tried: Callable[[Config, Times | str], None], in_time: Callable[[], bool]
) -> Entry | None:
    """The fastest candidate for `case`; the rule's where none is faster; None if time runs out before all are tried.

    Args:
        case: kernel and size.
        measure: times one candidate.
        tried: is told of every candidate.
        in_time: whether there is time for another one.
    """
    found: dict[Config, Times] = {}

    def ratio(candidate: Config) -> float:
        return found[candidate].candidate / found[candidate].rule

    def try_all(candidates: Iterator[Config]) -> bool:
        for candidate in candidates:
            if not in_time():
                return False
            result = measure(case, candidate)
            tried(candidate, result)
            if isinstance(result, Times):
                found[candidate] = result
        return True

    if not try_all(first_candidates(case.kernel)) or not found:
        return None
    if not try_all(refinements(case.kernel, min(found, key=ratio))):
        return None
    best = min(found, key=ratio)
    again = measure(case, best)
    times = again if isinstance(again, Times) else found[best]
    found[best] = times
    return Entry(best, *times) if ratio(best) < _LEAST_GAIN else Entry(case.rule, times.rule, times.rule)


def tune(
    cases: list[Case],
    table: Table,
    measure: Measure,
    save: Callable[[Table], None],
    tried: Callable[[Case, Config, Times | str], None],
    in_time: Callable[[], bool],
) -> int:
    """Fills `table` with the cases' classes, saving it after each; returns how many are left when time runs out."""
    for done, case in enumerate(cases):
        entry = best_of(case, measure, functools.partial(tried, case), in_time)
        if not in_time() and entry is None:
            return len(cases) - done
        if entry is not None:
            table.entries[case.shape_class] = entry
            save(table)
    return 0
