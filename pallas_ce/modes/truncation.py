"""Which columns of a row `top_p` and `min_p` keep, found by streaming over the vocabulary, without storing logits.

With columns in descending order of their logits, equal ones in ascending order of their ids, `top_p` keeps those before
which less than p of the probability lies. So there is a threshold, the largest logit t with `mass(z >= t) >= p`: what
lies above it is kept, and of the columns that have this very logit the first ones.

The search holds two logits between which it lies. A pass over the vocabulary finds the mass above several numbers
between them, the largest logit up to each and the smallest above; so both ends become logits that are there, closer by
that many times, until they meet. The same columns have the same sum in each pass.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.head import Batch, Head, tempered
from pallas_ce.modes.fold import LSE, lse_partial
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.row import Partial, finalise, gap, merge
from pallas_ce.streaming.loops import while_loop
from pallas_ce.streaming.tiles import Tile, Tiles

# Numbers above which a pass finds the mass: each takes work on every logit, fewer take more passes.
_PARTS = 16


class Limits(NamedTuple):
    """The limits that were asked for, `[n]` or anything that becomes that; None: not asked for."""

    top_p: jax.Array | None = None
    min_p: jax.Array | None = None


class Cut(NamedTuple):
    """Which columns of a row are kept.

    Attributes:
        threshold: `[n]` capped logit; None: not by `top_p`.
        room: `[n]`, how many columns at the threshold are kept, in order of their ids.
        floor: `[n]`, which tempered logits must reach; None: not by `min_p`.
    """

    threshold: jax.Array | None
    room: jax.Array | None
    floor: jax.Array | None

    def kept(
        self, logits: jax.Array, tile: Tile, inverse_temperature: jax.Array | None, before: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`logits [n, c]`, with -inf for dropped entries; and how many so far, from `before`, are at the threshold.

        A NaN is kept, whatever its row's limits. So are the infinite logits of a row whose largest one is +inf.
        """
        kept = jnp.ones(logits.shape, bool) if tile.valid is None else jnp.broadcast_to(tile.valid, logits.shape)
        if self.threshold is not None:
            threshold, room = self.threshold[:, None], present(self.room)[:, None]
            at = kept & (logits == threshold)
            counted = before[:, None] + jnp.cumsum(at, axis=1, dtype=jnp.int32)
            kept &= ~(logits <= threshold) | (at & ~((counted - 1).astype(room.dtype) >= room))
            before = counted[:, -1]
        if self.floor is not None:
            kept &= ~(tempered(logits, inverse_temperature) < self.floor[:, None])
        return jnp.where(kept, logits, -jnp.inf), before


class _Search(NamedTuple):
    """The threshold lies from `low` to `high`, above which lies the mass `above`; `[n]` each."""

    low: jax.Array
    high: jax.Array
    above: jax.Array


class _Above(NamedTuple):
    """The mass of a row above each of some numbers `[m, n]`, and the logits next to the number."""

    mass: jax.Array
    largest_up_to: jax.Array
    smallest_above: jax.Array


def cut(limits: Limits, head: Head, batch: Batch, inverse_temperature: jax.Array | None, columns: int) -> Cut:
    """What the limits `[n]` keep of the n rows, given without temperatures, by tiles of `columns` columns.

    One pass over the vocabulary finds the maximum and, with `top_p`, the whole mass; then the search takes its passes.
    """
    tiles = Tiles(head.spec.vocab_size, columns)

    def whole(tile: Tile) -> tuple[jax.Array, Partial]:
        logits = logits_of(head, batch, tile)
        own = True if tile.valid is None else tile.valid[None, :]
        partial = lse_partial(logits, tile.columns, tile.valid, inverse_temperature)
        return jnp.max(logits, axis=1, where=own, initial=-jnp.inf), partial

    largest, partial = tiles.fold(whole, lambda a, b: (jnp.maximum(a[0], b[0]), merge(a[1], b[1])))
    top = present(partial.max)
    floor = None if limits.min_p is None else top + jnp.log(limits.min_p)
    if limits.top_p is None:
        return Cut(None, None, floor)

    def unit(tempered_logits: jax.Array) -> jax.Array:
        """The mass of one column."""
        return jnp.exp(gap(tempered_logits, top[:, None]))

    p = jnp.maximum(limits.top_p, np.finfo(top.dtype).tiny)
    target = p * present(partial.sum_exp)
    # More than 1 - p lies at the threshold and below it, in V columns at most; a rounded sum may be less.
    lse = finalise(partial, LSE)["lse"]
    rounded = 1.0 + 8 * float(np.finfo(lse.dtype).eps) * jnp.abs(lse)
    least = lse + jnp.log1p(-p) - math.log(head.spec.vocab_size) - rounded
    least = least if inverse_temperature is None else least / inverse_temperature
    everything = p >= 1
    low, high = (jnp.where(everything, -jnp.inf, end) for end in (least, largest))
    init = _Search(low, high, jnp.zeros_like(top))

    def closer(search: _Search) -> _Search:
        low, high = search.low, search.high
        shares = jnp.arange(_PARTS, dtype=top.dtype)[:, None] / _PARTS
        numbers = low[None, :] + (high - low)[None, :] * shares

        def above(tile: Tile) -> _Above:
            logits = logits_of(head, batch, tile)
            mass, valid = unit(tempered(logits, inverse_temperature)), True if tile.valid is None else tile.valid[None]

            def at(number: jax.Array) -> _Above:
                over = logits > number[:, None]
                return _Above(
                    jnp.sum(mass, axis=1, where=over & valid),
                    jnp.max(logits, axis=1, where=~over & valid, initial=-jnp.inf),
                    jnp.min(logits, axis=1, where=over & valid, initial=jnp.inf),
                )

            return lax.map(at, numbers)  # at once, XLA would store what it makes of each

        def join(a: _Above, b: _Above) -> _Above:
            return _Above(
                a.mass + b.mass,
                jnp.maximum(a.largest_up_to, b.largest_up_to),
                jnp.minimum(a.smallest_above, b.smallest_above),
            )

        return _closer(search, tiles.fold(above, join, _nothing), target)

    search = while_loop(lambda search: jnp.any(search.low < search.high), closer, init)
    own = unit(tempered(search.high[:, None], inverse_temperature))[:, 0]
    room = jnp.where(everything, jnp.inf, (target - search.above) / own)
    return Cut(search.high, room, floor)


def _nothing(like: _Above) -> _Above:
    """The result for no columns."""
    return _Above(
        *(jnp.full(x.shape, neutral, x.dtype) for x, neutral in zip(like, (0, -jnp.inf, jnp.inf), strict=True))
    )


def _closer(search: _Search, found: _Above, target: jax.Array) -> _Search:
    """The search after a pass: the threshold is at most the first number above which there is less than `target`.

    A row that has its threshold keeps it.
    """
    less = found.mass < target[None]
    any_less, first = jnp.any(less, axis=0), jnp.argmax(less, axis=0)

    def at(values: jax.Array, place: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, place[None], axis=0)[0]

    high = jnp.where(any_less, at(found.largest_up_to, first), search.high)
    above = jnp.where(any_less, at(found.mass, first), search.above)
    last = jnp.where(any_less, first, _PARTS) - 1
    # The first number is the lower end itself: nothing below it comes into question.
    low = jnp.where(last < 0, high, at(found.smallest_above, jnp.maximum(last, 0)))
    searching = search.low < search.high
    return jax.tree.map(lambda new, old: jnp.where(searching, new, old), _Search(low, high, above), search)


def logits_of(head: Head, batch: Batch, tile: Tile) -> jax.Array:
    """A tile's capped logits, behind a barrier: the same bits in each pass, whatever is made of them."""
    return lax.optimization_barrier(head.tile_logits(batch, tile))


def kept_of_sorted(limits: Limits, logits: jax.Array, inverse_temperature: jax.Array | None) -> jax.Array:
    """`logits [n, k]` in descending order, with -inf for what the limits `[n]` do not keep of a row of these only."""
    scaled = tempered(logits, inverse_temperature)
    top, kept = scaled[:, :1], jnp.ones(logits.shape, bool)
    if limits.top_p is not None:
        p, mass = limits.top_p[:, None], jnp.exp(gap(scaled, top))
        before = jnp.cumsum(mass, axis=1) - mass
        kept &= (before < p * jnp.sum(mass, axis=1, keepdims=True)) | (p >= 1)
        kept = kept.at[:, 0].set(True)
    if limits.min_p is not None:
        kept &= ~(scaled < top + jnp.log(limits.min_p)[:, None])
    return jnp.where(kept, logits, -jnp.inf)
