"""Which rows count: how they are visited block by block, and what stands where one does not count."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.streaming.loops import fori_loop
from pallas_ce.streaming.tiles import Tile, Tiles

# Of so few rows each may be compared with each: two launches, where a prefix sum and a scatter take five.
_FEW_ROWS = 2048


def flat_rows[Tree](leading: tuple[int, ...], tree: Tree) -> Tree:
    """`[N, ...]` leaves from `[*leading, ...]` ones."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(leading) :]), tree)


def zeroed[Tree](mask: jax.Array | None, tree: Tree) -> Tree:
    """`[N, ...]` leaves with 0 in rows where `mask [N]` is False."""
    if mask is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype)), tree)


def with_placeholder_rows[Tree](mask: jax.Array | None, tree: Tree) -> Tree:
    """`[N, ...]` leaves with the first counted row's values, as constants, in rows where `mask [N]` is False.

    So nothing but what a counted row holds reaches a user's function, and no made-up value can turn into nan under it.
    In row order, not in visiting order: where rows are split over devices, an order would take a prefix sum over all.
    """
    if mask is None or mask.size == 0:
        return tree
    is_first = jnp.arange(mask.size) == jnp.argmax(mask)

    def filled(x: jax.Array) -> jax.Array:
        counts, chosen = (flags.reshape(-1, *[1] * (x.ndim - 1)) for flags in (mask, is_first))
        # A sum over one row, not an index: an index would have all of a split array gathered.
        value = jnp.sum(jnp.where(chosen, x, 0), axis=0, dtype=x.dtype)
        return jnp.where(counts, x, lax.stop_gradient(value))

    return jax.tree.map(filled, tree)


def constant_unless_any[Tree](mask: jax.Array | None, tree: Tree) -> Tree:
    """`tree` unchanged, but with gradients of exactly 0 where no row counts.

    The stand-in is then a row that does not count, and where a loss cannot be differentiated there 0·inf would be nan.
    """
    if mask is None:
        return tree
    any_counts = jnp.any(mask)
    return jax.tree.map(lambda x: jnp.where(any_counts, x, lax.stop_gradient(x)), tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Which of N rows count, as the order in which they are visited.

    Attributes:
        order: `[N]` int32, the counted rows first, ascending; None where all rows count.
        count: `[]` int32, how many count; None where all do.
        mask: `[N]` bool, which count; None where all do.
        place: `[N]` int32, each counted row's place in the order; None where all count.
    """

    order: jax.Array | None
    count: jax.Array | None
    mask: jax.Array | None
    place: jax.Array | None = None

    @classmethod
    def counted(cls, mask: jax.Array | None, *, few_launches: bool = False) -> "Rows":
        """From a mask `[N]`; None means that all rows count. `few_launches`: see `Backend`."""
        if mask is None:
            return cls(None, None, None)
        n = mask.shape[0]
        if n == 0:
            return cls(None, None, None)
        upto, order = (_compared if few_launches and n <= _FEW_ROWS else _scattered)(mask)
        return cls(order, upto[-1], mask, jnp.maximum(upto - 1, 0))

    def in_row_order(self, visited: jax.Array) -> jax.Array:
        """`visited [N, ...]`, written in visiting order, as values by row; 0 in rows that do not count."""
        return self.put_all(0, visited)

    def put_all(self, buffer: jax.Array | float, visited: jax.Array) -> jax.Array:
        """`visited [N, ...]`, in visiting order, as values by row; those of `buffer` in rows that do not count."""
        if self.mask is None:
            return visited
        assert self.place is not None
        by_row = visited.at[self.place].get(mode="promise_in_bounds")
        return jnp.where(self.mask.reshape(-1, *[1] * (visited.ndim - 1)), by_row, buffer)

    def blocks(self, total: int, size: int, *, skipped: bool = False) -> "RowBlocks":
        """The counted ones of `total` rows, in blocks of `size`; see `RowBlocks.skipped`."""
        return RowBlocks(self, Tiles(total, size), skipped)


def _scattered(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of rows `[n]`, n ≥ 1: how many count up to each, itself included, and `Rows.order`.

    Places behind the last counted row repeat it: blocks that run over hold real values, never an ignored row's.
    """
    n = mask.shape[0]
    ids = jnp.arange(n, dtype=jnp.int32)
    # Behind a barrier: XLA would compute it again for every number of a row that is read from its place.
    upto = lax.optimization_barrier(jnp.cumsum(mask, dtype=jnp.int32))
    last = jnp.max(jnp.where(mask, ids, 0))
    target = jnp.where(mask, upto - 1, n + ids)
    return upto, jnp.broadcast_to(last, n).at[target].set(ids, mode="drop", unique_indices=True)


def _compared(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Likewise, by n² comparisons."""
    ids = jnp.arange(mask.shape[0], dtype=jnp.int32)
    upto = lax.optimization_barrier(jnp.sum(mask & (ids <= ids[:, None]), axis=1, dtype=jnp.int32))
    found = mask & (upto == jnp.minimum(ids + 1, upto[-1])[:, None])
    return upto, jnp.sum(jnp.where(found, ids, 0), axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """The counted rows in blocks; how much is done depends on how many count, so that ignored rows cost nothing.

    Attributes:
        rows: which count.
        tiles: the blocks.
        skipped: whether what is done with a block skips the rows behind its `valid_rows` by itself. Then every block is
            visited, and the host needs not wait for the device to tell how many there are.
    """

    rows: Rows
    tiles: Tiles
    skipped: bool

    def for_each[Carry](
        self,
        body: Callable[["RowBlock", Carry], Carry],
        init: Carry,
        *,
        first_apart: bool = False,
        without_loop: bool = False,
    ) -> Carry:
        """`init` carried through `body(block, carry)` over all blocks.

        With `first_apart` the first of a known number of blocks comes before the loop over the others, so that XLA
        can see that what is added to in it is zero, and neither writes zeros nor reads them. `without_loop` puts a
        known number of blocks one after the other, if they are `Tiles.few`.
        """
        count = None if self.skipped else self.rows.count
        trips = self.tiles.count if count is None else -(-count // self.tiles.size)
        if isinstance(trips, int) and trips == 1:
            return body(self.block(0), init)
        if without_loop and isinstance(trips, int) and self.tiles.few:
            for i in range(trips):
                # Behind the block before, whose memory it is to use.
                index, init = lax.optimization_barrier((jnp.int32(i), init))
                init = body(self.block(index), init)
            return init
        start = 0
        if first_apart and isinstance(trips, int):
            start, init = 1, body(self.block(jnp.int32(0)), init)
        return fori_loop(start, trips, lambda i, carry: body(self.block(i), carry), init)

    def block(self, index: jax.Array | int) -> "RowBlock":
        """The block of that index; the index may be traced."""
        tile = self.tiles.tile(index)
        if self.rows.order is None:
            return RowBlock(index, tile, None, tile.valid, None)
        assert self.rows.count is not None
        if self.skipped:
            # Live rows come first, so the last block does not start early: places behind the end repeat the last one.
            places = jnp.int32(index) * tile.size + jnp.arange(tile.size, dtype=jnp.int32)
            valid_rows = jnp.clip(self.rows.count - places[0], 0, tile.size)
            ids = self.rows.order.at[jnp.minimum(places, self.tiles.total - 1)].get(mode="promise_in_bounds")
            only = self.rows if self.tiles.count == 1 else None
            return RowBlock(index, tile, ids, places < self.rows.count, valid_rows, only)
        valid = tile.columns < self.rows.count
        valid = valid if tile.valid is None else valid & tile.valid
        return RowBlock(index, tile, tile.take(self.rows.order), valid, None)


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """One block of rows: `take` reads their values, `put` writes results back where they are valid.

    Attributes:
        number: which block this is; a Python number where there is only one.
        tile: where it lies in visiting order.
        index: `[size]` row ids; None for consecutive rows.
        valid: `[size]` bool, which of its rows are valid; None: all.
        valid_rows: `[]` int32, how many are, the first ones; None where that does not matter.
        only: the rows, where this is their only block; else None.
    """

    number: jax.Array | int
    tile: Tile
    index: jax.Array | None
    valid: jax.Array | None
    valid_rows: jax.Array | None
    only: Rows | None = None

    def take(self, x: jax.Array) -> jax.Array:
        """The block's rows `[size, ...]` of `x [N, ...]`; rows that are not valid repeat a valid one."""
        if self.index is None:
            return self.tile.take(x)
        taken = x.at[self.index].get(mode="promise_in_bounds")
        # A block that is visited although no row of it is valid has none to repeat, and must not read an ignored one.
        return taken if self.valid_rows is None else jnp.where(self.valid_rows > 0, taken, jnp.zeros((), x.dtype))

    def add(self, visited: jax.Array | None, values: jax.Array | None) -> jax.Array | None:
        """`visited [N, ...]`, in visiting order, with `values [size, ...]` added; 0 in rows that are not valid."""
        return visited if visited is None or values is None else self.tile.add(visited, values)

    def put(self, buffer: jax.Array, values: jax.Array) -> jax.Array:
        """`buffer [N, ...]` with the valid rows replaced by `values [size, ...]`, in `buffer`'s dtype."""
        values = values.astype(buffer.dtype)
        if self.only is not None:  # to read each row's value is cheaper than to write it where it belongs
            return self.only.put_all(buffer, values)
        if self.index is not None:
            outside = buffer.shape[0]
            index = self.index if self.valid is None else jnp.where(self.valid, self.index, outside)
            return buffer.at[index].set(values, mode="drop")
        return self.tile.put(buffer, self.select(values, self.tile.take(buffer)))

    def select(self, values: jax.Array, otherwise: jax.Array | float) -> jax.Array:
        """`values [size, ...]` where valid, else `otherwise`."""
        if self.valid is None:
            return values
        return jnp.where(self.valid.reshape(-1, *[1] * (values.ndim - 1)), values, otherwise)
