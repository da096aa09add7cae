"""Losses and gradients by the kernels, under the GPU interpreter: one table of problems, beside the float64 oracle."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_ce.backends.mosaic_gpu
from pallas_ce import linear_loss, linear_row_statistics
from pallas_ce.backends.mosaic_gpu import plans
from pallas_ce.backends.mosaic_gpu.kernels import operands
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.modes import forward
from pallas_ce.parallel.shards import Shards
from pallas_ce.streaming.rows import Rows
from tests.pallas_ce.checks import (
    assert_as_accurate_as_reference,
    assert_as_accurate_as_rounded_dlogits,
    library_results,
    oracle_results,
)
from tests.pallas_ce.problems import Problem, make
from tests.pallas_ce.sums import assert_adds_16_bits, several_blocks

MODES = ("recompute", "in_forward")
BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


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

CASES = {
    "plain": Case((70, 64, 208)),
    "transposed": Case((70, 64, 208), axis=1),
    "two classes": Case((40, 64, 2), axis=1, padding=14),
    "much padding": Case((40, 64, 133), axis=1, padding=187),
    "float16 in blocks": Case((80, 64, 208), dtype=FLOAT16, several=True),
    "every option": Case((70, 64, 201), CAPPED, HEAD, padding=15),
    "every option, transposed": Case((70, 80, 201), CAPPED, HEAD, padding=23, axis=1),
    "a little padding": Case((70, 256, 648), padding=8),
    "a little padding, weighted": Case(
        (70, 256, 648), {"label_smoothing": 0.2, "class_weights": np.linspace(0.5, 2, 648)}, padding=8
    ),
    "products by kernels": IN_PLACE._replace(several=False),
    "products by kernels in blocks": IN_PLACE._replace(axis=1, ignored=0.6),
    "products by kernels in blocks, float16": IN_PLACE._replace(dtype=FLOAT16, ignored=0.0),
    "blocks of ignored rows": IN_PLACE._replace(axis=1, dtype=FLOAT16, ignored=1.0),
    "a whole tile": TILES._replace(axis=1, tile=(384, 576), ignored=0.0),
    "tiles, the last one narrower": TILES._replace(ignored=0.6),
    "blocks and tiles": TILES._replace(sizes=(396, 256, 584), tile=(128, 256), ignored=0.6),
    "blocks and tiles, transposed": TILES._replace(sizes=(396, 256, 592), tile=(128, 256), axis=1, ignored=0.0),
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
    "a sum in place": Case((256, 256, 320), tile=(256, 256), adds=(0.3, False), modes=("recompute",)),
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
}


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
    p.options = {**case.options, **({"vocab_size": v} if case.padding else {})}
    case.spoil(p)
    return p


# One case of each kind; `make test-all` runs all of them.
QUICK = [
    ("every option, transposed", "recompute"),
    ("float16 in blocks", "in_forward"),
    ("products by kernels in blocks", "in_forward"),
    ("tiles, the last one narrower", "recompute"),
    ("a weighted shard", "in_forward"),
    ("a term under a cap", "recompute"),
    ("narrow sums", "in_forward"),
    ("entries far below", "in_forward"),
]
EVERY = [(name, mode) for name, case in CASES.items() for mode in case.modes]


@pytest.mark.parametrize(
    ("name", "mode"), [*QUICK, *(pytest.param(*x, marks=pytest.mark.nightly) for x in EVERY if x not in QUICK)]
)
def test_the_loss_and_its_gradients(name: str, mode: Any, interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are ignored and padding of weight and low-rank term hold NaN; the weight's padding has no gradient."""
    case, entered = CASES[name], Shards.enter
    p, v = problem_of(case), case.sizes[2]

    def planned(spec: HeadSpec, tokens: int, *_: int) -> Plan:
        rows, columns = min(case.tile[0], tokens), min(case.tile[1], spec.vocab_size)
        return Plan(rows, columns, 2**20, spec.vocab_size, skips_rows=True)

    def enter(self: Shards, rows: Any, head: Head) -> Any:
        rows, head = entered(self, rows, head)
        return rows, head.with_padding(head.spec.weight_rows)

    options = {"scratch_bytes": several_blocks(p, "mosaic_gpu", mode) if case.several else None}
    if case.tile is not None:
        monkeypatch.setattr(plans, "recompute", planned)
    if case.shard:
        monkeypatch.setattr(Shards, "enter", enter)
    if case.adds is not None:
        factor, narrow = case.adds
        return assert_adds_16_bits(p, factor, mode, narrow=narrow, implementation="mosaic_gpu", **options)
    given = dict(p.arrays, hidden=np.where((p.labels < 0)[:, None], np.nan, p.arrays["hidden"]).astype(case.dtype))
    padding = np.arange(v + case.padding)[:, None] >= v
    given["weight"] = np.where(padding, np.nan, p.arrays["weight"]).astype(case.dtype)
    if case.rank:
        given["up"] = np.where(padding, np.nan, given["up"]).astype(case.dtype)
    found = library_results(dataclasses.replace(p, arrays=given), "mosaic_gpu", mode, **options)
    if case.rank:
        assert_as_accurate_as_reference(p, found, oracle_results(p))
    else:
        assert_as_accurate_as_rounded_dlogits(p, found, mode)
    assert not np.any(found[1]["weight"][v:])


LABELS = np.arange(40) * 7 % 192
SOME = np.where(np.arange(40) % 3, LABELS, -100)
SEVERAL = np.stack([SOME, np.roll(SOME, 1), SOME], axis=1)  # some of them equal or ignored
# An entry that is replaced is larger than any exponential beside it can be, or these count for nothing.
FACTORS = np.tile(np.float32([1.0, -1e-6, 1e-36, 0.0]), 10)


def mixture(s: Any) -> jax.Array:
    """A loss of no meaning that reads every statistic."""
    probabilities = s.sum_sq_probs - 0.2 * s.entropy + 0.1 * s.varentropy
    return jnp.square(s.lse - s.target_logit + 0.3 * s.mean_logit + 0.1 * s.max_logit + probabilities)


def squares(s: Any) -> jax.Array:
    """The square of an exponential leaves float32's range at half the distance at which the exponential does."""
    return s.sum_sq_probs + s.lse


def lopsided(s: Any, factor: jax.Array) -> jax.Array:
    return factor * s.lse - s.target_logit


def of_several(s: Any, labels: jax.Array) -> jax.Array:
    return -jnp.where(labels >= 0, s.log_prob * jnp.arange(1, 4), 0.0).sum(axis=1)


# A row's loss, labels and inputs, options, the mode, the dtype, and how many roundings an error may have.
LOSSES: list[tuple[Any, tuple[Any, ...], dict[str, Any], str, Any, float]] = [
    (mixture, (LABELS,), {"logit_weights": uneven(1.0)}, "recompute", jnp.bfloat16, 3),
    (mixture, (LABELS,), {"logit_weights": uneven(1.0)}, "in_forward", jnp.bfloat16, 3),
    (of_several, (SEVERAL, SEVERAL), {}, "recompute", jnp.bfloat16, 2),
    (of_several, (SEVERAL, SEVERAL), {}, "in_forward", jnp.float16, 2.5),
    (squares, (LABELS,), {"bias": uneven(50.0)}, "in_forward", jnp.bfloat16, 4),
    (squares, (None,), {"bias": uneven(150.0)}, "in_forward", jnp.bfloat16, 4),
    (squares, (LABELS,), {"bias": uneven(-50.0)}, "in_forward", jnp.bfloat16, 4),
    (lopsided, (LABELS, FACTORS), {}, "in_forward", jnp.bfloat16, 2),
    (lopsided, (LABELS, FACTORS), {"bias": uneven(30.0)}, "in_forward", jnp.float16, 2.5),
]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("loss", "labels", "options", "mode", "dtype", "roundings"), LOSSES)
def test_losses_of_statistics(
    loss: Any, labels: Any, options: Any, mode: str, dtype: Any, roundings: float, interpreted: Any
) -> None:
    """Beside the reference, which gets the same numbers in float32; errors relative to the largest gradient."""
    keys = jax.random.split(jax.random.key(5))
    head = jax.random.normal(keys[0], (40, 64), dtype), jax.random.normal(keys[1], (192, 64), dtype) * dtype(0.3)

    def run(how: Any, mode: Any, *head: jax.Array) -> Any:
        given: Any = {"implementation": how, "backward": mode, **options}
        return jax.value_and_grad(lambda *head: linear_loss(loss, *head, *labels, **given), (0, 1))(*head)

    want, exact = run("reference", "auto", *(x.astype(jnp.float32) for x in head))
    got, gradients = interpreted(lambda *head: run("mosaic_gpu", mode, *head))(*head)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for found, right in zip(gradients, exact, strict=True):
        assert found.dtype == dtype
        bound = roundings * jnp.finfo(dtype).eps / 2 * np.abs(right).max() + 1e-6
        assert np.abs(found.astype(jnp.float32) - right).max() <= bound


def test_the_last_of_several_blocks_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch, interpreted: Any) -> None:
    """Statistics without a mask, whose blocks do not end where the rows do."""
    plan = Plan(128, 256, 2**20, 320, True)
    monkeypatch.setattr(plans, "recompute", lambda *given: plan)
    p, factors = make(5, 200, 256, 320), np.arange(200, dtype=np.float32)
    head = p.arrays["hidden"].astype(BFLOAT16), p.arrays["weight"].astype(BFLOAT16)

    def gradients(how: Any, *head: Any) -> Any:
        def weighted(*head: Any) -> jax.Array:
            return jnp.sum(factors * linear_row_statistics(*head, statistics=("lse",), implementation=how).lse)

        return jax.grad(weighted, (0, 1))(*head)

    found = interpreted(functools.partial(gradients, "mosaic_gpu"))(*head)
    for got, want in zip(found, gradients("reference", *head), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.02 * np.abs(want).max())


def test_a_shard_of_padding_only_leaves_nothing(interpreted: Any) -> None:
    backend, plan = pallas_ce.backends.mosaic_gpu.BACKEND, Plan(64, 208, 2**20, 208)
    spec = HeadSpec(64, 208, 208, 0, BFLOAT16, None, whole_vocab_size=500)
    names = frozenset({"lse", "target_logit", "max_logit"})

    def run(hidden: jax.Array, weight: jax.Array) -> Any:
        head, batch = Head(weight, None, None, None, spec, jnp.int32(0)), Batch(hidden, jnp.full(64, -1, jnp.int32))
        block = Rows.counted(None).blocks(64, 64).block(0)
        return backend.statistics(head, batch, names, plan), *backend.stash(head, batch, names, plan, block)

    forward, partial, stash = interpreted(run)(jnp.ones((64, 64), BFLOAT16), jnp.ones((208, 64), BFLOAT16))
    for found in (forward, partial):
        assert np.all(np.isneginf(found.max))
        assert not np.any(found.sum_exp)
    assert not np.any(stash.exponentials[:, :208])


def test_rows_that_do_not_count_are_skipped_block_by_block(monkeypatch: pytest.MonkeyPatch, interpreted: Any) -> None:
    monkeypatch.setattr(forward, "_GATHERED_BYTES", 0)
    monkeypatch.setattr(forward, "_GATHERED_STEP", 32)
    p, counts = make(5, 150, 64, 208), np.random.default_rng(0).random(150) < 0.3
    head = p.arrays["hidden"].astype(BFLOAT16), p.arrays["weight"].astype(BFLOAT16)

    def entropies(how: Any) -> Any:
        given = {"row_mask": counts, "statistics": ("entropy",), "implementation": how}
        return jax.jit(lambda *x: linear_row_statistics(*x, **given).entropy)(*head)

    np.testing.assert_allclose(entropies("mosaic_gpu"), entropies("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "taken"), [(656, 648, 656), (656, 656, 656), (1000, 600, 768), (648, 601, 648), (56, 50, 56)]
)
def test_more_than_a_little_padding_is_not_worked_on_for_nothing(rows: int, vocabulary: int, taken: int) -> None:
    assert operands.padded_spec(HeadSpec(256, rows, vocabulary, 0, BFLOAT16, None)).vocab_size == taken
