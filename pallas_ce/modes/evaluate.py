"""From a row-wise loss to its sum: the one place where a backward mode is entered."""

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from pallas_ce.backends import reference
from pallas_ce.dispatch.settings import Settings
from pallas_ce.head import Batch, Head, NeedsGrad
from pallas_ce.modes import in_forward, recompute
from pallas_ce.modes.differentiation import Known
from pallas_ce.modes.forward import empty_statistics, forward_statistics
from pallas_ce.statistics.gradient import saved_statistics
from pallas_ce.streaming.rows import constant_unless_any, flat_rows, with_placeholder_rows, zeroed


class RowTotal(Protocol):
    """`(statistics [n], (by_row, shared)) -> [n]`, each row's share of the total.

    Attributes:
        defined_at_zero: whether its values and derivatives are finite where statistics and inputs by row are 0. It is
            then given zeros for rows that do not count, else what a row that counts holds.
    """

    defined_at_zero: ClassVar[bool]

    def __call__(self, statistics: dict[str, jax.Array], inputs: tuple[Any, Any], /) -> jax.Array:
        """Each row by itself."""
        ...


def statistics(
    settings: Settings,
    names: frozenset[str],
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
    known: Known | None = None,
) -> dict[str, jax.Array]:
    """Primitive statistics `[...]` of the rows, differentiable; 0 where `mask` is False. `known`: found by `keep`."""
    leading = batch.leading
    if batch.hidden.size == 0:
        return empty_statistics(names, batch, head)
    if settings.mode is None:
        rows, counted = flat_rows(leading, (batch, mask))
        found = reference.row_statistics(names, rows, head, counted)
        return {name: value.reshape(*leading, *value.shape[1:]) for name, value in found.items()}
    return recompute.row_statistics(settings, names, batch, head, mask, known)


def row_losses(
    settings: Settings,
    names: frozenset[str],
    row_total: RowTotal,
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
    known: Known | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`row_total` of each row `[...]`, 0 where masked, with the statistics; for `reduction="none"`."""
    found = statistics(settings, names, batch, head, mask, known)
    return row_values(row_total, found, batch.leading, mask, inputs).reshape(batch.leading), found


def total_loss(
    settings: Settings,
    names: frozenset[str],
    extra_names: frozenset[str],
    row_total: RowTotal,
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
    known: Known | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`Σ row_total` over the rows that count, a scalar, and the statistics without gradient.

    Args:
        settings: how.
        names: primitive statistics that `row_total` reads.
        extra_names: further ones to return.
        row_total: `(statistics [n], (by_row, shared)) -> [n]`.
        batch: the rows.
        head: the head.
        mask: `[...]` bool, which rows count; None means all.
        inputs: `(by_row, shared)`: pytrees of `[..., *K]`, and of arrays that all rows share.
        known: what `keep` has found for the same problem, or None.
    """
    if settings.mode == "in_forward" and batch.hidden.size > 0:
        call = in_forward.Call(settings, row_total, names, names | extra_names)
        found, handle = in_forward.statistics_and_handle(call, batch, head, mask, inputs, known)
        found = jax.tree.map(jax.lax.stop_gradient, found)
    else:
        found = statistics(settings, names | extra_names, batch, head, mask, known)
        handle = jnp.zeros((), head.spec.accumulator)
    read = {name: found[name] for name in names}
    values = row_values(row_total, read, batch.leading, mask, inputs)
    return settings.total(jnp.sum(values)) + handle, jax.tree.map(jax.lax.stop_gradient, found)


def keep(
    settings: Settings,
    names: frozenset[str],
    extra_names: frozenset[str],
    row_total: RowTotal | None,
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
    needs_grad: NeedsGrad,
) -> Known | None:
    """What the functions above take as `known`, for gradients of `needs_grad` or fewer; arguments as in `total_loss`.

    None for the reference, which differentiates its logits anew.
    """
    if settings.mode is None:
        return None
    if settings.mode == "in_forward":
        assert row_total is not None
        call = in_forward.Call(settings, row_total, names, names | extra_names)
        return in_forward.keep(call, needs_grad, batch, head, mask, inputs)
    names = names | extra_names
    return Known(forward_statistics(settings, names | saved_statistics(names), batch, head, mask))


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
