"""A low-rank term's arrays by column, in parts of the vocabulary the last of which may run over its end."""

import jax
import jax.numpy as jnp

from pallas_ce.head import Head
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


def own_columns(for_up: jax.Array | None, count: jax.Array, shift: jax.Array) -> jax.Array | None:
    """A part's share of `up [c, r]`, whose first `count []` count, as that of a tile that begins `shift` earlier."""
    if for_up is None:
        return None
    return jnp.roll(jnp.where(jnp.arange(len(for_up))[:, None] < count, for_up, 0), shift, axis=0)
