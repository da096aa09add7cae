"""The recomputing backward's loops: over tiles of the vocabulary, and inside over blocks of the rows that count.

The vocabulary is the outer loop, so that each tile of the weight's gradient is finished at once and rounded once. The
loop carries the float32 gradient of the hidden states.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.backends.protocol import Plan
from pallas_ce.gradient_products import NeedsGrad, Products, TileStep, WeightSum, plus
from pallas_ce.head import Head
from pallas_ce.modes.call import (
    Gradients,
    Operands,
    added,
    adds_in_place,
    finish,
    sum_over_devices,
    through_down,
    without_padding,
)
from pallas_ce.parallel.shards import RowArrays, Shards, psum
from pallas_ce.statistics.logits import product
from pallas_ce.streaming.rows import RowBlock, Rows
from pallas_ce.streaming.tiles import Tile, Tiles, pad


def gradient_sums(
    shards: Shards,
    rows: RowArrays,
    head: Head,
    weight_dtype: np.dtype,
    plan: Plan,
    needs_grad: NeedsGrad,
    factor: jax.Array,
    products: Callable[[RowBlock], TileStep],
) -> tuple[jax.Array | None, Gradients]:
    """The gradients of hidden `[N, H]` and weight in their dtypes, and the head's other sums, before the scale.

    Args:
        shards: what other devices do.
        rows: what this device works on, flat.
        head: the head that it works on.
        weight_dtype: the dtype of the weight's gradient.
        plan: block sizes.
        needs_grad: which gradients.
        factor: `[]`: what undoes the normalisation of dlogits.
        products: the step over tiles for a block of rows; rows of the block that are not valid contribute nothing.
    """
    hidden, spec, wide = rows.batch.hidden, head.spec, head.spec.accumulator
    tiles, counted = Tiles(plan.vocab_size, plan.columns, last_apart=plan.last_apart), Rows.counted(rows.mask)
    alone = plan.rows >= hidden.shape[0]
    blocks = counted.blocks(hidden.shape[0], plan.rows, skipped=plan.skips_rows)
    # The rows of a block that is the only one are gathered once, and not for each tile.
    only = products(blocks.block(0)) if alone else None
    tile_shape = (plan.columns, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, plan.columns)
    scale = factor if head.logit_scale is None else factor * head.logit_scale
    # A tile of the weight's gradient is scattered over the devices in float32 and rounded at once. Where the parts that
    # the devices hold are not parts of a tile, all of it is kept in float32 and scattered at the end.
    by_tile = not shards.gathered_vocabulary
    scattered = by_tile and bool(shards.gathered_width)
    directly = only is not None and not scattered
    in_place = adds_in_place(head, shards)

    def sums_of(tile: Tile, hidden_sum: jax.Array | None, low_sum: jax.Array | None) -> Products:
        """Of a tile over all blocks; those by row by place: consecutive writes, put in place once at the end."""
        i = jnp.asarray(tile.number)

        def block_body(block: RowBlock, sums: Products) -> Products:
            given = None if sums.weight is None else WeightSum(sums.weight, tile, None)
            share = (only or products(block))(i, sums.hidden, given)
            bias, low, up = plus(sums.bias, share.bias), block.add(sums.low, share.low), plus(sums.up, share.up)
            return Products(share.hidden, share.weight, bias, low, up)

        zeros = Products(
            hidden_sum,
            jnp.zeros(tile_shape, wide) if needs_grad.weight else None,
            jnp.zeros(plan.columns, wide) if needs_grad.bias_sum else None,
            low_sum,
            jnp.zeros((plan.columns, spec.rank), wide) if needs_grad.up else None,
        )
        return blocks.for_each(block_body, zeros)

    def tile_body(tile: Tile, carry: Products) -> Products:
        d_weight = carry.weight
        if directly:
            assert only is not None
            whole = None if d_weight is None else WeightSum(d_weight, tile, scale, in_place)
            found = only(jnp.asarray(tile.number), carry.hidden, whole)
            d_weight = found.weight
            found = found._replace(low=blocks.block(0).add(carry.low, found.low))
        else:
            found = sums_of(tile, carry.hidden, carry.low)
            if found.weight is not None:
                assert d_weight is not None
                tile_weight = scale * found.weight
                if scattered:
                    # Behind a barrier: XLA would move the sum out of the loop, and keep all of the gradient in float32.
                    tile_weight = lax.optimization_barrier(shards.scatter_weight(tile_weight, spec.vocab_axis))
                put_or_add = tile.add if in_place else tile.put
                d_weight = put_or_add(d_weight, tile_weight.astype(d_weight.dtype), spec.vocab_axis)

        def put(total: jax.Array | None, of_tile: jax.Array | None) -> jax.Array | None:
            return None if total is None or of_tile is None else tile.put(total, of_tile)

        return Products(found.hidden, d_weight, put(carry.bias, found.bias), found.low, put(carry.up, found.up))

    weight_shape = shards.own_shape(head.weight.shape, spec.vocab_axis) if by_tile else head.weight.shape
    # Every tile replaces its part; what no tile covers is padding.
    blank = lax.empty if plan.vocab_size == spec.weight_rows else jnp.zeros
    of_weight = head.running if in_place else blank(weight_shape, weight_dtype if by_tile else wide)
    init = head.row_sums(rows.batch, needs_grad)._replace(
        weight=of_weight if needs_grad.weight else None,
        bias=jnp.zeros(spec.weight_rows, wide) if needs_grad.bias_sum else None,
        up=jnp.zeros((spec.weight_rows, spec.rank), wide) if needs_grad.up else None,
    )
    sums = tiles.for_each(tile_body, init._replace(hidden=_aligned(init.hidden)))
    if sums.hidden is not None:
        sums = sums._replace(hidden=sums.hidden[: hidden.shape[0]])
    whole = sums.weight is not None and sums.weight.shape == head.weight.shape
    sums = without_padding(head, plan.vocab_size, sums, weight=whole and not in_place)
    if (d_weight := sums.weight) is not None and not in_place:
        own = d_weight if by_tile else shards.scatter_weight(d_weight, spec.vocab_axis).astype(weight_dtype)
        d_weight = psum(own, shards.sums.weight)
        d_weight = d_weight if head.running is None else added(head.running, d_weight)
    for_rows = through_down(head, sums.hidden, sums.low), sums.low
    hidden_sum, for_low = jax.tree.map(lambda x: factor * counted.in_row_order(x), for_rows)
    of_columns = jax.tree.map(lambda x: factor * x, (sums.bias, sums.up))
    sums = Products(hidden_sum, d_weight, of_columns[0], for_low, of_columns[1])
    of_head = sum_over_devices(shards, rows, head, needs_grad, sums)
    if not needs_grad.hidden:
        return None, of_head
    assert hidden_sum is not None
    d_hidden = hidden_sum if head.logit_scale is None else product(hidden_sum, head.logit_scale)
    return shards.sum_hidden(d_hidden, hidden.dtype), of_head


def _aligned(hidden_sum: jax.Array | None) -> jax.Array | None:
    """With rows in the multiples that kernels add to in place."""
    return hidden_sum if hidden_sum is None else pad(hidden_sum, (-(-len(hidden_sum) // 8) * 8, hidden_sum.shape[1]))


def finished(operands: Operands, d_hidden: jax.Array | None, of_head: Gradients) -> Gradients:
    """The gradients from what `gradient_sums` returns."""
    return finish(operands, of_head._replace(weight=None))._replace(hidden=d_hidden, weight=of_head.weight)
