"""What the tuner tries: tiles that are known to fit registers and shared memory, refined from the best in steps."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.mosaic_gpu.schedule import config
from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages
from pallas_ce.backends.mosaic_gpu.tuning import tables
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, ShapeClass
from pallas_ce.head import HeadSpec

_ROW_GROUPS = (4, 8, 12, 16)

# A candidate that gains less than the noise of a measurement leaves the rule's choice in place. The best of many is
# measured once more: to be the best it may have needed luck.
_LEAST_GAIN = 0.99


class Case(NamedTuple):
    """One kernel at one size, as a call would launch it."""

    kernel: Kernel
    rows: int
    columns: int
    hidden_size: int
    vocab_axis: int

    @property
    def spec(self) -> HeadSpec:
        """The head that the kernel sees."""
        return HeadSpec(self.hidden_size, self.columns, self.columns, self.vocab_axis, np.dtype(jnp.bfloat16), None)

    @property
    def shape_class(self) -> ShapeClass:
        """The class that the case stands for."""
        return tables.class_of(*self)

    @property
    def rule(self) -> Config:
        """What is taken where no table knows better."""
        return config.with_least_padding(config.default_tiles(self.kernel, 2, 0), self.rows)


class Times(NamedTuple):
    """Microseconds of a candidate, and of the rule's tiles measured in turn with it."""

    candidate: float
    rule: float

    @property
    def ratio(self) -> float:
        """Less than 1 for a candidate that is faster."""
        return self.candidate / self.rule


# Times a candidate, or says why it cannot be taken.
Measure = Callable[[Config], Times | str]


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


def refinements(best: Config) -> Iterator[Config]:
    """Neighbours of the best tile: row groups, and one stage fewer."""
    for row_group in _ROW_GROUPS:
        if row_group != best.row_group:
            yield dataclasses.replace(best, row_group=row_group)
    if best.stages > 2:
        yield dataclasses.replace(best, stages=best.stages - 1)


def number_of_measurements(kernel: Kernel) -> int:
    """How many a case takes, at most: every candidate once, the best twice."""
    return len(list(first_candidates(kernel))) + len(_ROW_GROUPS) + 1


def best_of(case: Case, measure: Measure) -> Entry | None:
    """The fastest candidate for `case`; the rule's where none is faster; None where none runs."""
    found: dict[Config, Times] = {}

    def try_all(configs: Iterable[Config]) -> Config | None:
        for candidate in configs:
            if isinstance(result := measure(candidate), Times):
                found[candidate] = result
        return min(found, key=lambda candidate: found[candidate].ratio, default=None)

    if (best := try_all(first_candidates(case.kernel))) is None:
        return None
    best = try_all(refinements(best))
    assert best is not None
    again = measure(best)
    times = again if isinstance(again, Times) else found[best]
    return Entry(best, *times) if times.ratio < _LEAST_GAIN else Entry(case.rule, times.rule, times.rule)
