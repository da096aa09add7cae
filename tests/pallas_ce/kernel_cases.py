"""Losses, gradients and statistics by the kernels: one table of problems, beside the float64 oracle.

Each kernels' tests run it, in their interpreter or on a GPU.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import linear_row_statistics
from pallas_ce.backends.mosaic_gpu import plans
from pallas_ce.backends.protocol import Plan
from pallas_ce.backends.triton import backend as triton
from pallas_ce.head import Head
from pallas_ce.parallel.shards import Shards
from pallas_ce.statistics.row import STATISTICS
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import (
    assert_as_accurate_as_reference,
    assert_as_accurate_as_rounded_dlogits,
    assert_close,
    call,
    library_results,
    oracle_results,
    with_gradients,
)
from tests.pallas_ce.problems import LOGIT_OPTIONS, Problem, make
from tests.pallas_ce.sums import assert_adds_16_bits, several_blocks

MODES = ("recompute", "in_forward")
BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
# By implementation, the function that plans recompute's blocks.
PLANNERS: dict[str, tuple[Any, str]] = {"mosaic_gpu": (plans, "recompute"), "triton": (triton, "_recompute_plan")}


class Case(NamedTuple):
    """A problem, and how the work on it is cut.

    Attributes:
        sizes: rows, width, and vocabulary entries without padding.
        options: of the loss.
        has: the further arrays: "bias", "logit_scale" and "token_weights".
        rank: of a low-rank term.
        padding: how many rows of the weight are no entries.
        ignored: the share of rows whose label is ignored.
        several: whether scratch is for several blocks of rows.
        tile: rows and columns that recompute works on at a time; None: as planned.
        shard: whether the padding is known at run time only, as it is to the shards of a vocabulary.
        adds: factor of the loss and whether the sums are narrow, where gradients are added to sums.
        spoil: changes the problem.
        masters: whether the weight is kept in float32.
        config: of the Hopper kernels' tiles, where it is not the interpreter's.
        modes: backward modes, and "statistics", each of them without a loss.
    """

    sizes: tuple[int, int, int]
    options: Mapping[str, Any] = MappingProxyType({})
    has: tuple[str, ...] = ()
    axis: int = 0
    dtype: Any = BFLOAT16
    rank: int = 0
    padding: int = 0
    ignored: float = 0.2
    several: bool = False
    tile: tuple[int, int] | None = None
    shard: bool = False
    adds: tuple[float, bool] | None = None
    spoil: Callable[[Problem], Any] = lambda p: None
    masters: bool = False
    config: Mapping[str, Any] = MappingProxyType({})
    modes: tuple[Any, ...] = MODES


def far_below_the_targets(p: Problem) -> None:
    """Exponentials of most entries are hardly or not at all in range, and the gradient depends on their logits."""
    p.labels = np.argmax(p.arrays["hidden"].astype(np.float32) @ p.arrays["weight"].T.astype(np.float32), axis=1)
    p.arrays["weight"] = p.arrays["weight"] * p.arrays["weight"].dtype.type(8)


def uneven(height: float) -> np.ndarray:
    """A bias of 192 entries: one that no sample has is so high, or those that it has, multiples of 3, are so low."""
    raised = np.zeros(192, np.float32)
    raised[100] = height
    return raised if height > 0 else np.where(np.arange(192) % 3 == 1, 0, height).astype(np.float32)


def with_uneven_bias(height: float) -> Callable[[Problem], None]:
    """The lse of rows is far from what it is taken for."""
    return lambda p: p.arrays.update(bias=uneven(height))


HEAD = ("bias", "logit_scale")
CAPPED = {"logit_softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3}
PART = {"label_smoothing": 0.2, "z_loss": 1e-2, "logit_softcap": 8.0}
IN_PLACE = Case((384, 256, 272), several=True, modes=("in_forward",))
TILES = Case((384, 256, 576), {"label_smoothing": 0.1}, HEAD, tile=(384, 256), modes=("recompute",))
TERM = Case((40, 48, 128), rank=4)
SUMS = Case((150, 48, 131), has=("bias", "token_weights"), padding=5, several=True, adds=(-3.0, False))
FAR = Case((40, 64, 192), modes=("in_forward",))
PARTS = Case((43, 48, 808), has=("bias",), tile=(43, 256), modes=("recompute",))
EVERY = ("statistics", *MODES)

CASES = {
    "plain": Case((70, 64, 208)),
    "two classes": Case((40, 64, 2), axis=1, padding=14),
    "much padding": Case((40, 64, 133), axis=1, padding=187),
    "float16 in blocks": Case((80, 64, 208), dtype=FLOAT16, several=True),
    "every option": Case((70, 64, 201), CAPPED, HEAD, padding=15),
    "every option, transposed": Case((70, 80, 201), CAPPED, HEAD, padding=23, axis=1),
    "a little padding": Case((70, 256, 648), padding=8),
    "a little padding, weighted": Case(
        (70, 256, 648), {"label_smoothing": 0.2, "class_weights": np.linspace(0.5, 2, 648)}, padding=8
    ),
    "products by kernels": IN_PLACE._replace(several=False, dtype=FLOAT16),
    "products by kernels in blocks": IN_PLACE._replace(axis=1, ignored=0.6),
    "blocks of ignored rows": IN_PLACE._replace(axis=1, dtype=FLOAT16, ignored=1.0),
    "a whole tile": TILES._replace(axis=1, tile=(384, 576), ignored=0.0),
    "blocks and tiles": TILES._replace(sizes=(396, 256, 584), tile=(128, 256), ignored=0.6),
    "blocks and tiles, transposed": TILES._replace(sizes=(396, 256, 592), tile=(128, 256), axis=1, ignored=0.6),
    "a shard": Case((320, 256, 290), padding=286, shard=True, tile=(320, 256)),
    "a shard with options": Case((70, 64, 100), PART, ("bias",), padding=108, shard=True, axis=1),
    "a weighted shard": Case(
        (70, 64, 100), PART | {"class_weights": np.linspace(0.5, 2, 100)}, ("bias",), padding=108, shard=True
    ),
    "a term": TERM,
    "a term of two steps": TERM._replace(rank=70, axis=1),
    "a term in blocks": TERM._replace(sizes=(33, 48, 136), rank=3, several=True),
    "a term under a cap": TERM._replace(sizes=(33, 48, 130), padding=14, options={"logit_softcap": 3.0}, axis=1),
    "a term with a little padding": TERM._replace(sizes=(40, 48, 127), padding=1),
    "a term in place": TERM._replace(sizes=(384, 256, 576), several=True, tile=(384, 256), ignored=0.6),
    "a term in place, transposed": TERM._replace(
        sizes=(384, 256, 576), tile=(384, 256), axis=1, ignored=0.0, modes=("recompute",)
    ),
    "sums": SUMS,
    "narrow sums": SUMS._replace(padding=13, axis=1, adds=(-3.0, True)),
    "parts and masters": PARTS._replace(dtype=FLOAT16, masters=True, ignored=0.0),
    "parts of few rows": PARTS._replace(dtype=FLOAT16, masters=True, ignored=0.7, axis=1, sizes=(43, 48, 816)),
    "parts of no rows": PARTS._replace(ignored=1.0),
    "parts of a shard": PARTS._replace(sizes=(43, 48, 805), padding=3, shard=True, ignored=0.7),
    "parts with a term": PARTS._replace(sizes=(43, 48, 760), padding=56, rank=3, axis=1, has=()),
    "parts added to a sum": PARTS._replace(adds=(-3.0, False), has=()),
    "a sum of blocks in place": Case((256, 256, 320), tile=(128, 256), adds=(0.3, False), modes=("recompute",)),
    "far below a cap": FAR._replace(
        options={"logit_softcap": 30.0, "label_smoothing": 0.3}, spoil=far_below_the_targets
    ),
    "far below a cap, float16": FAR._replace(
        options={"logit_softcap": 20.0, "label_smoothing": 0.3}, spoil=far_below_the_targets, dtype=FLOAT16
    ),
    "an entry far above": FAR._replace(spoil=with_uneven_bias(150.0)),
    "an entry above, float16": FAR._replace(spoil=with_uneven_bias(30.0), dtype=FLOAT16),
    "entries far below": FAR._replace(spoil=with_uneven_bias(-200.0)),
    "entries far below, float16": FAR._replace(
        spoil=with_uneven_bias(-200.0), dtype=FLOAT16, options={"label_smoothing": 0.1}
    ),
    # Every schedule, and sizes that are no multiples of its tiles.
    "four stages": Case((96, 64, 192), axis=1, config={"stages": 4}, modes=EVERY),
    "wide tiles": Case((70, 80, 200), has=("bias",), padding=32, config={"columns": 128, "piece": 64}, modes=EVERY),
    "wider tiles": Case((70, 80, 264), has=HEAD, dtype=FLOAT16, config={"columns": 192}, modes=EVERY),
    "tall tiles": Case((9, 16, 5), {"logit_softcap": 3.0}, axis=1, padding=11, config={"rows": 128}, modes=EVERY),
    "two stages": Case((129, 64, 320), config={"row_group": 1, "stages": 2}, modes=EVERY),
    "groups of rows": Case((400, 272, 328), config={"row_group": 2, "columns": 128}, modes=EVERY),
    "seven SMs": Case((150, 80, 584), CAPPED, HEAD, config={"columns": 128, "piece": 64, "sms": 7}, modes=EVERY),
    "everything large": Case(
        (200, 336, 640), axis=1, config={"rows": 128, "columns": 128, "piece": 64, "row_group": 2}, modes=EVERY
    ),
}
EACH = [(name, mode) for name, case in CASES.items() for mode in case.modes]
# What an interpreter of one number at a time serves in seconds, without the schedules of the Hopper kernels.
SMALL = [(name, mode) for name, mode in EACH if np.prod(CASES[name].sizes) < 2e6 and not CASES[name].config]


def nightly_but_for(quick: list[tuple[str, Any]], every: list[tuple[str, Any]]) -> list[Any]:
    """Parameters of a test: the `quick` ones in the gate, too."""
    return [*quick, *(pytest.param(*x, marks=pytest.mark.nightly) for x in every if x not in quick)]


def problem_of(case: Case) -> Problem:
    """The last entry is among the labels; no array that a kernel multiplies is wider than 16 bits."""
    n, h, v = case.sizes
    p, rng = make(5, n, h, v + case.padding, 2.0, case.axis), np.random.default_rng(0)
    p.labels = np.where(rng.random(n) < case.ignored, -100, np.abs(p.labels) % v).astype(np.int32)
    p.labels[1] = -100 if case.ignored == 1 else v - 1
    if case.rank:
        p.arrays["up"] = rng.normal(size=(v + case.padding, case.rank)) / np.sqrt(case.rank)
        p.arrays["down"] = rng.normal(size=(case.rank, h)) / np.sqrt(h)
    p.arrays = {name: x.astype(case.dtype) for name, x in p.arrays.items()}
    further = {"bias": rng.normal(size=v + case.padding), "logit_scale": 1.3, "token_weights": rng.uniform(0, 2, n)}
    p.arrays |= {name: np.float32(further[name]) for name in case.has}
    if case.masters:
        p.arrays["weight"] = p.arrays["weight"].astype(np.float32)
    p.options = {**case.options, **({"vocab_size": v} if case.padding else {})}
    case.spoil(p)
    return p


def check(case: Case, implementation: str, mode: Any, patch: pytest.MonkeyPatch) -> None:
    """One of the case's modes.

    Rows that are ignored and padding of weight and low-rank term hold NaN; the weight's padding has no gradient.
    """
    p, v, entered = problem_of(case), case.sizes[2], Shards.enter
    planner, name = PLANNERS[implementation]
    plan = getattr(planner, name)

    def planned(*given: Any) -> Plan:
        found, (rows, columns) = plan(*given), case.tile or (0, 0)
        return found._replace(rows=min(rows, given[1]), columns=min(columns, found.vocab_size))

    def enter(self: Shards, rows: Any, head: Head) -> Any:
        rows, head = entered(self, rows, head)
        return rows, head.with_padding(head.spec.weight_rows)

    if case.tile is not None:
        patch.setattr(planner, name, planned)
    if case.shard:
        patch.setattr(Shards, "enter", enter)
    if case.tile is not None or case.shard:
        jax.clear_caches()  # of calls of the same shapes that were traced without
    if mode == "statistics":
        return assert_statistics(p, implementation)
    options: dict[str, Any] = {"scratch_bytes": several_blocks(p, implementation, mode) if case.several else None}
    if case.adds is not None:
        factor, narrow = case.adds
        return assert_adds_16_bits(p, factor, mode, narrow=narrow, implementation=implementation, **options)
    counts, padding = p.labels >= 0, np.arange(v + case.padding)[:, None] >= v
    unread = {"hidden": ~counts[:, None], "weight": padding, **({"up": padding} if case.rank else {})}
    given = {
        name: np.where(where, np.nan, p.arrays[name]).astype(p.arrays[name].dtype) for name, where in unread.items()
    }
    options |= {"dtype": case.dtype} if case.masters else {}
    found = library_results(dataclasses.replace(p, arrays=p.arrays | given), implementation, mode, **options)
    if case.rank:
        assert_as_accurate_as_reference(p, found, oracle_results(p))
    else:
        assert_as_accurate_as_rounded_dlogits(p, found, mode)
    assert not np.any(found[1]["weight"][v:])


def assert_same_bits(run: Callable[[], Any]) -> None:
    """Each of five times."""
    first, *others = (jax.tree.map(np.asarray, run()) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def assert_statistics(p: Problem, implementation: str) -> None:
    """Every one of every row, which nothing rounds."""
    arrays = {name: x for name, x in p.arrays.items() if name != "token_weights"}
    p.options = {name: x for name, x in p.options.items() if name in LOGIT_OPTIONS}
    options: Any = {"statistics": STATISTICS, "implementation": implementation}
    u = None
    if "bias" in arrays:
        u = np.random.default_rng(1).normal(size=p.options.get("vocab_size", len(arrays["bias"]))).astype(np.float32)
        options["logit_weights"] = u
    values, _ = oracle.statistics(oracle.Logits(arrays, **p.options), p.labels, u)
    found, _ = with_gradients(lambda _: call(linear_row_statistics, p, arrays, **options), 0.0, lambda _: 0.0)
    for name in set(STATISTICS) - {"argmax"}:
        assert_close(getattr(found, name), values[name], 2e-5, floor=1e-4)
    np.testing.assert_array_equal(found.argmax, values["argmax"])
