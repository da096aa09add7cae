"""From a row-wise loss to its sum: the one place where a backward mode is entered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce import reference
from pallas_ce.blocks import Rows
from pallas_ce.coefficients import saved_statistics
from pallas_ce.head import Head, Wanted
from pallas_ce.modes import in_forward, recompute
from pallas_ce.modes.differentiation import Known
from pallas_ce.modes.forward import forward_statistics
from pallas_ce.settings import Settings

RowTotal = Callable[[dict[str, jax.Array], Any], jax.Array]


def statistics(
    settings: Settings,
    names: frozenset[str],
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    known: Known | None = None,
) -> dict[str, jax.Array]:
    """Primitive statistics `[N]`, differentiable; 0 where `mask` is False. `known`: what `keep` has found."""
    if hidden.shape[0] == 0:
        return {name: jnp.zeros(0, jnp.int32 if name == "argmax" else head.spec.accumulator) for name in names}
    if settings.mode is None:
        return reference.row_statistics(names, hidden, head, labels, mask)
    return recompute.row_statistics(settings, names, hidden, head, labels, mask, known)


def row_losses(
    settings: Settings,
    names: frozenset[str],
    row_total: RowTotal,
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
    known: Known | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`row_total` of each row `[N]`, 0 where masked, with the statistics; for `reduction="none"`."""
    found = statistics(settings, names, hidden, head, labels, mask, known)
    rows = Rows.counted(mask)
    by_row, shared = rows.guard(inputs)
    values = row_total(jax.tree.map(rows.visit, found), (jax.tree.map(rows.visit, by_row), shared))
    return rows.in_row_order(rows.select(values)), found


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
    known: Known | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`Σ row_total` over the rows that count, a scalar, and the statistics without gradient.

    Args:
        settings: how.
        names: primitive statistics that `row_total` reads.
        extra_names: further ones to return.
        row_total: `(statistics [n], (by_row, shared)) -> [n]`.
        hidden: `[N, H]`.
        head: the head.
        labels: `[N]` int32 or None.
        mask: `[N]` bool, which rows count; None means all.
        inputs: `(by_row, shared)`: pytrees of `[N, ...]`, and of arrays that all rows share.
        known: what `keep` has found for the same problem, or None.
    """
    rows = Rows.counted(mask)
    if settings.mode == "in_forward" and hidden.shape[0] > 0:
        call = in_forward.Call(settings, row_total, names, names | extra_names)
        found, handle = in_forward.statistics_and_handle(call, hidden, head, labels, mask, inputs, known)
        found = jax.tree.map(jax.lax.stop_gradient, found)
    else:
        found = statistics(settings, names | extra_names, hidden, head, labels, mask, known)
        handle = jnp.zeros((), head.spec.accumulator)
    # Only rows that count reach the loss, so that no stand-in value can turn into nan under a user's function.
    read = {name: rows.visit(found[name]) for name in names}
    by_row, shared = rows.guard(inputs)
    values = rows.select(row_total(read, (jax.tree.map(rows.visit, by_row), shared)))
    return jnp.sum(values) + handle, jax.tree.map(jax.lax.stop_gradient, found)


def keep(
    settings: Settings,
    names: frozenset[str],
    extra_names: frozenset[str],
    row_total: RowTotal | None,
    hidden: jax.Array,
    head: Head,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
    wanted: Wanted,
) -> Known | None:
    """What the functions above take as `known`, for gradients of `wanted` or fewer; arguments as in `total_loss`.

    None for the reference, which differentiates its logits anew.
    """
    if settings.mode is None:
        return None
    if settings.mode == "in_forward":
        assert row_total is not None
        call = in_forward.Call(settings, row_total, names, names | extra_names)
        return in_forward.keep(call, wanted, hidden, head, labels, mask, inputs)
    names = names | extra_names
    return Known(forward_statistics(settings, names | saved_statistics(names), hidden, head, labels, mask))
