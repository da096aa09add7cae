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
from pallas_ce.batching import over_rows
from pallas_ce.blocks import RowBlock, Rows, Tiles
from pallas_ce.head import Head, Wanted
from pallas_ce.modes.differentiation import (
    Gradients,
    Inputs,
    Known,
    Saved,
    finish,
    first_order_only,
    flags_of,
    input_cotangents,
    is_zero,
    values_of,
    wanted_inputs,
)
from pallas_ce.modes.forward import Statistics, forward_statistics
from pallas_ce.settings import Settings


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def row_statistics(
    settings: Settings,
    names: frozenset[str],
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    known: Known | None,
) -> Statistics:
    """Primitive statistics `[N]` of `hidden [N, H]`, differentiable in `hidden` and the head's arrays but u."""
    if known is not None:
        return {name: known.statistics[name] for name in names}
    return forward_statistics(settings, names, hidden, head, labels, mask)


def _forward(settings: Settings, names: frozenset[str], *primals: Any) -> tuple[Statistics, Saved]:
    values: Inputs = values_of(primals[:4])
    known: Known | None = values_of(primals[4])
    saved_names = coef.saved_statistics(names)
    if known is not None:
        found = first_order_only(known.statistics)
    else:
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
        coefficients = coef.from_cotangents(given, used.kept)
        with jax.named_scope("pallas_ce.recompute"):
            operation = over_rows(functools.partial(_gradients, settings, saved.wanted))
            by_row = (used.hidden, used.labels, used.mask, used.kept, coefficients)
            d_hidden, (d_weight, d_bias, d_scale) = operation(by_row, used.head)
        gradients = Gradients(d_hidden, d_weight, d_bias, d_scale)
    return *input_cotangents(saved, gradients), None


row_statistics.defvjp(_forward, _backward, symbolic_zeros=True)


def _gradients(settings: Settings, wanted: Wanted, by_row: Any, head: Head) -> tuple[jax.Array | None, Any]:
    """The gradient of hidden, and those of weight, bias and scale, in their dtypes; None where not wanted."""
    hidden, labels, mask, kept, coefficients = by_row
    spec, tokens = head.spec, hidden.shape[0]
    plan = settings.plan(spec, tokens, "recompute")
    tiles, rows, wide = Tiles(spec.vocab_size, plan.columns), Rows.counted(mask), spec.accumulator
    blocks = rows.blocks(tokens, plan.rows)
    tile_shape = (plan.columns, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, plan.columns)

    if mask is not None:
        coefficients = coef.select(coefficients, mask)
    coefficients, factor = coef.normalise(coefficients, head.largest_logit_weight)
    scale = factor if head.logit_scale is None else factor * head.logit_scale
    residual = Residual(
        kept["lse"] if coefficients.need_probabilities else None,
        kept["argmax"] if coefficients.argmax is not None else None,
    )

    def tile_body(i: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        hidden_sum, d_weight, bias_sum = carry

        def block_body(block: RowBlock, sums: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            block_coefficients = jax.tree.map(block.take, coefficients)
            if block.live is not None:
                block_coefficients = coef.select(block_coefficients, block.live)
            for_hidden, for_weight, for_bias = settings.backend.dlogits_products(
                head,
                block.take(hidden),
                None if labels is None else block.take(labels),
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
