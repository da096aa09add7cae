"""Gumbel noise for each row and vocabulary entry, the same however the problem is cut into blocks and tiles.

Noise drawn as one array, or tile by tile from a stream, would depend on the tiles. Here each number is a hash of the
key, the row and the column alone (counter-based, as JAX's own generator is), so any tile can make its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32


def row_keys(key: Any, rows: int) -> jax.Array:
    """A key `[2]` uint32 for each row, `[rows, 2]`."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    return _hash(words, jnp.arange(rows, dtype=jnp.uint32))


def gumbel(keys: jax.Array, columns: jax.Array, dtype: np.dtype) -> jax.Array:
    """Standard Gumbel noise `[n, c]` for rows with `keys [n, 2]` at `columns`, `[c]` or `[n, c]` int32.

    With u uniform in (0, 1), `E = -log(1 - u)` is exponential and `-log E` is Gumbel. The largest of many noises, which
    decide a sample, come from the smallest u. Those have full relative precision here, down to 2⁻⁶⁴: u is made of 64
    bits. Made of 24 bits, the largest of 1e5 would take only some hundred values, and probabilities be off by 1%.
    """
    columns = jnp.broadcast_to(columns, (keys.shape[0], columns.shape[-1])).astype(jnp.uint32)
    words = jax.vmap(_hash)(keys, columns)
    high, low = words[..., 0].astype(dtype), words[..., 1].astype(dtype)
    u = high * 2.0**-32 + low * 2.0**-64 + 2.0**-65
    u = jnp.minimum(u, 1.0 - np.finfo(dtype).epsneg)
    return -jnp.log(-jnp.log1p(-u))


def _hash(key: jax.Array, counts: jax.Array) -> jax.Array:
    """Two words `[m, 2]` for each of `counts [m]`. Threefry pairs the halves of its counter array."""
    words = threefry_2x32((key[0], key[1]), jnp.concatenate([counts, jnp.zeros_like(counts)]))
    return words.reshape(2, -1).T
