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

from pallas_ce import coefficients as coef
from pallas_ce.backends import Accumulators, Residual
from pallas_ce.batching import over_rows
from pallas_ce.blocks import RowBlock, Rows
from pallas_ce.head import Head, Wanted
from pallas_ce.modes.differentiation import (
    Gradients,
    Inputs,
    Known,
    Saved,
    absent,
    finish,
    first_order_only,
    flags_of,
    input_cotangents,
    is_zero,
    values_of,
    wanted_inputs,
    zero_cotangent,
)
from pallas_ce.modes.forward import Statistics, empty_statistics, forward_statistics, put_all
from pallas_ce.settings import Settings
from pallas_ce.statistics import finalise


@dataclasses.dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Attributes:
        settings: how it is carried out.
        row_loss: `(statistics [n], inputs) -> [n]`, each row's share of the total; statistics are the primitive ones.
        read: the primitive statistics that `row_loss` reads.
        names: those to return, `read` included.
    """

    settings: Settings
    row_loss: Callable[[Statistics, Any], jax.Array]
    read: frozenset[str]
    names: frozenset[str]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def statistics_and_handle(
    call: Call,
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
    known: Known | None,
) -> tuple[Statistics, jax.Array]:
    """Statistics `[N]`, which carry no gradient, and a scalar 0 whose gradient is that of the summed row losses.

    `Σ row_loss(stop_gradient(statistics), inputs) + handle` therefore has the value and every gradient of the loss:
    that of `inputs` by JAX's own differentiation, those of `hidden` and `head` through the handle.

    Args:
        call: the static facts.
        hidden: `[N, H]`.
        head: the head.
        labels: `[N]` int32 or None.
        mask: `[N]` bool, which rows count; None: all.
        inputs: `(by_row, shared)` for `row_loss`: pytrees of `[N, ...]` and of whole arrays.
        known: what `keep` has found for the same problem, or None.
    """
    if known is None:
        found = forward_statistics(call.settings, call.names, hidden, head, labels, mask)
    else:
        found = known.statistics
    return _with_handle(found, inputs, head)


def _with_handle(found: Statistics, inputs: Any, head: Head) -> tuple[Statistics, jax.Array]:
    """Statistics and handle, made to depend on each other and on `inputs`.

    Under vmap each example then has a handle of its own, and this function and its forward rule, which also reads
    `inputs`, agree on which outputs are batched, as JAX requires.
    """
    firsts = (leaf.ravel()[:1] for leaf in jax.tree.leaves((found, inputs)))
    zero = sum((jnp.sum(jnp.where(x != x, 0, 0)) for x in firsts), jnp.zeros((), jnp.int32))
    return {k: x + zero.astype(x.dtype) for k, x in found.items()}, zero.astype(head.spec.accumulator)


def _forward(call: Call, *primals: Any) -> tuple[tuple[Statistics, jax.Array], Saved]:
    wanted = wanted_inputs(*primals[:2]) if call.read - {"argmax"} else Wanted()
    values: tuple[*Inputs, tuple[Any, Any]] = values_of(primals[:5])
    known: Known | None = values_of(primals[5])
    hidden, head, labels, mask, inputs = first_order_only(values)
    if known is None:
        found, *sums = keep(call, wanted, hidden, head, labels, mask, inputs)
    else:
        found, *sums = first_order_only(known)
    kept = [absent() if x is None else x for x in sums]
    return _with_handle(found, inputs, head), Saved(*values[:4], (kept, values[4]), flags_of(wanted))


def _backward(call: Call, saved: Saved, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    del call
    kept, inputs = saved.kept
    upstream, head, wanted = cotangents[1], saved.head, saved.wanted
    gradients = Gradients()
    if wanted and not is_zero(upstream):
        (hidden_sum, weight_sum, bias_sum), upstream = first_order_only((kept, upstream))
        d_hidden, d_bias, d_scale = finish(saved.hidden, head, wanted, hidden_sum, bias_sum, upstream)
        d_weight = None
        if wanted.weight:
            scale = upstream if head.logit_scale is None else upstream * head.logit_scale
            d_weight = (scale * weight_sum).astype(head.weight.dtype)
        gradients = Gradients(d_hidden, d_weight, d_bias, d_scale)
    return *input_cotangents(saved, gradients), zero_cotangent(inputs), None


statistics_and_handle.defvjp(_forward, _backward, symbolic_zeros=True)


def keep(
    call: Call,
    wanted: Wanted,
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> Known:
    """Statistics and the sums that the gradients in `wanted` come from."""
    if not wanted:
        return Known(forward_statistics(call.settings, call.names, hidden, head, labels, mask))
    with jax.named_scope("pallas_ce.in_forward"):
        operation = over_rows(functools.partial(_statistics_and_sums, call, wanted))
        (found, hidden_sum), sums = operation((hidden, labels, mask, inputs[0]), (head, inputs[1]))
    return Known(found, hidden_sum, *sums)


def _statistics_and_sums(call: Call, wanted: Wanted, by_row: Any, shared: Any) -> tuple[Any, Accumulators]:
    """Statistics and `dlogits·weight` by row, and the head's accumulators, all before upstream scalar and scale."""
    hidden, labels, mask, row_inputs = by_row
    head, shared_inputs = shared
    spec, backend, tokens = head.spec, call.settings.backend, hidden.shape[0]
    plan = call.settings.plan(spec, tokens, "in_forward")
    wide = spec.accumulator
    names = call.names | coef.saved_statistics(call.read)

    def body(block: RowBlock, carry: Any) -> Any:
        found, hidden_sum, sums = carry
        block_hidden = block.take(hidden)
        block_labels = None if labels is None else block.take(labels)
        partial, stash = backend.stash(head, block_hidden, block_labels, names, plan)
        statistics = finalise(partial, names)
        cotangents = _cotangents(call, statistics, block, (jax.tree.map(block.take, row_inputs), shared_inputs))
        coefficients = coef.from_cotangents(cotangents, statistics)
        coefficients, factor = coef.normalise(coefficients, head.largest_logit_weight)
        residual = Residual(
            statistics["lse"] if coefficients.need_probabilities else None,
            statistics["argmax"] if coefficients.argmax is not None else None,
        )
        for_hidden, sums = backend.stash_products(
            head, block_hidden, block_labels, residual, coefficients, factor, stash, sums, wanted, plan
        )
        if for_hidden is not None:
            hidden_sum = block.put(hidden_sum, factor * for_hidden)
        return put_all(block, found, statistics), hidden_sum, sums

    sums = Accumulators(
        jnp.zeros(head.weight.shape, wide) if wanted.weight else None,
        jnp.zeros(spec.weight_rows, wide) if wanted.bias_sum else None,
    )
    hidden_sum = jnp.zeros(hidden.shape, wide) if wanted.hidden_product else None
    carry = (empty_statistics(call.names, tokens, spec), hidden_sum, sums)
    found, hidden_sum, sums = Rows.counted(mask).blocks(tokens, plan.rows).for_each(body, carry)
    return (found, hidden_sum), sums


def _cotangents(call: Call, statistics: Statistics, block: RowBlock, inputs: tuple[Any, Any]) -> Statistics:
    """d Σ row_loss / d statistics for the block's live rows, exactly 0 for the others."""

    def summed(varied: Statistics) -> jax.Array:
        return jnp.sum(call.row_loss({**statistics, **varied}, inputs))

    varied = {name: statistics[name] for name in call.read if name != "argmax"}
    return jax.tree.map(lambda g: block.select(g, 0.0), jax.grad(summed)(varied))
