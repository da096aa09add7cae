"""The recomputing backward's loops: over tiles of the vocabulary, and inside over blocks of the rows that count.

The vocabulary is the outer loop, so that each tile of the weight's gradient is finished at once and rounded once; what
is carried is the float32 gradient of the hidden states.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.backends import Plan
from pallas_ce.blocks import RowBlock, Rows, Tiles
from pallas_ce.head import Head, Products, Wanted
from pallas_ce.loops import fori_loop
from pallas_ce.modes.differentiation import Gradients, HeadSums, finish, sum_over_devices
from pallas_ce.shards import RowArrays, Shards

TileStep = Callable[[jax.Array, jax.Array | None], Products]


def gradient_sums(
    shards: Shards,
    rows: RowArrays,
    head: Head,
    weight_dtype: np.dtype,
    plan: Plan,
    wanted: Wanted,
    factor: jax.Array,
    products: Callable[[RowBlock], TileStep],
) -> tuple[jax.Array | None, HeadSums]:
    """`dlogits·weight [N, H]` and the head's sums, before the scale; the weight's is its gradient, in its dtype.

    Args:
        shards: what other devices do.
        rows: what this device works on, flat.
        head: likewise.
        weight_dtype: that of the weight's gradient.
        plan: block sizes.
        wanted: which gradients.
        factor: `[]`: what undoes the normalisation of dlogits.
        products: `block of rows -> (tile index, hidden's sum) ->` that sum with theirs added, and their share of the
            other gradients, before factor and scale; rows of the block that are not live must contribute nothing.
    """
    hidden, spec, wide = rows.batch.hidden, head.spec, head.spec.accumulator
    tiles, counted = Tiles(spec.vocab_size, plan.columns), Rows.counted(rows.mask)
    alone = plan.rows >= hidden.shape[0]
    blocks = counted.blocks(hidden.shape[0], plan.rows, skipped=alone)
    # The rows of a block that is the only one are gathered once, and not for each tile.
    whole = products(blocks.block(0)) if alone else None
    tile_shape = (plan.columns, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, plan.columns)
    scale = factor if head.logit_scale is None else factor * head.logit_scale
    # A tile of the weight's gradient is summed over the devices in float32 and rounded at once. Where the parts that
    # the devices hold are not parts of a tile, all of it is kept in float32 and summed at the end.
    by_tile = not shards.gathered_vocabulary

    def sums_of(i: jax.Array, hidden_sum: jax.Array | None) -> Products:
        if whole is not None:
            return whole(i, hidden_sum)

        def block_body(block: RowBlock, sums: Products) -> Products:
            # The hidden gradient is kept in visiting order: consecutive writes, put in place once at the end.
            hidden_sum, for_weight, for_bias = products(block)(i, sums[0])
            return (
                hidden_sum,
                None if sums[1] is None or for_weight is None else sums[1] + for_weight,
                None if sums[2] is None or for_bias is None else sums[2] + for_bias,
            )

        zeros = (
            jnp.zeros(tile_shape, wide) if wanted.weight else None,
            jnp.zeros(plan.columns, wide) if wanted.bias_sum else None,
        )
        return blocks.for_each(block_body, (hidden_sum, *zeros))

    def tile_body(step: jax.Array, carry: Products) -> Products:
        # From the last tile to the first: where the last overlaps its neighbour it holds zeros, which that replaces.
        i = tiles.count - 1 - step
        hidden_sum, d_weight, bias_sum = carry
        hidden_sum, tile_weight, tile_bias = sums_of(i, hidden_sum)
        tile = tiles.tile(i)
        if tile_weight is not None:
            assert d_weight is not None
            tile_weight = scale * tile_weight
            if by_tile and shards.sums.weight + shards.gathered_width:
                # Behind a barrier: XLA would move the sum out of the loop, and keep all of the gradient in float32.
                tile_weight = lax.optimization_barrier(shards.sum_weight(tile_weight, spec.vocab_axis))
            d_weight = tile.put(d_weight, tile_weight.astype(d_weight.dtype), spec.vocab_axis)
        if tile_bias is not None:
            assert bias_sum is not None
            bias_sum = tile.put(bias_sum, tile_bias)
        return hidden_sum, d_weight, bias_sum

    weight_shape = shards.own_shape(head.weight.shape, spec.vocab_axis) if by_tile else head.weight.shape
    init = (
        jnp.zeros(hidden.shape, wide) if wanted.hidden_product else None,
        jnp.zeros(weight_shape, weight_dtype if by_tile else wide) if wanted.weight else None,
        jnp.zeros(spec.weight_rows, wide) if wanted.bias_sum else None,
    )
    hidden_sum, d_weight, bias_sum = fori_loop(0, tiles.count, tile_body, init)
    if d_weight is not None and not by_tile:
        d_weight = shards.sum_weight(d_weight, spec.vocab_axis).astype(weight_dtype)
    if hidden_sum is not None:
        hidden_sum = factor * counted.in_row_order(hidden_sum)
    if bias_sum is not None:
        bias_sum = factor * bias_sum
    hidden_sum, of_head = sum_over_devices(shards, hidden, head, wanted, hidden_sum, HeadSums(None, bias_sum))
    return hidden_sum, of_head._replace(weight=d_weight)


def finished(hidden: jax.Array, head: Head, hidden_sum: jax.Array | None, sums: HeadSums) -> Gradients:
    """The gradients from what `gradient_sums` returns."""
    return finish(hidden, head, hidden_sum, sums._replace(weight=None))._replace(weight=sums.weight)
