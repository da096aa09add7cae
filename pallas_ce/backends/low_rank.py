"""The gradients of a low-rank term, from a part's dlogits: short products, for XLA, whichever kernel made those."""

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head
from pallas_ce.streaming.rows import RowBlock
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


def shares(
    head: Head, batch: Batch, gradient: Gradient, block: RowBlock, dlogits: jax.Array, up: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Of `dlogits [n, c]`, what belongs to the rows `low`, and to the columns' part of `up [c, r]`."""
    needs = gradient.needs
    if up is None:
        return None, None
    for_low = head.matmul(dlogits, up, (1, 0)) if needs.low_product else None
    if not needs.up:
        return for_low, None
    assert batch.low is not None
    counted = dlogits if block.filled is None else block.select(dlogits, 0)
    return for_low, head.matmul(counted, batch.low, (0, 0))


def own_columns(for_up: jax.Array | None, count: jax.Array, shift: jax.Array) -> jax.Array | None:
    """A part's share of `up [c, r]`, whose first `count []` count, as that of a tile that begins `shift` earlier."""
    if for_up is None:
        return None
    return jnp.roll(jnp.where(jnp.arange(len(for_up))[:, None] < count, for_up, 0), shift, axis=0)
