"""From a row-wise loss to its sum: the one place where a backward mode is entered."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends import reference
from pallas_ce.dispatch.settings import Settings
from pallas_ce.head import NeedsGrad
from pallas_ce.modes import in_forward, recompute
from pallas_ce.modes.differentiation import Call, Known, Operands, RowTotal
from pallas_ce.modes.forward import empty_statistics, forward_statistics
from pallas_ce.statistics.gradient import saved_statistics
from pallas_ce.streaming.rows import constant_unless_any, flat_rows, with_placeholder_rows, zeroed


def statistics(call: Call[Settings], operands: Operands) -> dict[str, jax.Array]:
    """Primitive statistics `[...]` of the rows, differentiable; 0 where the mask is False."""
    batch, head, mask, *_ = operands
    if batch.hidden.size == 0:
        return empty_statistics(call.names, batch, head)
    if call.settings.mode is None:
        rows, counted = flat_rows(batch.leading, (batch, mask))
        found = reference.row_statistics(call.names, rows, head, counted)
        return {name: value.reshape(*batch.leading, *value.shape[1:]) for name, value in found.items()}
    return recompute.row_statistics(call, operands)


def row_losses(call: Call[Settings], operands: Operands) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`row_total` of each row `[...]`, 0 where masked, with the statistics; for `reduction="none"`."""
    found = statistics(call, operands)
    return _row_values(call, operands, found).reshape(operands.batch.leading), found


def total_loss(call: Call[Settings], operands: Operands) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`Σ row_total` over the rows that count, a scalar, and the statistics without gradient."""
    if call.settings.mode == "in_forward" and operands.batch.hidden.size > 0:
        found, handle = in_forward.statistics_and_handle(call, operands)
        found = jax.tree.map(jax.lax.stop_gradient, found)
    else:
        found = statistics(call, operands)
        handle = jnp.zeros((), operands.head.spec.accumulator)
    values = _row_values(call, operands, found)
    return call.settings.total(jnp.sum(values)) + handle, jax.tree.map(jax.lax.stop_gradient, found)


def keep(call: Call[Settings], operands: Operands, needs_grad: NeedsGrad) -> Known | None:
    """What `Operands.known` may be, for gradients of `needs_grad` or fewer.

    None for the reference, which differentiates its logits anew.
    """
    if call.settings.mode is None:
        return None
    if call.settings.mode == "in_forward":
        return in_forward.keep(call, operands, needs_grad)
    return Known(forward_statistics(call.settings, call.names | saved_statistics(call.names), operands))


def _row_values(call: Call[Settings], operands: Operands, found: dict[str, jax.Array]) -> jax.Array:
    assert call.row_total is not None
    read = {name: found[name] for name in call.read}
    return row_values(call.row_total, read, operands.batch.leading, operands.mask, operands.inputs)


def row_values(
    row_total: RowTotal,
    found: dict[str, jax.Array],
    leading: tuple[int, ...],
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> jax.Array:
    """`row_total` of each row `[N]`, 0 in those that do not count, whose values never reach it."""
    by_row, shared = inputs
    mask, read, by_row = flat_rows(leading, (mask, found, by_row))
    read, by_row = (zeroed if row_total.defined_at_zero else with_placeholder_rows)(mask, (read, by_row))
    values = row_total(read, (by_row, constant_unless_any(mask, shared)))
    return values if mask is None else jnp.where(mask, values, 0)
