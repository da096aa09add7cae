"""Divergences of two heads' rows, streamed together; the backward recomputes tiles of both and differentiates one.

The forward takes one pass over both heads, or two where the log-sum-exps are needed first, and keeps O(tokens). The
backward takes one more, beside the student's two products. The teacher is a constant.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec, tempered
from pallas_ce.modes.call import Known, Operands
from pallas_ce.modes.evaluate import differentiable
from pallas_ce.modes.fold import Streams, by_block
from pallas_ce.modes.how import How
from pallas_ce.modes.recompute import finished, gradient_sums
from pallas_ce.parallel.entry import Operation, streamed
from pallas_ce.parallel.shards import Local, RowArrays, Shards, psum
from pallas_ce.statistics import divergences as pairs
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.divergences import Divergence, Normaliser, PairPartial, PairStatistics
from pallas_ce.streaming.gradient_products import (
    NO_ARRAYS,
    Arrays,
    PerInput,
    TileStep,
    WeightGradient,
    needed_products,
    put_in_sums,
)
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tile, Tiles


class Teacher(NamedTuple):
    """What the student is held against, all constants.

    Attributes:
        hidden: `[..., H_t]`.
        head: the teacher's, with the student's vocabulary.
    """

    hidden: jax.Array
    head: Head


@dataclasses.dataclass(frozen=True)
class Pair:
    """Static facts of one call."""

    divergence: Divergence
    how: How


def streams(student: HeadSpec, teacher: HeadSpec, scratch_bytes: int | None) -> Streams:
    """Of six tiles: logits and log-probabilities of each head, their difference or slope, and the rounded dlogits."""
    return Streams((student, teacher), scratch_bytes, 6)


def _forward(pair: Pair, operands: Operands, *_: Any) -> tuple[jax.Array, PairStatistics]:
    found = _statistics(pair, operands) if operands.known is None else operands.known.statistics
    return found.value, found


def keep(pair: Pair, operands: Operands) -> Known:
    """What `Operands.known` may be, so that the forward is not made again."""
    return Known(_statistics(pair, operands))


def _backward(
    pair: Pair, operands: Operands, needs_grad: PerInput[bool], found: PairStatistics, cotangent: jax.Array
) -> Arrays:
    teacher: Teacher = operands.inputs
    with jax.named_scope("pallas_ce.distillation"):
        if pair.how.shards is not None:
            cotangent = psum(cotangent, pair.how.shards.cotangents_by_row)
        operation = _of_both(pair, functools.partial(_gradients, needs_grad), operands)
        rows = RowArrays(operands.batch, operands.mask, more=(teacher.hidden, found, cotangent))
        return finished(operands, *operation(rows, operands.head, NO_ARRAYS, teacher.head))


# The divergence `[...]` of each row that counts, 0 in the others, differentiable in `hidden` and `head`. The `inputs`
# of its operands are the `Teacher`; both heads have the temperatures of its batch.
row_divergences = differentiable(lambda pair, operands: _forward(pair, operands)[0], _forward, _backward)


def _of_both(pair: Pair, operation: Callable[..., Any], operands: Operands) -> Operation:
    """`operation(divergence, how, local, teacher)` of rows and both heads, split alike if they have as many entries."""
    alike = operands.head.spec.weight_rows == operands.inputs.head.spec.weight_rows
    return streamed(pair.how, functools.partial(operation, pair.divergence), whole_head=not alike)


# What "jsd" adds up over the columns, see `divergences.mixture_sums`.
Sums = tuple[jax.Array, jax.Array]


class Block(NamedTuple):
    """A block's rows of both heads, and the columns that the device has of them."""

    divergence: Divergence
    batch: Batch
    teacher_batch: Batch
    head: Head
    teacher: Head
    tiles: Tiles

    @classmethod
    def of(cls, divergence: Divergence, batch: Batch, hidden: jax.Array, head: Head, teacher: Head, plan: Plan) -> Self:
        """From the rows, the teacher's `hidden` states, and the device's columns of both heads."""
        tiles = Tiles(head.spec.vocab_size, plan.columns, head.valid_columns)
        return cls(divergence, batch, teacher.with_low(Batch(hidden)), head, teacher, tiles)

    def logits(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Both heads' capped logits `[n, c]` in the student's accumulator dtype, without temperature."""
        student = self.head.tile_logits(self.batch._replace(inverse_temperature=None), tile)
        teacher = self.teacher.tile_logits(self.teacher_batch, tile).astype(student.dtype)
        if self.head.valid_columns is None or tile.valid is None:
            return student, teacher
        return jnp.where(tile.valid, student, 0.0), jnp.where(tile.valid, teacher, 0.0)  # padding may hold NaN

    def log_probs(
        self, logits: tuple[jax.Array, jax.Array], found: PairStatistics, tile: Tile
    ) -> tuple[jax.Array, jax.Array]:
        """`(log p, log q) [n, c]`, -inf in columns that are not valid."""
        student, teacher = (tempered(z, self.batch.inverse_temperature) for z in logits)
        return found.student.log_probs(student, tile.valid), found.teacher.log_probs(teacher, tile.valid)

    def partial(self) -> PairPartial:
        """The statistics of these columns."""

        def part(tile: Tile) -> PairPartial:
            student, teacher = (tempered(z, self.batch.inverse_temperature) for z in self.logits(tile))
            return pairs.partial_of_tiles(self.divergence, student, teacher, tile.columns, tile.valid)

        return self.tiles.fold(part, functools.partial(pairs.merge_pairs, self.divergence))

    def mixture_sums(self, found: PairStatistics) -> Sums:
        """The sums of "jsd" over these columns; `found` has the whole rows' normalisers."""

        def part(tile: Tile) -> Sums:
            return pairs.mixture_sums(self.divergence, *self.log_probs(self.logits(tile), found, tile))

        return self.tiles.fold(part, lambda a, b: (a[0] + b[0], a[1] + b[1]))


def by_row[Out](
    pair: Pair,
    operands: Operands,
    make: Callable[[Shards, Block, Any], Out],
    filled: Callable[[jax.Array], Out],
    known: Any = None,
) -> Out:
    """What `make(shards, block, known)` finds of the rows that count, `filled` with 0 in the others."""
    of_teacher: Teacher = operands.inputs

    def operation(divergence: Divergence, how: How, local: Local, teacher: Head) -> tuple[Out, Arrays]:
        shards, rows, head, _ = local

        def visit(plan: Plan, rows: RowArrays) -> Out:
            hidden, known = rows.more
            return make(shards, Block.of(divergence, rows.batch, hidden, head, teacher, plan), known)

        def empty(rows: int) -> Out:
            return filled(jnp.zeros(rows, head.spec.accumulator))

        block_sizes = streams(head.spec, teacher.spec, how.scratch_bytes).block_sizes
        return shards.own_rows(by_block(rows, block_sizes, visit, empty)), NO_ARRAYS

    with jax.named_scope("pallas_ce.divergence"):
        rows = RowArrays(operands.batch, operands.mask, more=(of_teacher.hidden, known))
        found: Out = _of_both(pair, operation, operands)(rows, operands.head, NO_ARRAYS, of_teacher.head)[0]
        return found


def _statistics(pair: Pair, operands: Operands) -> PairStatistics:
    def make(shards: Shards, block: Block, _: None) -> PairStatistics:
        found = pairs.finalise_pairs(pair.divergence, shards.of_each(block.partial(), None)[0])
        if pair.divergence.name != "jsd":
            return found
        return found.with_mixture(*shards.of_each((), block.mixture_sums(found))[1])

    def filled(zeros: jax.Array) -> PairStatistics:
        return PairStatistics(zeros, Normaliser(zeros, zeros), Normaliser(zeros, zeros), zeros)

    return by_row(pair, operands, make, filled)


def _gradients(
    needs_grad: PerInput[bool], divergence: Divergence, how: How, local: Local, teacher: Head
) -> tuple[jax.Array | None, Arrays]:
    _, rows, head, _ = local
    inverse, mask = rows.batch.inverse_temperature, rows.mask
    teacher_hidden, found, cotangent = rows.more
    of_both = streams(head.spec, teacher.spec, how.scratch_bytes)
    plan = of_both.block_sizes(rows.batch.hidden.shape[0], "recompute")
    needs = needed_products(needs_grad, head.spec.rank)
    # Where the divergence is infinite no change of the logits helps: gradient 0. Where it is NaN so are the slopes.
    valid = ~jnp.isinf(found.value) if mask is None else ~jnp.isinf(found.value) & mask
    cotangent = jnp.where(valid, cotangent if inverse is None else cotangent * inverse, 0.0)
    bound = jnp.where(valid, abs(cotangent) * pairs.largest_slope(divergence, found.expected), 0.0)
    _, factor = coef.normalise(coef.Coefficients(target=bound), 0.0)
    cotangent = cotangent / factor

    def products(block: RowBlock) -> TileStep:
        batch, hidden, block_found = jax.tree.map(block.take, (rows.batch, teacher_hidden, found))
        both = Block.of(divergence, batch, hidden, head, teacher, plan)
        upstream = block.select(block.take(cotangent), 0.0)[:, None]

        def step(tile_index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            tile = both.tiles.tile(tile_index)
            logits = both.logits(tile)
            log_p, log_q = both.log_probs(logits, block_found, tile)
            slope = pairs.slope(divergence, log_p, log_q, block_found.expected)
            dlogits = jnp.where(upstream == 0, 0.0, upstream * slope)
            if head.spec.softcap is not None:
                dlogits = dlogits * (1.0 - jnp.square(logits[0] / head.spec.softcap))
            found = head.tile_products(batch, dlogits, tile, needs)
            return put_in_sums(found, block, hidden_sum, weight_sum, head.spec.vocab_axis)

        return step

    return gradient_sums(local, head.weight.dtype, plan, needs_grad, factor, products)
