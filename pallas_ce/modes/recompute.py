"""Mode *recompute* (the paper's Algorithm 2): the forward keeps O(tokens), the backward recomputes tiles of logits.

Four products in all (8·N·H·V operations). It takes any cotangents of the row statistics, as often as asked. The
vocabulary is the outer loop of the backward, so that each tile of the weight's gradient is finished at once and rounded
once; what is carried is the float32 gradient of the hidden states.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce import coefficients as coef
from pallas_ce.backends import Residual
from pallas_ce.blocks import RowBlock, Rows, Tiles
from pallas_ce.head import Head, Wanted
from pallas_ce.loops import fori_loop
from pallas_ce.modes.differentiation import (
    Gradients,
    HeadSums,
    Inputs,
    Saved,
    finish,
    first_order_only,
    flags_of,
    input_cotangents,
    is_zero,
    sum_over_devices,
    values_of,
    wanted_inputs,
)
from pallas_ce.modes.forward import Statistics, forward_statistics
from pallas_ce.settings import Settings
from pallas_ce.shards import RowArrays, Shards, psum
from pallas_ce.streaming import streamed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def row_statistics(
    settings: Settings,
    names: frozenset[str],
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
) -> Statistics:
    """Primitive statistics `[...]` of `hidden [..., H]`, differentiable in `hidden` and the head's arrays but u."""
    return forward_statistics(settings, names, hidden, head, labels, mask)


def _forward(settings: Settings, names: frozenset[str], *primals: Any) -> tuple[Statistics, Saved]:
    values: Inputs = values_of(primals)
    saved_names = coef.saved_statistics(names)
    found = forward_statistics(settings, names | saved_names, *first_order_only(values))
    kept = {name: found[name] for name in saved_names}
    saved = Saved(*values, kept, flags_of(wanted_inputs(*primals[:2])))
    return {name: found[name] for name in names}, saved


def _backward(settings: Settings, names: frozenset[str], saved: Saved, cotangents: dict[str, Any]) -> tuple[Any, ...]:
    del names
    given = {name: g for name, g in cotangents.items() if name != "argmax" and not is_zero(g)}
    gradients = Gradients()
    if given and saved.wanted:
        used, given = first_order_only((saved, given))
        if settings.shards is not None:
            given = {name: psum(g, settings.shards.cotangents_by_row) for name, g in given.items()}
        coefficients = coef.from_cotangents(given, used.kept)
        with jax.named_scope("pallas_ce.recompute"):
            operation = streamed(settings.shards, functools.partial(_gradients, settings, saved.wanted))
            kept = dict(used.kept)
            rows = RowArrays(used.hidden, used.labels, used.mask, kept.pop("argmax", None), (kept, coefficients))
            hidden_sum, of_head = operation(rows, used.head)
        finished = finish(used.hidden, used.head, hidden_sum, of_head._replace(weight=None))
        gradients = finished._replace(weight=of_head.weight)
    return input_cotangents(saved, gradients)


row_statistics.defvjp(_forward, _backward, symbolic_zeros=True)


def _gradients(
    settings: Settings, wanted: Wanted, shards: Shards, rows: RowArrays, head: Head
) -> tuple[jax.Array | None, HeadSums]:
    """`dlogits·weight` by row and the head's sums, before the scale; the weight's is its gradient, in its dtype."""
    weight_dtype = head.weight.dtype
    rows, head = shards.enter(rows, head)
    hidden, (kept, coefficients) = rows.hidden, rows.more
    spec, tokens = head.spec, hidden.shape[0]
    plan = settings.plan(spec, tokens, "recompute")
    tiles, counted, wide = Tiles(spec.vocab_size, plan.columns), Rows.counted(rows.mask), spec.accumulator
    blocks = counted.blocks(tokens, plan.rows)
    tile_shape = (plan.columns, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, plan.columns)

    if rows.mask is not None:
        coefficients = coef.select(coefficients, rows.mask)
    coefficients, factor = coef.normalise(coefficients, head.largest_logit_weight)
    scale = factor if head.logit_scale is None else factor * head.logit_scale
    residual = Residual(
        kept["lse"] if coefficients.need_probabilities else None,
        rows.argmax if coefficients.argmax is not None else None,
    )
    # A tile of the weight's gradient is summed over the devices in float32 and rounded at once. Where the parts that
    # the devices hold are not parts of a tile, all of it is kept in float32 and summed at the end.
    by_tile = not shards.gathered_vocabulary

    def tile_body(i: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        hidden_sum, d_weight, bias_sum = carry

        def block_body(block: RowBlock, sums: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            block_coefficients = jax.tree.map(block.take, coefficients)
            if block.live is not None:
                block_coefficients = coef.select(block_coefficients, block.live)
            for_hidden, for_weight, for_bias = settings.backend.dlogits_products(
                head,
                block.take(hidden),
                None if rows.labels is None else block.take(rows.labels),
                jax.tree.map(block.take, residual),
                block_coefficients,
                i,
                wanted,
                plan,
            )
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
            tile_weight = scale * tile_weight
            if by_tile and shards.sums.weight + shards.gathered_width:
                # Behind a barrier: XLA would move the sum out of the loop, and keep all of the gradient in float32.
                tile_weight = lax.optimization_barrier(shards.sum_weight(tile_weight, spec.vocab_axis))
            d_weight = tile.add(d_weight, tile_weight, spec.vocab_axis)
        if tile_bias is not None:
            bias_sum = tile.add(bias_sum, tile_bias)
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
