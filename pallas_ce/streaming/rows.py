"""Which rows count: how they are visited block by block, and the values of rows that do not count."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.streaming.loops import fori_loop
from pallas_ce.streaming.tiles import Tile, Tiles

# Up to this number of rows each is compared with each: two launches on a GPU, where parts and a scatter take five. More
# rows are taken in parts.
_FEW_ROWS = 2048
_PART_ROWS = 32

# Where at most one row in this number is ignored, packing the others saves less than it costs.
_FEW_IGNORED = 16


def present[T](x: T | None) -> T:
    """`x`, which is not None."""
    assert x is not None
    return x


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x [...]` with axes of 1 behind, so that it broadcasts with `like [..., *K]`."""
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def flat_rows[Tree](leading: tuple[int, ...], tree: Tree) -> Tree:
    """`[N, ...]` leaves from `[*leading, ...]` ones."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(leading) :]), tree)


def zeroed[Tree](mask: jax.Array | None, tree: Tree) -> Tree:
    """`[N, ...]` leaves with 0 in rows where `mask [N]` is False."""
    if mask is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(spread(mask, x), x, jnp.zeros((), x.dtype)), tree)


def with_placeholder_rows[Tree](mask: jax.Array | None, tree: Tree) -> Tree:
    """`[N, ...]` leaves with the first counted row's values, as constants, in rows where `mask [N]` is False.

    So nothing but what a counted row holds reaches a user's function, and no made-up value can turn into nan under it.
    In row order, not in visiting order: where rows are split over devices, an order would take a prefix sum over all.
    """
    if mask is None or mask.size == 0:
        return tree
    is_first = jnp.arange(mask.size) == jnp.argmax(mask)

    def filled(x: jax.Array) -> jax.Array:
        counts, chosen = (spread(flags, x) for flags in (mask, is_first))
        # A sum over one row, not an index: an index would have all of a split array gathered.
        value = jnp.sum(jnp.where(chosen, x, 0), axis=0, dtype=x.dtype)
        return jnp.where(counts, x, lax.stop_gradient(value))

    return jax.tree.map(filled, tree)


def constant_unless_any[Tree](mask: jax.Array | None, tree: Tree) -> Tree:
    """`tree` unchanged, but with gradients of exactly 0 where no row counts.

    What fills the rows is then no row that counts, and where a loss cannot be differentiated there 0·inf would be nan.
    """
    if mask is None:
        return tree
    any_counts = jnp.any(mask)
    return jax.tree.map(lambda x: jnp.where(any_counts, x, lax.stop_gradient(x)), tree)


def few_ignored(counted: jax.Array, rows: int) -> jax.Array:
    """`[]` bool: whether so few of `rows` do not count that the work on them is not worth avoiding."""
    return rows - counted <= rows // _FEW_IGNORED


class Rows(NamedTuple):
    """Which of N rows count, and the places at which they are visited: the rule for masked rows.

    Where few are ignored every row keeps its place, and those that do not count are replaced by one that does. Else
    those that count are packed into the first places, and the others are not visited. The device decides; either way
    no ignored row is read, and the places that hold a row come first. Where all rows count there are no arrays.
    """

    order: jax.Array | None = None  # `[N]` int32, the row at each place
    filled: jax.Array | None = None  # `[]` int32, how many places, the first ones, hold a row
    valid: jax.Array | None = None  # `[N]` bool, which places hold a row that counts
    mask: jax.Array | None = None  # `[N]` bool, which rows count
    place: jax.Array | None = None  # `[N]` int32, the place of each row that counts

    @classmethod
    def counted(cls, mask: jax.Array | None) -> "Rows":
        """From a mask `[N]`; None means that all rows count."""
        if mask is None or mask.shape[0] == 0:
            return cls()
        n = mask.shape[0]
        ids = jnp.arange(n, dtype=jnp.int32)
        # How many count up to each. Behind a barrier: XLA would compute it for every number of a row that is read.
        upto = lax.optimization_barrier(_prefix_sum(mask))
        counted, stays = upto[-1], few_ignored(upto[-1], n)
        place = jnp.where(stays, ids, jnp.maximum(upto - 1, 0))
        # The row at each place, as one reduction or scatter, behind a barrier: a choice between two orders would be
        # made again for every number of a row that is read from its place.
        if n <= _FEW_ROWS:
            row, at = ids[None, :], ids[:, None]
            found = jnp.where(stays & mask[:, None], row == at, upto[None, :] == jnp.minimum(at + 1, counted))
            order = jnp.sum(jnp.where(mask[None, :] & found, row, 0), axis=1, dtype=jnp.int32)
        else:
            last = jnp.max(jnp.where(mask, ids, 0))
            target = jnp.where(mask, place, n + ids)
            order = jnp.full(n, last).at[target].set(ids, mode="drop", unique_indices=True)
        order, filled = lax.optimization_barrier(order), jnp.where(stays, n, counted)
        return cls(order, filled, jnp.where(stays, mask, ids < counted), mask, place)

    def put_all(self, buffer: jax.Array | float, visited: jax.Array) -> jax.Array:
        """`visited [N, ...]`, written by place, as values by row; rows that do not count have `buffer`'s."""
        if self.mask is None:
            return visited
        by_row = visited.at[present(self.place)].get(mode="promise_in_bounds")
        return jnp.where(spread(self.mask, visited), by_row, buffer)

    def blocks(self, total: int, size: int, *, skipped: bool = False) -> "RowBlocks":
        """The places of `total` rows, in blocks of `size`; see `RowBlocks.skipped`."""
        rows = self
        if skipped and self.order is None and total % size:  # the last block is to run over, not to start early
            rows = Rows.counted(jnp.ones(total, bool))
        return RowBlocks(rows, Tiles(total, size), skipped)


def _prefix_sum(x: jax.Array) -> jax.Array:
    """Sums of `x [n]`, n ≥ 1, int32, up to each entry: within parts each is compared with each, then over the parts.

    XLA's own takes as long to compile as ten of its other fusions.
    """
    n = x.shape[0]
    size = n if n <= _FEW_ROWS else _PART_ROWS
    ids = jnp.arange(size)
    parts = jnp.pad(x.astype(jnp.int32), (0, -n % size)).reshape(-1, 1, size)
    within = jnp.sum(jnp.where((ids[None, :] <= ids[:, None])[None], parts, 0), axis=2, dtype=jnp.int32)
    if len(parts) == 1:
        return within[0, :n]
    totals = within[:, -1]
    return (within + (_prefix_sum(totals) - totals)[:, None]).reshape(-1)[:n]


class RowBlocks(NamedTuple):
    """The places of rows in blocks."""

    rows: Rows
    tiles: Tiles  # the blocks
    # Whether the work on a block skips the places behind its `filled` ones by itself. Then every block is visited, and
    # the device need not tell the host how many hold a row. A single block is always visited.
    skipped: bool

    @property
    def all_visited(self) -> bool:
        """Whether every block is visited, whatever the rows that count."""
        return self.skipped or self.rows.filled is None or self.tiles.count == 1

    def for_each[Carry](
        self, body: Callable[["RowBlock", Carry], Carry], init: Carry, *, unrolled: bool = False
    ) -> Carry:
        """`init` carried through `body(block, carry)` over all blocks, or those that hold a row.

        `unrolled` puts a known number of blocks one after the other, if they are `Tiles.few`.
        """
        if self.tiles.count == 1:
            return body(self.block(0), init)
        trips: jax.Array | int = self.tiles.count
        if not self.all_visited:
            trips = -(-present(self.rows.filled) // self.tiles.size)

        def step(index: jax.Array | int, carry: Carry) -> Carry:
            return body(self.block(index), carry)

        if unrolled and isinstance(trips, int) and self.tiles.few:
            traced_once = jax.jit(step)
            for i in range(trips):
                # Behind the block before, whose memory it is to use.
                init = traced_once(*lax.optimization_barrier((jnp.int32(i), init)))
            return init
        return fori_loop(0, trips, step, init)

    def block(self, index: jax.Array | int) -> "RowBlock":
        """The block of that index; the index may be traced."""
        tile = self.tiles.tile(index)
        if self.rows.order is None:
            return RowBlock(index, tile, None, tile.valid, blocks=self.tiles.count)
        filled, row_valid = present(self.rows.filled), present(self.rows.valid)
        if self.all_visited:
            # Places with a row come first, so the last block need not start early: it runs over, and repeats a row.
            places = jnp.int32(index) * tile.size + jnp.arange(tile.size, dtype=jnp.int32)
            ids, valid = (
                x.at[jnp.minimum(places, self.tiles.total - 1)].get(mode="promise_in_bounds")
                for x in (self.rows.order, row_valid)
            )
            filled = jnp.clip(filled - places[0], 0, tile.size)
            only = self.rows if self.tiles.count == 1 else None
            return RowBlock(index, tile, ids, valid & (places < self.tiles.total), filled, only, self.tiles.count)
        valid = tile.take(row_valid)
        valid = valid if tile.valid is None else valid & tile.valid
        return RowBlock(index, tile, tile.take(self.rows.order), valid)


class RowBlock(NamedTuple):
    """One block of places: `take` reads the values of their rows, `put` writes results back for those that count."""

    number: jax.Array | int  # which block this is; a Python number where there is only one
    tile: Tile  # where it lies among the places
    ids: jax.Array | None  # `[size]`, the rows'; None for consecutive rows
    valid: jax.Array | None  # `[size]` bool, which of its places hold a row that counts; None: all
    filled: jax.Array | None = None  # `[]` int32, how many hold a row, the first ones; None where it does not matter
    only: Rows | None = None  # the rows, where this is their only block
    blocks: int | None = None  # how many are visited; None where only the device knows

    @property
    def last(self) -> jax.Array:
        """`[]` bool: whether no block is visited after it."""
        return jnp.asarray(self.number) == present(self.blocks) - 1

    def take(self, x: jax.Array) -> jax.Array:
        """The block's rows `[size, ...]` of `x [N, ...]`; places that are not valid repeat a row that counts."""
        if self.ids is None:
            return self.tile.take(x)
        taken = x.at[self.ids].get(mode="promise_in_bounds")
        # A block that is visited although it holds no row has none to repeat, and must not read an ignored one.
        return taken if self.filled is None else jnp.where(self.filled > 0, taken, jnp.zeros((), x.dtype))

    def add(self, visited: jax.Array | None, values: jax.Array | None) -> jax.Array | None:
        """`visited [N, ...]`, written by place, with `values [size, ...]` added; 0 in places that are not valid."""
        return visited if visited is None or values is None else self.tile.add(visited, values)

    def put(self, buffer: jax.Array, values: jax.Array) -> jax.Array:
        """`buffer [N, ...]` with the valid rows replaced by `values [size, ...]`, in `buffer`'s dtype."""
        values = values.astype(buffer.dtype)
        if self.only is not None:  # to read each row's value is cheaper than to write it where it belongs
            return self.only.put_all(buffer, values)
        if self.ids is not None:
            # Dropped rows have places of their own, too: where an entry might be written twice, XLA writes atomically,
            # or sorts all entries first where it is to be deterministic.
            outside = buffer.shape[0] + jnp.arange(self.tile.size, dtype=jnp.int32)
            index = jnp.where(present(self.valid), self.ids, outside)
            return buffer.at[index].set(values, mode="drop", unique_indices=True)
        return self.tile.put(buffer, self.select(values, self.tile.take(buffer)))

    def put_each(self, buffers: dict[str, jax.Array], values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """`put` for each of `buffers`."""
        return {name: self.put(buffer, values[name]) for name, buffer in buffers.items()}

    def select(self, values: jax.Array, otherwise: jax.Array | float) -> jax.Array:
        """`values [size, ...]` where valid, else `otherwise`."""
        return values if self.valid is None else jnp.where(spread(self.valid, values), values, otherwise)
