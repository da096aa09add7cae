"""Mode *recompute* (the paper's Algorithm 2): the forward keeps O(tokens), the backward recomputes tiles of logits.

Four products in all (8·N·H·V operations). It takes any cotangents of the row statistics, as often as asked.

The backward's outer loop is over tiles of the vocabulary, so that each tile of the weight's gradient is finished at
once and rounded once; inside are blocks of the rows that count. The float32 gradient of the hidden states is carried.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.head import NO_WEIGHT, Head
from pallas_ce.modes import materialized
from pallas_ce.modes.call import Call, Operands, Statistics, gradient_of, sum_over_devices, through_down
from pallas_ce.modes.forward import forward_statistics
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import streamed
from pallas_ce.parallel.shards import Local, axis_size, psum
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import only
from pallas_ce.streaming.gradient_products import (
    BY_COLUMN,
    BY_ROW,
    NO_ARRAYS,
    Arrays,
    PerInput,
    TileStep,
    WeightGradient,
)
from pallas_ce.streaming.rows import RowBlock, Rows, present, zeroed
from pallas_ce.streaming.tiles import Tile, Tiles, pad

# The forward's statistics that the backward reads; the head if it is gathered, once for both passes.
_Kept = tuple[Statistics, Head | None]


def forward(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> tuple[Statistics, _Kept]:
    """The statistics; keeps the ones that their derivatives read."""
    how, known, head, whole = call.how, operands.known, operands.head, None
    saved = coef.saved_statistics(call.names)
    before_gradient = needs_grad.hidden or needs_grad.logit_scale
    if how.shards is not None and how.shards.gathered:  # under `jit` the partitioner sees to it
        head = whole = how.shards.gather(head)
        how = _handed_whole(how)
    if known is None:
        find = forward_statistics(how, call.names | saved, head, before_gradient=before_gradient)
        found = find(operands.rows, head, NO_ARRAYS)[0]
    else:
        found = known.statistics
    return only(found, call.names), (only(found, saved), whole)


@jax.named_scope("pallas_ce.recompute")
def backward(call: Call, operands: Operands, needs_grad: PerInput[bool], kept: _Kept, cotangents: Statistics) -> Arrays:
    """Gradients from the statistics' cotangents."""
    how, head, (statistics, gathered) = call.how, operands.head, kept
    over = () if how.shards is None else how.shards.cotangents_by_row
    cotangents = {name: psum(g, over) for name, g in cotangents.items() if g is not None}
    if head.weight is NO_WEIGHT:
        return NO_ARRAYS._replace(hidden=materialized.row_gradient(how, operands, statistics, cotangents))
    given = NO_ARRAYS._replace(weight=operands.weight_sum)
    dtype = head.weight.dtype if given.weight is None else head.spec.accumulator
    gradients = functools.partial(_gradients, needs_grad, dtype)
    if gathered is not None:
        how, head = _handed_whole(how), gathered
    rows = operands.rows._replace(more=(statistics, cotangents))
    return finished(operands, *streamed(how, gradients)(rows, head, given))


def _handed_whole(how: How) -> How:
    return dataclasses.replace(how, shards=dataclasses.replace(present(how.shards), handed_whole=True))


def _gradients(
    needs_grad: PerInput[bool], weight_dtype: np.dtype, how: How, local: Local
) -> tuple[jax.Array | None, Arrays]:
    shards, rows, head, _ = local
    kept, cotangents = rows.more
    of_all, batch = gradient_of(cotangents, kept, shards, rows.batch, head, rows.mask)
    backend, tokens = how.backend, rows.batch.hidden.shape[0]
    plan, needs = how.block_sizes(head.spec, tokens, "recompute"), head.spec.needed_products(needs_grad)

    def products(block: RowBlock) -> TileStep:
        coefficients = zeroed(block.valid, jax.tree.map(block.take, of_all.coefficients))
        of_block, reference, argmax = jax.tree.map(block.take, (batch, of_all.reference, of_all.argmax))
        gradient = Gradient(coefficients, reference, argmax, needs, of_all.factor)
        return backend.recompute(head, of_block, gradient, plan, block)

    return gradient_sums(local, weight_dtype, plan, needs_grad, jnp.asarray(of_all.factor), products)


def gradient_sums(
    local: Local,
    weight_dtype: np.dtype,
    plan: Plan,
    needs_grad: PerInput[bool],
    factor: jax.Array,
    products: Callable[[RowBlock], TileStep],
) -> tuple[jax.Array | None, Arrays]:
    """The gradients of hidden `[N, H]` and weight in their dtypes, and the head's other sums, before the scale.

    `products` has the step over tiles for a block of rows, whose rows that are not valid contribute nothing. `factor`
    undoes the normalisation of dlogits.
    """
    shards, rows, head, given = local
    hidden, spec, wide = rows.batch.hidden, head.spec, head.spec.accumulator
    tiles, counted = Tiles(plan.vocab_size, plan.columns, last_apart=plan.last_apart), Rows.counted(rows.mask)
    alone = plan.rows >= hidden.shape[0]
    blocks = counted.blocks(hidden.shape[0], plan.rows, skipped=plan.skips_rows)
    # The rows of a block that is the only one are gathered once, and not for each tile.
    only = products(blocks.block(0)) if alone else None
    scale = factor if head.logit_scale is None else factor * head.logit_scale
    # A tile of the weight's gradient is rounded and scattered over the devices at once. Where the devices hold no parts
    # of a tile, all of it is scattered at the end.
    scattered = bool(shards.gathered_width) and not shards.gathered_vocabulary
    directly = only is not None and not scattered
    in_place, needs = local.adds_in_place, spec.needed_products(needs_grad)
    shapes = (plan.columns, spec.hidden_size), (spec.weight_rows, spec.hidden_size // axis_size(shards.gathered_width))
    tile_shape, own_shape = shapes if spec.vocab_axis == 0 else (shape[::-1] for shape in shapes)

    def sums_of(tile: Tile, carry: Arrays) -> Arrays:
        """Of a tile over all blocks; those by row by place: consecutive writes, put in place once at the end."""
        i = jnp.asarray(tile.number)

        def block_body(block: RowBlock, sums: Arrays) -> Arrays:
            total = None if sums.weight is None else WeightGradient(sums.weight)
            share = (only or products(block))(i, sums.hidden, total)
            share = share.of(BY_COLUMN, lambda x, total: total + x, sums)
            return share._replace(down=block.add(sums.down, share.down))

        of_tile = carry._replace(weight=jnp.zeros(tile_shape, wide) if needs.weight else None)
        return blocks.for_each(block_body, head.with_column_sums(of_tile, needs, plan.columns))

    def tile_body(tile: Tile, carry: Arrays) -> Arrays:
        total = None if carry.weight is None else WeightGradient(carry.weight, in_place, scale, tile)
        if directly:
            assert only is not None
            found = only(jnp.asarray(tile.number), carry.hidden, total)
            found = found._replace(down=blocks.block(0).add(carry.down, found.down))
        else:
            found = sums_of(tile, carry)
            if (share := found.weight) is not None and total is not None:
                if scattered:
                    share, total = (scale * share).astype(weight_dtype), total._replace(scale=None)
                    # Behind a barrier: XLA would move the sum out of the loop, and keep all of the gradient.
                    share = jax.lax.optimization_barrier(shards.scatter_weight(share, spec.vocab_axis))
                found = found._replace(weight=total.with_share(share, spec.vocab_axis))

        return found.of(BY_COLUMN, lambda x, total: tile.put(total, x), carry)

    # Tiles overwrite their slices of a new array; the rest is padding, which zeros fill.
    blank = jax.lax.empty if plan.vocab_size == spec.weight_rows else jnp.zeros
    of_weight = given.weight if in_place else blank(own_shape if scattered else head.weight.shape, weight_dtype)
    init = NO_ARRAYS._replace(weight=of_weight if needs.weight else None)
    init = head.with_column_sums(head.with_row_sums(init, rows.batch, needs), needs, spec.weight_rows)
    if init.hidden is not None:  # in the multiples of rows that kernels add to in place
        init = init._replace(hidden=pad(init.hidden, (-(-hidden.shape[0] // 8) * 8, spec.hidden_size)))
    sums = tiles.for_each(tile_body, init)
    if sums.hidden is not None:
        sums = sums._replace(hidden=sums.hidden[: hidden.shape[0]])
    whole = sums.weight is not None and sums.weight.shape == head.weight.shape
    sums = head.without_padding(plan.vocab_size, sums, weight=whole and not in_place)
    sums = sums._replace(hidden=through_down(head, sums.hidden, sums.down))
    sums = sums.of(BY_ROW, lambda x: factor * counted.put_all(0, x)).of(BY_COLUMN, lambda x: factor * x)
    dtypes = hidden.dtype, weight_dtype
    return sum_over_devices(local, needs_grad, sums, dtypes, scattered=scattered, hidden_scale=head.logit_scale)


def finished(operands: Operands, d_hidden: jax.Array | None, of_head: Arrays) -> Arrays:
    """The gradients from what `gradient_sums` returns."""
    return operands.finish(of_head._replace(weight=None))._replace(hidden=d_hidden, weight=of_head.weight)
