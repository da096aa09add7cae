"""Mode *in_forward* (the paper's Algorithms 3 and 4): gradients are made in the forward, where the logits already are.

For a scalar reduction of a row-wise loss the cotangent of every row's statistics is known as soon as the row's
statistics are: it is the derivative of that row's loss, times one upstream scalar for all rows. So the forward goes
over blocks of rows; of each it computes statistics, the loss's derivatives, dlogits and both gradient products, and the
backward only multiplies by the upstream scalar. Three products (6·N·H·V operations) instead of four, for one scratch of
`[rows, V]` and gradients that live from the forward to the backward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.head import NO_WEIGHT
from pallas_ce.modes import materialized
from pallas_ce.modes.call import (
    Call,
    Known,
    Operands,
    Statistics,
    empty_statistics,
    gradient_of,
    sum_over_devices,
    through_down,
)
from pallas_ce.modes.forward import forward_statistics
from pallas_ce.modes.how import How, kept_dtype
from pallas_ce.parallel.entry import streamed
from pallas_ce.parallel.shards import NO_AXES, Local, Shards, psum
from pallas_ce.statistics.gradient import saved_statistics
from pallas_ce.statistics.row import finalise, only
from pallas_ce.streaming.gradient_products import BY_ROW, NO_ARRAYS, Arrays, PerInput, WeightGradient
from pallas_ce.streaming.rows import RowBlock, Rows

# The sums that the gradients come from, with arrays in place of None; and for stored logits what undoes the
# normalisation of dlogits, by row.
_Kept = tuple[PerInput[jax.Array], jax.Array | None]


def forward(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> tuple[tuple[Statistics, jax.Array], _Kept]:
    """Statistics and handle, and what the backward reads."""
    known = keep(call, operands, needs_grad) if operands.known is None else operands.known

    def array(x: jax.Array | None) -> jax.Array:
        return jnp.zeros(1, jnp.int8) if x is None else x

    factor = array(known.statistics.get("factor")) if operands.head.weight is NO_WEIGHT else None
    kept = known.sums.map(array), factor
    return call.with_handle(operands, only(known.statistics, call.names)), kept


def backward(
    call: Call, operands: Operands, needs_grad: PerInput[bool], kept: _Kept, cotangents: tuple[Any, jax.Array | None]
) -> Arrays:
    """The sums, or dlogits, times the handle's cotangent."""
    (sums, factor), upstream, shards, spec = kept, cotangents[1], call.how.shards or Shards(), operands.head.spec
    if upstream is None or not call.read:
        return NO_ARRAYS
    if factor is not None:
        scale = upstream * factor[..., None] if spec.dtype == np.float16 else upstream
        return NO_ARRAYS._replace(hidden=(scale * sums.hidden.astype(spec.accumulator)).astype(spec.dtype))
    return operands.finish(sums.where(needs_grad), psum(upstream, shards.cotangents_of_total), shards.sums)


def keep(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> Known:
    """Statistics and the sums that the gradients in `needs_grad` come from."""
    if not (any(needs_grad) and call.read):
        find = forward_statistics(call.how, call.names, operands.head)
        return Known(find(operands.rows, operands.head, NO_ARRAYS)[0])
    how, (by_row, shared) = call.how, operands.inputs
    if how.shards is not None and operands.cotangent is None:
        # Left to the backward: upstream scalars may differ, and the forward moves only O(tokens) numbers.
        how = dataclasses.replace(how, shards=dataclasses.replace(how.shards, sums=NO_AXES))
    # Not the weight's dtype as the operation sees it: a gathered weight may be narrower.
    head, given = operands.head, NO_ARRAYS._replace(weight=operands.weight_sum)
    if stored := head.weight is NO_WEIGHT:
        local: Callable[..., tuple[Any, Any]] = functools.partial(materialized.statistics_and_gradient, call)
    else:
        dtype = head.weight.dtype if given.weight is None else head.spec.accumulator
        local = functools.partial(_statistics_and_sums, call, needs_grad, dtype)
    operation = streamed(how, local, whole_head=stored)
    with jax.named_scope("pallas_ce.in_forward"):
        rows = operands.rows._replace(more=by_row)
        (found, hidden_sum), of_head = operation(rows, head, given, shared, operands.cotangent)
    return Known(found, of_head._replace(hidden=hidden_sum))


def _statistics_and_sums(
    call: Call,
    needs_grad: PerInput[bool],
    weight_dtype: np.dtype,
    how: How,
    local: Local,
    shared_inputs: Any,
    cotangent: jax.Array | None,
) -> tuple[tuple[Statistics, jax.Array | None], Arrays]:
    """Statistics and `dlogits·weight` by row, and the head's sums, all before upstream scalar and scale."""
    shards, rows, head, given = local
    spec, backend, tokens = head.spec, how.backend, rows.batch.hidden.shape[0]
    wide, in_place, needs = spec.accumulator, local.adds_in_place, spec.needed_products(needs_grad)
    weight_sum = how.weight_sum(spec, weight_dtype, needs_grad, given=in_place)
    plan = how.block_sizes(spec, tokens, "in_forward", weight_sum)
    alone = plan.rows >= tokens
    bits_shape = None if alone else weight_sum.bits
    names = call.names | saved_statistics(call.read)

    def body(block: RowBlock, carry: Any) -> Any:
        found, sums, bits = carry
        block_batch = jax.tree.map(block.take, rows.batch)
        partial, stash = backend.stash(head, block_batch, names, plan, block)
        statistics = finalise(shards.merge(partial, head), names)
        block_inputs = (jax.tree.map(block.take, rows.more), shared_inputs)
        cotangents = call.row_cotangents(statistics, block, block_inputs)
        if cotangent is not None:
            cotangents = jax.tree.map(lambda g: cotangent * g, cotangents)
        gradient, block_batch = gradient_of(cotangents, statistics, shards, block_batch, head)
        to = None if sums.weight is None else WeightGradient(sums.weight, in_place or block.number != 0, bits=bits)
        narrowed = None if needs.down else hidden_dtype
        gradient = gradient._replace(needs=needs, weight_sum=to, hidden_dtype=narrowed)
        shares, bits = backend.stash_products(head, block_batch, gradient, stash, sums, plan, block)
        for_down = None if shares.down is None else block.select(shares.down, 0.0)
        for_hidden = through_down(head, shares.hidden, for_down)
        shares = shares._replace(hidden=for_hidden, down=for_down)
        shares = shares.of(BY_ROW, lambda share, total: block.put(total, gradient.factor * share.astype(wide)), sums)
        return block.put_each(found, statistics), shares, bits

    # A block that is the only one rounds its sum at once.
    kept = kept_dtype(spec, weight_dtype)
    sum_dtype = kept if bits_shape or (alone and weight_sum.bytes) else wide
    kept_hidden = kept_dtype(spec, rows.batch.hidden.dtype) if how.shards is None else wide
    hidden_dtype = how.hidden_sum_dtype(spec, rows.batch.hidden.dtype, needs_grad, shards != Shards())

    blocks = Rows.counted(rows.mask).blocks(tokens, plan.rows, skipped=plan.skips_rows)
    # Where every row counts each is written once, and nothing need be there before; nor where a first block, which is
    # visited, replaces all of the weight's sum.
    by_row = jax.lax.empty if rows.mask is None else jnp.zeros
    replaced = jax.lax.empty if alone or bits_shape is not None else backend.empty_sum
    of_weight = replaced if blocks.all_visited and plan.vocab_size == spec.weight_rows else jnp.zeros
    empty = empty_statistics(call.names, rows.batch, head)
    init = NO_ARRAYS._replace(
        hidden=by_row(rows.batch.hidden.shape, hidden_dtype) if needs.hidden else None,
        weight=(given.weight if in_place else of_weight(head.weight.shape, sum_dtype)) if needs.weight else None,
        down=by_row((tokens, spec.rank), wide) if needs_grad.down else None,
    )
    init = head.with_column_sums(init, needs, spec.weight_rows)
    bits = None if bits_shape is None else jax.lax.empty(bits_shape, sum_dtype)
    found, sums, _ = blocks.for_each(body, (empty, init, bits))
    sums = head.without_padding(plan.vocab_size, sums, weight=not in_place)
    hidden_sum, of_head = sum_over_devices(local, needs_grad, sums, (kept_hidden, kept))
    return (shards.own_rows(found), hidden_sum), of_head
