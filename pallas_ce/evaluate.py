"""From a row-wise loss to its sum: the one place where a backward mode is entered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce import reference
from pallas_ce.blocks import Rows, flat_rows
from pallas_ce.head import Head
from pallas_ce.modes import in_forward, recompute
from pallas_ce.modes.forward import empty_statistics
from pallas_ce.settings import Settings

RowTotal = Callable[[dict[str, jax.Array], Any], jax.Array]


def statistics(
    settings: Settings,
    names: frozenset[str],
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
) -> dict[str, jax.Array]:
    """Primitive statistics `[...]` of `hidden [..., H]`, differentiable; 0 where `mask` is False."""
    leading = hidden.shape[:-1]
    if hidden.size == 0:
        return empty_statistics(names, leading, head.spec)
    if settings.mode is None:
        rows, ids, counted = flat_rows(leading, (hidden, labels, mask))
        found = reference.row_statistics(names, rows, head, ids, counted)
        return {name: value.reshape(leading) for name, value in found.items()}
    return recompute.row_statistics(settings, names, hidden, head, labels, mask)


def row_losses(
    settings: Settings,
    names: frozenset[str],
    row_total: RowTotal,
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`row_total` of each row `[...]`, 0 where masked, with the statistics; for `reduction="none"`."""
    found = statistics(settings, names, hidden, head, labels, mask)
    rows, values = visited_values(row_total, found, hidden.shape[:-1], mask, inputs)
    return rows.in_row_order(values).reshape(hidden.shape[:-1]), found


def total_loss(
    settings: Settings,
    names: frozenset[str],
    extra_names: frozenset[str],
    row_total: RowTotal,
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`Σ row_total` over the rows that count, a scalar, and the statistics without gradient.

    Args:
        settings: how.
        names: primitive statistics that `row_total` reads.
        extra_names: further ones to return.
        row_total: `(statistics [n], (by_row, shared)) -> [n]`.
        hidden: `[..., H]`.
        head: the head.
        labels: `[...]` int32 or None.
        mask: `[...]` bool, which rows count; None means all.
        inputs: `(by_row, shared)`: pytrees of `[..., *K]`, and of arrays that all rows share.
    """
    if settings.mode == "in_forward" and hidden.size > 0:
        call = in_forward.Call(settings, row_total, names, names | extra_names)
        found, handle = in_forward.statistics_and_handle(call, hidden, head, labels, mask, inputs)
        found = jax.tree.map(jax.lax.stop_gradient, found)
    else:
        found = statistics(settings, names | extra_names, hidden, head, labels, mask)
        handle = jnp.zeros((), head.spec.accumulator)
    read = {name: found[name] for name in names}
    _, values = visited_values(row_total, read, hidden.shape[:-1], mask, inputs)
    return settings.total(jnp.sum(values)) + handle, jax.tree.map(jax.lax.stop_gradient, found)


def visited_values(
    row_total: RowTotal,
    found: dict[str, jax.Array],
    leading: tuple[int, ...],
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> tuple[Rows, jax.Array]:
    """`row_total` of the rows in visiting order, 0 behind the last that counts.

    Only rows that count reach the loss, so that no stand-in value can turn into nan under a user's function.
    """
    rows = Rows.counted(flat_rows(leading, mask))
    by_row, shared = rows.guard(inputs)
    read, by_row = jax.tree.map(rows.visit, flat_rows(leading, (found, by_row)))
    return rows, rows.select(row_total(read, (by_row, shared)))
