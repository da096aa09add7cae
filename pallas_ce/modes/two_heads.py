"""Divergences of two heads' rows, streamed together; the backward recomputes tiles of both and differentiates one.

The forward takes one pass over both heads, or two where the log-sum-exps are needed first and no kernel stores logits,
and keeps O(tokens). The backward takes one more, beside the student's two products. The teacher is a constant.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Gradient, Mode, Pairs, Plan
from pallas_ce.head import Batch, Head, HeadSpec, tempered
from pallas_ce.modes.call import Operands
from pallas_ce.modes.evaluate import differentiable
from pallas_ce.modes.fold import Streams, by_block
from pallas_ce.modes.how import How
from pallas_ce.modes.recompute import finished, gradient_sums
from pallas_ce.parallel.entry import Operation, streamed
from pallas_ce.parallel.shards import Local, RowArrays, Shards, psum
from pallas_ce.statistics import divergences as pairs
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.divergences import Divergence, Normaliser, PairPartial, PairStatistics
from pallas_ce.statistics.logits import Distances
from pallas_ce.streaming.budget import budget
from pallas_ce.streaming.gradient_products import NO_ARRAYS, Arrays, PerInput, TileStep, WeightGradient, put_in_sums
from pallas_ce.streaming.rows import RowBlock, present, spread
from pallas_ce.streaming.tiles import Columns, Tile, Tiles


class Teacher(NamedTuple):
    """What the student is held against, all constants."""

    hidden: jax.Array  # `[..., H_t]`
    head: Head  # with the student's vocabulary


@dataclasses.dataclass(frozen=True)
class Pair:
    """Static facts of one call."""

    divergence: Divergence
    how: How


def block_sizes(how: How, student: HeadSpec, teacher: HeadSpec, tokens: int, mode: Mode | None) -> Plan:
    """Block sizes for `tokens` rows, at least one, in the forward (`mode=None`) or in the recompute backward.

    Raises:
        ValueError: the budget cannot hold one row.
    """
    kernels = None if how.implementation == "reference" else how.backend.pairs
    if kernels is None:
        # Six tiles: logits and log-probabilities of each head, their difference or slope, and the rounded dlogits.
        return Streams((student, teacher), how.scratch_bytes, 6).block_sizes(tokens, mode)
    heads, what = (student, teacher), f"one row in the {mode or 'forward'} pass"
    logits = tokens * sum(spec.vocab_size * spec.accumulator.itemsize for spec in heads)
    return kernels.plan(heads, tokens, mode, budget(how.scratch_bytes, kernels.minimum_scratch(heads), logits, what))


def _forward(pair: Pair, operands: Operands, *_: Any) -> tuple[jax.Array, PairStatistics]:
    found = statistics(pair, operands) if operands.known is None else operands.known.statistics
    return found.value, found


def _backward(
    pair: Pair, operands: Operands, needs_grad: PerInput[bool], found: PairStatistics, cotangent: jax.Array
) -> Arrays:
    teacher: Teacher = operands.inputs
    with jax.named_scope("pallas_ce.distillation"):
        if pair.how.shards is not None:
            cotangent = psum(cotangent, pair.how.shards.cotangents_by_row)
        operation = _of_both(pair, functools.partial(_gradients, needs_grad), operands)
        rows = operands.rows._replace(more=(teacher.hidden, found, cotangent))
        return finished(operands, *operation(rows, operands.head, NO_ARRAYS, teacher.head))


# The divergence `[...]` of each row that counts, 0 in the others, differentiable in `hidden` and `head`. The `inputs`
# of its operands are the `Teacher`; both heads have the temperatures of its batch.
row_divergences = differentiable(lambda pair, operands: _forward(pair, operands)[0], _forward, _backward)


def _of_both(pair: Pair, operation: Callable[..., Any], operands: Operands) -> Operation:
    """`operation(divergence, how, local, teacher)` of rows and both heads, split alike if they have as many entries."""
    alike = operands.head.spec.weight_rows == operands.inputs.head.spec.weight_rows
    return streamed(pair.how, functools.partial(operation, pair.divergence), whole_head=not alike)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block's rows of both heads, and the columns that the device has of them.

    XLA makes the logits tile by tile. Kernels, if there are any, store them; of all columns they are made once.
    """

    divergence: Divergence
    batch: Batch
    teacher_batch: Batch
    head: Head
    teacher: Head
    tiles: Tiles
    kernels: Pairs | None
    filled: jax.Array | None  # `[]`: rows from there on are undefined where kernels store logits

    def logits(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Both heads' logits `[n, c]` over their temperature, in the student's accumulator dtype."""
        student = self.head.tile_logits(self.batch._replace(inverse_temperature=None), tile)
        teacher = self.teacher.tile_logits(self.teacher_batch, tile).astype(student.dtype)
        if self.head.valid_columns is not None and tile.valid is not None:  # padding may hold NaN
            student, teacher = jnp.where(tile.valid, student, 0.0), jnp.where(tile.valid, teacher, 0.0)
        return tempered(student, self.batch.inverse_temperature), tempered(teacher, self.batch.inverse_temperature)

    def stored(self, part: Columns | None = None) -> tuple[Distances, Distances]:
        """Both heads' logits over their temperature, by kernels."""
        inverse, batch = self.batch.inverse_temperature, self.batch._replace(inverse_temperature=None)
        batches = batch, self.teacher_batch
        student, teacher = present(self.kernels).logits((self.head, self.teacher), batches, part, self.filled)
        return student.times(inverse), teacher.times(inverse)

    @functools.cached_property
    def _all(self) -> tuple[Distances, Distances]:
        return self.stored()

    def partial(self) -> PairPartial:
        """The statistics of these columns."""
        if self.kernels is not None:
            return pairs.partial_of_distances(self.divergence, *self._all)

        def part(tile: Tile) -> PairPartial:
            return pairs.partial_of_tiles(self.divergence, *self.logits(tile), tile.columns, tile.valid)

        return self.tiles.fold(part, functools.partial(pairs.merge_pairs, self.divergence))

    def mixture_sums(self, found: PairStatistics) -> tuple[jax.Array, jax.Array]:
        """`divergences.mixture_sums` over these columns; `found` has the whole rows' normalisers."""
        if self.kernels is not None:
            return pairs.mixture_sums(self.divergence, *found.log_probs(self._all, None))

        def part(tile: Tile) -> tuple[jax.Array, jax.Array]:
            return pairs.mixture_sums(self.divergence, *found.log_probs(self.logits(tile), tile.valid))

        return self.tiles.fold(part, lambda a, b: (a[0] + b[0], a[1] + b[1]))


def _block(
    divergence: Divergence, how: How, rows: RowArrays, heads: tuple[Head, Head], plan: Plan, filled: jax.Array | None
) -> Block:
    """From rows with the teacher's hidden states first among the others, and the device's columns of both heads."""
    head, teacher = heads
    batches = rows.batch, teacher.with_low(Batch(rows.more[0]))
    tiles = Tiles(head.spec.vocab_size, plan.columns, head.valid_columns)
    return Block(divergence, *batches, head, teacher, tiles, how.backend.pairs, filled)


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

        def visit(plan: Plan, rows: RowArrays, counted: jax.Array | None) -> Out:
            return make(shards, _block(divergence, how, rows, (head, teacher), plan, counted), rows.more[1])

        sizes = functools.partial(block_sizes, how, head.spec, teacher.spec, mode=None)
        found = by_block(rows, sizes, visit, lambda n: filled(jnp.zeros(n, head.spec.accumulator)))
        return shards.own_rows(found), NO_ARRAYS

    with jax.named_scope("pallas_ce.divergence"):
        rows = operands.rows._replace(more=(of_teacher.hidden, known))
        found: Out = _of_both(pair, operation, operands)(rows, operands.head, NO_ARRAYS, of_teacher.head)[0]
        return found


def statistics(pair: Pair, operands: Operands) -> PairStatistics:
    """The divergence of each row, and what its gradient reads."""

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
    plan = block_sizes(how, head.spec, teacher.spec, rows.batch.hidden.shape[0], "recompute")
    needs = head.spec.needed_products(needs_grad)
    # Where the divergence is infinite no change of the logits helps: gradient 0. Where it is NaN so are the slopes.
    valid = ~jnp.isinf(found.value) if mask is None else ~jnp.isinf(found.value) & mask
    cotangent = jnp.where(valid, cotangent if inverse is None else cotangent * inverse, 0.0)
    bound = jnp.where(valid, abs(cotangent) * pairs.largest_slope(divergence, found.expected), 0.0)
    _, factor = coef.normalise(coef.Coefficients(target=bound), 0.0)
    cotangent = cotangent / factor

    def products(block: RowBlock) -> TileStep:
        batch, hidden, block_found = jax.tree.map(block.take, (rows.batch, teacher_hidden, found))
        both = _block(divergence, how, RowArrays(batch, None, (hidden,)), (head, teacher), plan, None)
        by_row = block.select(block.take(cotangent), 0.0)[:, None]

        def dlogits(logits: tuple[Any, Any], valid: jax.Array | None) -> jax.Array:
            log_p, log_q = block_found.log_probs(logits, valid)
            slope = pairs.slope(divergence, log_p, log_q, block_found.expected)
            upstream = by_row if slope.ndim == 2 else by_row[:, :, None]
            made = upstream * slope
            if (cap := head.spec.softcap) is not None:
                z = logits[0].measured_from(jnp.zeros(1)) if isinstance(logits[0], Distances) else logits[0]
                inverse = batch.inverse_temperature
                ratio = z / (cap if inverse is None else cap * spread(inverse, z))
                made = made * (1.0 - jnp.square(jnp.clip(ratio, -1.0, 1.0)))
            return jnp.where(upstream == 0, 0.0, made)  # whatever a row holds that does not count, its temperature too

        def of_part(part: Columns, filled: jax.Array | None) -> jax.Array:
            logits = dataclasses.replace(both, filled=filled).stored(part)
            columns = part.start + jnp.arange(logits[0].stored.shape[1])
            valid = columns < (head.spec.vocab_size if head.valid_columns is None else head.valid_columns)
            valid = valid if part.first is None else valid & (columns >= part.first)
            return dlogits(logits, valid).reshape(-1, columns.size)[:, : part.size]

        def step(tile_index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            tile = both.tiles.tile(tile_index)
            found = head.tile_products(batch, dlogits(both.logits(tile), tile.valid), tile, needs)
            return put_in_sums(found, block, hidden_sum, weight_sum, head.spec.vocab_axis)

        if both.kernels is None:
            return step
        gradient = Gradient(coef.Coefficients(), needs=needs, factor=factor)
        return both.kernels.recompute(head, batch, of_part, gradient, plan, block)

    return gradient_sums(local, head.weight.dtype, plan, needs_grad, factor, products)
