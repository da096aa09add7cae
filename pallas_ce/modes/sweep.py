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
from pallas_ce.modes.call import Operands
from pallas_ce.modes.sums import finish, sum_over_devices, through_down, without_padding
from pallas_ce.parallel.shards import Local
from pallas_ce.streaming.gradient_products import Arrays, PerInput, TileStep, WeightGradient, needed_products, plus
from pallas_ce.streaming.rows import RowBlock, Rows
from pallas_ce.streaming.tiles import Tile, Tiles, pad


def gradient_sums(
    local: Local,
    weight_dtype: np.dtype,
    plan: Plan,
    needs_grad: PerInput[bool],
    factor: jax.Array,
    products: Callable[[RowBlock], TileStep],
) -> tuple[jax.Array | None, Arrays]:
    """The gradients of hidden `[N, H]` and weight in their dtypes, and the head's other sums, before the scale.

    Args:
        local: what this device works on.
        weight_dtype: the dtype of the weight's gradient.
        plan: block sizes.
        needs_grad: which gradients.
        factor: `[]`: what undoes the normalisation of dlogits.
        products: the step over tiles for a block of rows; rows of the block that are not valid contribute nothing.
    """
    shards, rows, head, given = local
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
    in_place, needs = local.adds_in_place, needed_products(needs_grad, spec.rank)

    def sums_of(tile: Tile, carry: Arrays) -> Arrays:
        """Of a tile over all blocks; those by row by place: consecutive writes, put in place once at the end."""
        i = jnp.asarray(tile.number)

        def block_body(block: RowBlock, sums: Arrays) -> Arrays:
            total = None if sums.weight is None else WeightGradient(sums.weight)
            share = (only or products(block))(i, sums.hidden, total)
            bias, up, down = plus(sums.bias, share.bias), plus(sums.up, share.up), block.add(sums.down, share.down)
            return share._replace(bias=bias, up=up, down=down)

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
                    share, total = shards.scatter_weight(scale * share, spec.vocab_axis), total._replace(scale=None)
                    # Behind a barrier: XLA would move the sum out of the loop, and keep all of the gradient in float32.
                    share = lax.optimization_barrier(share)
                found = found._replace(weight=total.with_share(share, spec.vocab_axis))

        def put(total: jax.Array | None, of_tile: jax.Array | None) -> jax.Array | None:
            return None if total is None or of_tile is None else tile.put(total, of_tile)

        return found._replace(bias=put(carry.bias, found.bias), up=put(carry.up, found.up))

    weight_shape = shards.own_shape(head.weight.shape, spec.vocab_axis) if by_tile else head.weight.shape
    # Every tile replaces its part; what no tile covers is padding.
    blank = lax.empty if plan.vocab_size == spec.weight_rows else jnp.zeros
    of_weight = given.weight if in_place else blank(weight_shape, weight_dtype if by_tile else wide)
    init = head.row_sums(rows.batch, needs)._replace(weight=of_weight if needs.weight else None)
    init = head.with_column_sums(init, needs, spec.weight_rows)
    sums = tiles.for_each(tile_body, init._replace(hidden=_aligned(init.hidden)))
    if sums.hidden is not None:
        sums = sums._replace(hidden=sums.hidden[: hidden.shape[0]])
    whole = sums.weight is not None and sums.weight.shape == head.weight.shape
    sums = without_padding(head, plan.vocab_size, sums, weight=whole and not in_place)
    for_rows = through_down(head, sums.hidden, sums.down), sums.down
    hidden_sum, for_down = jax.tree.map(lambda x: factor * counted.in_row_order(x), for_rows)
    bias, up = jax.tree.map(lambda x: factor * x, (sums.bias, sums.up))
    sums = sums._replace(hidden=hidden_sum, bias=bias, up=up, down=for_down)
    dtypes = hidden.dtype, weight_dtype
    return sum_over_devices(local, needs_grad, sums, dtypes, scattered=by_tile, hidden_scale=head.logit_scale)


def _aligned(hidden_sum: jax.Array | None) -> jax.Array | None:
    """With rows in the multiples that kernels add to in place."""
    return hidden_sum if hidden_sum is None else pad(hidden_sum, (-(-len(hidden_sum) // 8) * 8, hidden_sum.shape[1]))


def finished(operands: Operands, d_hidden: jax.Array | None, of_head: Arrays) -> Arrays:
    """The gradients from what `gradient_sums` returns."""
    return finish(operands, of_head._replace(weight=None))._replace(hidden=d_hidden, weight=of_head.weight)
