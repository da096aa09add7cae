"""The recomputing backward's loops: over tiles of the vocabulary, and inside over blocks of the rows that count.

The vocabulary is the outer loop, so that each tile of the weight's gradient is finished at once and rounded once; what
is carried is the float32 gradient of the hidden states.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends import Plan
from pallas_ce.blocks import RowBlock, Rows, Tiles
from pallas_ce.head import Head, Products, Wanted
from pallas_ce.modes.differentiation import finish


def gradients(
    hidden: jax.Array,
    head: Head,
    mask: jax.Array | None,
    plan: Plan,
    wanted: Wanted,
    factor: jax.Array,
    products: Callable[[RowBlock, jax.Array], Products],
) -> tuple[jax.Array | None, tuple[jax.Array | None, jax.Array | None, jax.Array | None]]:
    """The gradient of hidden, and those of weight, bias and scale, in their dtypes; None where not wanted.

    Args:
        hidden: `[N, H]`.
        head: the head.
        mask: `[N]` bool, which rows count; None: all.
        plan: block sizes.
        wanted: which gradients.
        factor: `[]`: what undoes the normalisation of dlogits.
        products: `(block of rows, tile index) ->` their share of the gradients, before factor and scale; rows of the
            block that are not live must contribute nothing.
    """
    spec, tokens, wide = head.spec, hidden.shape[0], head.spec.accumulator
    tiles, rows = Tiles(spec.vocab_size, plan.columns), Rows.counted(mask)
    blocks = rows.blocks(tokens, plan.rows)
    tile_shape = (plan.columns, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, plan.columns)
    scale = factor if head.logit_scale is None else factor * head.logit_scale

    def tile_body(i: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        hidden_sum, d_weight, bias_sum = carry

        def block_body(block: RowBlock, sums: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            for_hidden, for_weight, for_bias = products(block, i)
            # The hidden gradient is kept in visiting order: consecutive writes, put in place once at the end.
            return (
                None if for_hidden is None else block.tile.add(sums[0], for_hidden),
                None if for_weight is None else sums[1] + for_weight,
                None if for_bias is None else sums[2] + for_bias,
            )

        zeros = (
            jnp.zeros(tile_shape, wide) if wanted.weight else None,
            jnp.zeros(plan.columns, wide) if wanted.bias_sum else None,
        )
        hidden_sum, tile_weight, tile_bias = blocks.for_each(block_body, (hidden_sum, *zeros))
        # Added, not set: the last tile overlaps its neighbour, with exact zeros there.
        tile = tiles.tile(i)
        if tile_weight is not None:
            d_weight = tile.add(d_weight, scale * tile_weight, spec.vocab_axis)
        if tile_bias is not None:
            bias_sum = tile.add(bias_sum, tile_bias)
        return hidden_sum, d_weight, bias_sum

    init = (
        jnp.zeros(hidden.shape, wide) if wanted.hidden_product else None,
        jnp.zeros_like(head.weight) if wanted.weight else None,
        jnp.zeros(spec.weight_rows, wide) if wanted.bias_sum else None,
    )
    hidden_sum, d_weight, bias_sum = lax.fori_loop(0, tiles.count, tile_body, init)
    if hidden_sum is not None:
        hidden_sum = rows.in_row_order(hidden_sum)
    d_hidden, d_bias, d_scale = finish(hidden, head, wanted, hidden_sum, bias_sum, factor)
    return d_hidden, (d_weight, d_bias, d_scale)
