"""The recomputing backward's loops: over tiles of the vocabulary, and inside over blocks of the rows that count.

The vocabulary is the outer loop, so that each tile of the weight's gradient is finished at once and rounded once; what
is carried is the float32 gradient of the hidden states.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Head, NeedsGrad, Products, TileStep, WeightSum
from pallas_ce.modes.call import Gradients, Operands, finish, sum_over_devices
from pallas_ce.parallel.shards import RowArrays, Shards, psum
from pallas_ce.streaming.rows import RowBlock, Rows
from pallas_ce.streaming.tiles import Tile, Tiles


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
        weight_dtype: that of the weight's gradient.
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

    def sums_of(tile: Tile, hidden_sum: jax.Array | None) -> Products:
        """Of a tile over all blocks; hidden's by place: consecutive writes, put in place once at the end."""
        i = jnp.asarray(tile.number)

        def block_body(block: RowBlock, sums: Products) -> Products:
            given = None if sums[1] is None else WeightSum(sums[1], tile, None)
            hidden_sum, for_weight, for_bias = (only or products(block))(i, sums[0], given)
            return hidden_sum, for_weight, None if sums[2] is None or for_bias is None else sums[2] + for_bias

        zeros = (
            jnp.zeros(tile_shape, wide) if needs_grad.weight else None,
            jnp.zeros(plan.columns, wide) if needs_grad.bias_sum else None,
        )
        return blocks.for_each(block_body, (hidden_sum, *zeros))

    def tile_body(tile: Tile, carry: Products) -> Products:
        hidden_sum, d_weight, bias_sum = carry
        if directly:
            assert only is not None
            whole = None if d_weight is None else WeightSum(d_weight, tile, scale)
            hidden_sum, d_weight, tile_bias = only(jnp.asarray(tile.number), hidden_sum, whole)
        else:
            hidden_sum, tile_weight, tile_bias = sums_of(tile, hidden_sum)
            if tile_weight is not None:
                assert d_weight is not None
                tile_weight = scale * tile_weight
                if scattered:
                    # Behind a barrier: XLA would move the sum out of the loop, and keep all of the gradient in float32.
                    tile_weight = lax.optimization_barrier(shards.scatter_weight(tile_weight, spec.vocab_axis))
                d_weight = tile.put(d_weight, tile_weight.astype(d_weight.dtype), spec.vocab_axis)
        if tile_bias is not None:
            assert bias_sum is not None
            bias_sum = tile.put(bias_sum, tile_bias)
        return hidden_sum, d_weight, bias_sum

    weight_shape = shards.own_shape(head.weight.shape, spec.vocab_axis) if by_tile else head.weight.shape
    # Every tile replaces its part; what no tile covers is padding.
    blank = lax.empty if plan.vocab_size == spec.weight_rows else jnp.zeros
    init = (
        jnp.zeros(hidden.shape, wide) if needs_grad.hidden_product else None,
        blank(weight_shape, weight_dtype if by_tile else wide) if needs_grad.weight else None,
        jnp.zeros(spec.weight_rows, wide) if needs_grad.bias_sum else None,
    )
    hidden_sum, d_weight, bias_sum = tiles.for_each(tile_body, init)
    if d_weight is not None:
        own = d_weight if by_tile else shards.scatter_weight(d_weight, spec.vocab_axis).astype(weight_dtype)
        d_weight = psum(own, shards.sums.weight)
    if hidden_sum is not None:
        hidden_sum = factor * counted.in_row_order(hidden_sum)
    if bias_sum is not None:
        bias_sum = factor * bias_sum
    of_head = sum_over_devices(shards, hidden, head, needs_grad, Gradients(hidden_sum, d_weight, bias_sum))
    if not needs_grad.hidden:
        return None, of_head
    assert hidden_sum is not None
    d_hidden = hidden_sum if head.logit_scale is None else head.logit_scale * hidden_sum
    return shards.sum_hidden(d_hidden, hidden.dtype), of_head


def finished(operands: Operands, d_hidden: jax.Array | None, of_head: Gradients) -> Gradients:
    """The gradients from what `gradient_sums` returns."""
    return finish(operands, of_head._replace(weight=None))._replace(hidden=d_hidden, weight=of_head.weight)
