"""What a low-rank term's products read and make, in blocks and parts whose last rows and columns may not count."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.head import Batch, Head
from pallas_ce.statistics.row import spread
from pallas_ce.streaming.gradient_products import Arrays, PerInput
from pallas_ce.streaming.loops import device_cond
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import pad


def zeroed(dlogits: jax.Array, rows: jax.Array | None, columns: jax.Array | None = None) -> jax.Array:
    """`dlogits [n, c]` with 0 in rows from `rows []` and in columns from `columns []` on, where kernels stored nothing.

    None: they stored all. In the array's own memory, and no work where all counts.
    """
    bounds = [(axis, count) for axis, count in enumerate((rows, columns)) if count is not None]
    if not bounds:
        return dlogits
    whole = functools.reduce(operator.and_, (count >= dlogits.shape[axis] for axis, count in bounds))

    def blanked() -> jax.Array:
        counts = (jax.lax.broadcasted_iota(jnp.int32, dlogits.shape, axis) < count for axis, count in bounds)
        return jnp.where(functools.reduce(operator.and_, counts), dlogits, 0)

    return device_cond(whole, lambda: dlogits, blanked)


def products_of_part(
    head: Head, batch: Batch, dlogits: jax.Array, block: RowBlock, needs: PerInput[bool], first: jax.Array, count: Any
) -> Arrays:
    """The short products of a part's dlogits, whose `count []` columns from `first []` on count: the bias's, a term's.

    Those by column are a tile's, which begins earlier where the part reaches beyond the vocabulary's end.
    """
    spec, width, for_bias, up = head.spec, dlogits.shape[1], None, None
    shift = first - jnp.minimum(first, spec.vocab_size - width)

    def own_columns(share: jax.Array) -> jax.Array:
        return jnp.roll(jnp.where(spread(jnp.arange(width) < count, share), share, 0), shift, axis=0)

    if needs.bias:
        counted = dlogits if block.filled is None else block.select(dlogits, 0)
        for_bias = own_columns(counted.sum(axis=0, dtype=spec.accumulator))
    if head.up is not None:
        # Padding of the vocabulary may hold anything, and dlogits of 0 do not take away a nan.
        parts = -(-spec.vocab_size // width)
        padded = pad(head.up[: spec.vocab_size], (parts * width, spec.rank))
        up = jax.lax.dynamic_slice_in_dim(padded, first, width)
    found = head.term_products(batch, dlogits, up, needs)
    return found._replace(bias=for_bias, up=None if found.up is None else own_columns(found.up))
