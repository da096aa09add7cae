"""From a row-wise loss to its sum: the one place where a backward mode is entered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce import reference
from pallas_ce.blocks import Rows
from pallas_ce.head import Batch, Head
from pallas_ce.modes import in_forward, recompute
from pallas_ce.modes.forward import empty_statistics
from pallas_ce.settings import Settings

RowTotal = Callable[[dict[str, jax.Array], Any], jax.Array]


def statistics(
    settings: Settings,
    names: frozenset[str],
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
) -> dict[str, jax.Array]:
    """Primitive statistics of N rows, differentiable; 0 where `mask` is False."""
    if batch.hidden.shape[0] == 0:
        return empty_statistics(names, batch, head)
    if settings.mode is None:
        return reference.row_statistics(names, batch, head, mask)
    return recompute.row_statistics(settings, names, batch, head, mask)


def row_losses(
    settings: Settings,
    names: frozenset[str],
    row_total: RowTotal,
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`row_total` of each row `[N]`, 0 where masked, with the statistics; for `reduction="none"`."""
    found = statistics(settings, names, batch, head, mask)
    rows = Rows.counted(mask)
    by_row, shared = rows.guard(inputs)
    values = row_total(jax.tree.map(rows.visit, found), (jax.tree.map(rows.visit, by_row), shared))
    return rows.in_row_order(rows.select(values)), found


def total_loss(
    settings: Settings,
    names: frozenset[str],
    extra_names: frozenset[str],
    row_total: RowTotal,
    batch: Batch,
    head: Head,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`Σ row_total` over the rows that count, a scalar, and the statistics without gradient.

    Args:
        settings: how.
        names: primitive statistics that `row_total` reads.
        extra_names: further ones to return.
        row_total: `(statistics [n], (by_row, shared)) -> [n]`.
        batch: the N rows.
        head: the head.
        mask: `[N]` bool, which rows count; None means all.
        inputs: `(by_row, shared)`: pytrees of `[N, ...]`, and of arrays that all rows share.
    """
    rows = Rows.counted(mask)
    if settings.mode == "in_forward" and batch.hidden.shape[0] > 0:
        call = in_forward.Call(settings, row_total, names, names | extra_names)
        found, handle = in_forward.statistics_and_handle(call, batch, head, mask, inputs)
        found = jax.tree.map(jax.lax.stop_gradient, found)
    else:
        found = statistics(settings, names | extra_names, batch, head, mask)
        handle = jnp.zeros((), head.spec.accumulator)
    # Only rows that count reach the loss, so that no stand-in value can turn into nan under a user's function.
    read = {name: rows.visit(found[name]) for name in names}
    by_row, shared = rows.guard(inputs)
    values = rows.select(row_total(read, (jax.tree.map(rows.visit, by_row), shared)))
    return jnp.sum(values) + handle, jax.tree.map(jax.lax.stop_gradient, found)
