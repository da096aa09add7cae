"""The order in which the thread blocks of a kernel work: which tiles, and which steps along the operands' rows."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.schedule.config import Product

# Copies may begin at multiples of this, whatever the operands' layouts in shared memory.
STEP = 64


def start(refs: dict[str, Any], name: str) -> jax.Array | int:
    """The number of that name, where something begins; 0 where it is not given."""
    return pl.multiple_of(refs[name][0], STEP) if name in refs else 0


class Item(NamedTuple):
    """One thread block's part of a work item.

    Attributes:
        row: its first row.
        slot: which of the partial results it makes.
        block: its first column block.
        tiles: how many tiles.
        step: the first step along the operands' rows of each tile.
        steps: how many.
    """

    row: jax.Array
    slot: jax.Array
    block: jax.Array
    tiles: jax.Array
    step: jax.Array
    steps: jax.Array


class Walk:
    """The order of work, the same for all warpgroups: items of this cluster, tiles of an item, steps of a tile."""

    def __init__(self, product: Product, refs: dict[str, Any]) -> None:
        self.product, self.config, self.schedule = product, product.config, product.schedule
        schedule, config = self.schedule, self.config
        self.worker, self.peer = lax.axis_index("worker"), lax.axis_index("peer")

        def blocks(name: str, size: int, most: int) -> jax.Array:
            return lax.div(refs[name][0] + (size - 1), size) if name in refs else jnp.int32(most)

        self.steps = blocks("valid_length", config.depth, product.steps)
        self.row_blocks = blocks("valid_rows", config.block_rows, schedule.row_blocks)
        self.column_blocks = blocks("valid_columns", config.block_columns, schedule.column_blocks)
        self.first_column, self.first_length = (start(refs, name) for name in ("first_column", "first_length"))
        total = self.row_blocks * schedule.windows
        if schedule.split:
            total = total * self.column_blocks
        self.total = total
        self.items = lax.div(total + schedule.clusters - 1 - self.worker, schedule.clusters)

    def full_rounds(self) -> jax.Array:
        """How many items every cluster has."""
        return lax.div(self.total, self.schedule.clusters)

    def item(self, index: jax.Array) -> Item:
        """The cluster's item of that index.

        Items are ordered by groups of row blocks, in a group by window, in a window by row block: what runs at one time
        shares a few row blocks, which stay in the L2 cache, and walks through few windows side by side. Where windows
        cut the operands' rows, items are tiles, ordered by window: what runs at one time walks along the same part.
        """
        schedule, config = self.schedule, self.config
        linear = index * schedule.clusters + self.worker
        if schedule.split:
            window, tile = lax.div(linear, self.row_blocks * self.column_blocks), linear
            row_block = lax.rem(tile, self.row_blocks)
            block = lax.rem(lax.div(tile, self.row_blocks), self.column_blocks)
            count, slot = jnp.int32(1), window
            step = lax.div(window * self.steps, schedule.windows)
            steps = lax.div((window + 1) * self.steps, schedule.windows) - step
        else:
            group_rows = min(config.row_group, schedule.row_blocks)
            group_items = group_rows * schedule.windows
            group, rest = lax.div(linear, group_items), lax.rem(linear, group_items)
            width = jnp.minimum(group_rows, self.row_blocks - group * group_rows)
            window = lax.div(rest, width)
            row_block = group * group_rows + lax.rem(rest, width)
            block = lax.div(window * self.column_blocks, schedule.windows)
            count = lax.div((window + 1) * self.column_blocks, schedule.windows) - block
            slot = window * 2 + self.peer if config.cluster == "rows" else window
            step, steps = jnp.int32(0), self.steps
        row = row_block * config.block_rows
        if config.cluster == "columns":
            row = row + self.peer * config.tile_rows
        return Item(row, slot, block, count, step, steps)

    def column(self, block: jax.Array) -> jax.Array:
        """This thread block's first column in column block `block`."""
        column = block * self.config.block_columns
        return column + self.peer * self.config.columns if self.config.cluster == "rows" else column

    def next(self, slot: jax.Array) -> jax.Array:
        """The ring's next slot."""
        return jnp.where(slot == self.config.stages - 1, 0, slot + 1)

    def after(self, slot: jax.Array, steps: jax.Array) -> jax.Array:
        """The ring's slot so many steps after `slot`."""
        return lax.rem(slot + steps, jnp.int32(self.config.stages))

    def full(self, slot: jax.Array, turn: jax.Array) -> jax.Array:
        """Which barrier tells that a slot is full, for that warpgroup where they work in ping-pong."""
        return slot + turn * self.config.stages if self.config.ping_pong else slot
