"""Divergences of two heads' rows, streamed together; the backward recomputes tiles of both and differentiates one.

The forward takes one pass over both heads, or two where the log-sum-exps are needed first, and keeps O(tokens). The
backward takes one more, beside the student's two products. The teacher is a constant.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, tempered
from pallas_ce.modes.call import Known, Operands
from pallas_ce.modes.evaluate import differentiable
from pallas_ce.modes.fold import Streams, over_rows_that_count
from pallas_ce.modes.how import How
from pallas_ce.modes.recompute import finished, gradient_sums
from pallas_ce.parallel.entry import streamed
from pallas_ce.parallel.shards import Local, RowArrays
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
        hidden: `[N, H_t]`.
        head: the teacher's, with the student's vocabulary.
    """

    hidden: jax.Array
    head: Head


@dataclasses.dataclass(frozen=True)
class Pair:
    """Static facts of one call."""

    divergence: Divergence
    streams: Streams
    how: How


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
        operation = streamed(pair.how, functools.partial(_gradients, needs_grad, pair), whole_head=True)
        rows = RowArrays(operands.batch, operands.mask, more=(teacher.hidden, found, cotangent))
        return finished(operands, *operation(rows, operands.head, NO_ARRAYS, teacher.head))


# The divergence `[N]` of each row that counts, 0 in the others, differentiable in `hidden` and `head`. The `inputs` of
# its operands are the `Teacher`; both heads have the temperatures of its batch.
row_divergences = differentiable(lambda pair, operands: _forward(pair, operands)[0], _forward, _backward)


# One block's rows of both heads, without temperatures, and the heads.
Both = tuple[Batch, Batch, Head, Head]


def _both(batch: Batch, teacher_hidden: jax.Array, head: Head, teacher: Head) -> Both:
    return batch._replace(inverse_temperature=None), teacher.with_low(Batch(teacher_hidden)), head, teacher


def _tile_logits(both: Both, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Both heads' capped logits `[n, c]` in the student's accumulator dtype."""
    batch, teacher_batch, head, teacher = both
    logits = head.tile_logits(batch, tile)
    return logits, teacher.tile_logits(teacher_batch, tile).astype(logits.dtype)


def _log_probs(
    logits: tuple[jax.Array, jax.Array], inverse: jax.Array | None, found: PairStatistics, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`(log p, log q) [n, c]`, -inf in columns that are not valid."""
    student, teacher = (tempered(z, inverse) for z in logits)
    return found.student.log_probs(student, valid), found.teacher.log_probs(teacher, valid)


def _statistics(pair: Pair, operands: Operands) -> PairStatistics:
    divergence, spec, teacher = pair.divergence, operands.head.spec, operands.inputs

    def visit(how: How, plan: Plan, rows: RowArrays, head: Head, teacher: Head) -> PairStatistics:
        inverse, both = rows.batch.inverse_temperature, _both(rows.batch, rows.more, head, teacher)
        tiles = Tiles(spec.vocab_size, plan.columns)

        def part(tile: Tile) -> PairPartial:
            student, teacher = (tempered(z, inverse) for z in _tile_logits(both, tile))
            return pairs.partial_of_tiles(divergence, student, teacher, tile.columns, tile.valid)

        partial = tiles.fold(part, functools.partial(pairs.merge_pairs, divergence))
        found = pairs.finalise_pairs(divergence, partial)
        if divergence.passes == 1:
            return found

        def mixture_part(tile: Tile) -> tuple[jax.Array, jax.Array]:
            return pairs.mixture_sums(divergence, *_log_probs(_tile_logits(both, tile), inverse, found, tile.valid))

        value, expected = tiles.fold(mixture_part, lambda a, b: (a[0] + b[0], a[1] + b[1]))
        return found._replace(value=pairs.not_negative(value), expected=expected)

    def empty(rows: int) -> PairStatistics:
        zeros = jnp.zeros(rows, spec.accumulator)
        return PairStatistics(zeros, Normaliser(zeros, zeros), Normaliser(zeros, zeros), zeros)

    with jax.named_scope("pallas_ce.divergence"):
        rows = RowArrays(operands.batch, operands.mask, more=teacher.hidden)
        return over_rows_that_count(
            pair.how,
            visit,
            lambda how, tokens: pair.streams.block_sizes(tokens),
            empty,
            rows,
            operands.head,
            teacher.head,
        )


def _gradients(
    needs_grad: PerInput[bool], pair: Pair, how: How, local: Local, teacher: Head
) -> tuple[jax.Array | None, Arrays]:
    _, rows, head, _ = local
    inverse, mask = rows.batch.inverse_temperature, rows.mask
    teacher_hidden, found, cotangent = rows.more
    plan = pair.streams.block_sizes(rows.batch.hidden.shape[0], "recompute")
    tiles, needs = Tiles(head.spec.vocab_size, plan.columns), needed_products(needs_grad, head.spec.rank)
    # Where the divergence is infinite no change of the logits helps: gradient 0. Where it is NaN so are the slopes.
    valid = ~jnp.isinf(found.value) if mask is None else ~jnp.isinf(found.value) & mask
    cotangent = jnp.where(valid, cotangent if inverse is None else cotangent * inverse, 0.0)
    bound = jnp.where(valid, abs(cotangent) * pairs.largest_slope(pair.divergence, found.expected), 0.0)
    _, factor = coef.normalise(coef.Coefficients(target=bound), 0.0)
    cotangent = cotangent / factor

    def products(block: RowBlock) -> TileStep:
        block_batch, block_found = jax.tree.map(block.take, (rows.batch, found))
        block_inverse = block_batch.inverse_temperature
        both = _both(block_batch, block.take(teacher_hidden), head, teacher)
        upstream = block.select(block.take(cotangent), 0.0)[:, None]

        def step(tile_index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            tile = tiles.tile(tile_index)
            logits = _tile_logits(both, tile)
            log_p, log_q = _log_probs(logits, block_inverse, block_found, tile.valid)
            slope = pairs.slope(pair.divergence, log_p, log_q, block_found.expected)
            dlogits = jnp.where(upstream == 0, 0.0, upstream * slope)
            if head.spec.softcap is not None:
                dlogits = dlogits * (1.0 - jnp.square(logits[0] / head.spec.softcap))
            found = head.tile_products(both[0], dlogits, tile, needs)
            return put_in_sums(found, block, hidden_sum, weight_sum, head.spec.vocab_axis)

        return step

    return gradient_sums(local, head.weight.dtype, plan, needs_grad, factor, products)
