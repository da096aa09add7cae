"""What a low-rank term's products read and make, in blocks and parts whose last rows and columns may not count."""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_ce.head import Head
from pallas_ce.statistics.row import spread
from pallas_ce.streaming.loops import device_cond
from pallas_ce.streaming.tiles import pad


def up_from(head: Head, first: jax.Array, columns: int) -> jax.Array | None:
    """The part of `up` that begins at column `first []`, zeros behind its end; None without a term."""
    up, spec = head.up, head.spec
    if up is None:
        return None
    # Padding of the vocabulary may hold anything, and dlogits of 0 do not take away a nan.
    parts = -(-spec.vocab_size // columns)
    padded = pad(up[: spec.vocab_size], (parts * columns, spec.rank))
    return jax.lax.dynamic_slice_in_dim(padded, first, columns)


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


def own_columns(share: jax.Array | None, count: jax.Array | int, shift: jax.Array) -> jax.Array | None:
    """A part's share `[c, ...]`, whose first `count []` columns count, as a tile's that begins `shift` earlier."""
    if share is None:
        return None
    return jnp.roll(jnp.where(spread(jnp.arange(len(share)) < count, share), share, 0), shift, axis=0)
