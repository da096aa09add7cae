"""Operations that work tile by tile beside the row statistics: top-k, samples, divergences.

Two loops: over the tiles of the vocabulary (`Tiles.fold`), with a function of one tile and a rule that joins two
results; and over blocks of the rows that count (`over_rows_that_count`), with `vmap`'s rule. A kernel for one of these
operations replaces the fold over tiles and leaves the rest.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from pallas_ce.backends import device as targets
from pallas_ce.backends.protocol import Mode, Plan
from pallas_ce.backends.xla_tiling import preferred, tiled_plan, tiles_bytes
from pallas_ce.head import Batch, Head, HeadSpec, tempered
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import streamed
from pallas_ce.parallel.shards import Local, RowArrays
from pallas_ce.statistics.row import Partial, merge, partial_of_tile
from pallas_ce.streaming.budget import budget
from pallas_ce.streaming.gradient_products import NO_ARRAYS, Arrays
from pallas_ce.streaming.rows import RowBlock, Rows
from pallas_ce.streaming.tiles import Tile, Tiles

LSE = frozenset({"lse"})


@dataclasses.dataclass(frozen=True)
class Streams:
    """Block sizes for heads that are streamed together, by the tiled XLA backend's preferences. Static and hashable."""

    specs: tuple[HeadSpec, ...]  # the heads, which have one vocabulary
    scratch_bytes: int | None  # the caller's bound, or None for the default
    tile_arrays: int  # of a tile's size that are alive at a time, in the accumulator dtype
    least_columns: int = 1  # the fewest columns a tile may have
    row_arrays: int = 0  # of a block's rows with all their columns, likewise

    def block_sizes(self, tokens: int, mode: Mode | None = None) -> Plan:
        """Block sizes for `tokens` rows, at least one, in the forward (`mode=None`) or in the recompute backward.

        Raises:
            ValueError: the budget cannot hold one row.
        """
        vocab_size, wide = self.specs[0].vocab_size, max(spec.accumulator.itemsize for spec in self.specs)
        row = self.row_arrays * vocab_size * wide

        def scratch(rows: int, columns: int) -> int:
            return tiles_bytes(self.specs, self.tile_arrays * wide, mode, rows, columns) + row * rows

        least, logits = scratch(1, self.least_columns), tokens * (len(self.specs) * vocab_size * wide + row)
        limit = budget(self.scratch_bytes, least, logits, f"one row in the {mode or 'forward'} pass")
        return tiled_plan(preferred(targets.platform()), vocab_size, tokens, scratch, limit, self.least_columns)


def fold_with_lse[Found](
    part: Callable[[jax.Array, Tile], Found],
    merge_parts: Callable[[Found, Found], Found],
    head: Head,
    batch: Batch,
    columns: int,
) -> tuple[Found, Partial]:
    """`part` of the capped logits of each tile, joined, and the `Partial` that the tempered logits' lse is made of."""
    untempered = batch._replace(inverse_temperature=None)

    def both(tile: Tile) -> tuple[Found, Partial]:
        logits = head.tile_logits(untempered, tile)
        return part(logits, tile), lse_partial(logits, tile.columns, tile.valid, batch.inverse_temperature)

    tiles = Tiles(head.spec.vocab_size, columns)
    return tiles.fold(both, lambda a, b: (merge_parts(a[0], b[0]), merge(a[1], b[1])))


def lse_partial(
    logits: jax.Array, columns: jax.Array, valid: jax.Array | None, inverse_temperature: jax.Array | None
) -> Partial:
    """The `Partial` of capped logits `[n, c]` that the log-sum-exp at the rows' temperatures is made of."""
    return partial_of_tile(tempered(logits, inverse_temperature), columns, valid, None, None, LSE)


def over_rows_that_count[Out](
    how: How,
    visit: Callable[..., Out],
    block_sizes: Callable[[How, int], Plan],
    empty: Callable[[int], Out],
    rows: RowArrays,
    head: Head,
) -> Out:
    """`visit(how, plan, rows, head)` of the rows that count, block by block; `empty(N)` in the others.

    `rows` and results are trees of `[N, ...]`, and `block_sizes(how, tokens)` has the plan of at least one row.
    """

    def operation(how: How, local: Local) -> tuple[Out, Arrays]:
        sizes = functools.partial(block_sizes, how)
        return by_block(local.rows, sizes, lambda plan, rows, _: visit(how, plan, rows, local.head), empty), NO_ARRAYS

    return streamed(how, operation, whole_head=True)(rows, head, NO_ARRAYS)[0]


def by_block[Out](
    rows: RowArrays,
    block_sizes: Callable[[int], Plan],
    visit: Callable[[Plan, RowArrays, jax.Array | None], Out],
    empty: Callable[[int], Out],
) -> Out:
    """`visit` of one device's flat rows that count, and `RowBlock.filled`, block by block; `empty` in the others."""
    tokens = rows.batch.hidden.shape[0]
    if tokens == 0:
        return empty(0)
    plan, by_row = block_sizes(tokens), rows._replace(mask=None)

    def body(block: RowBlock, out: Out) -> Out:
        return jax.tree.map(block.put, out, visit(plan, jax.tree.map(block.take, by_row), block.filled))

    return Rows.counted(rows.mask).blocks(tokens, plan.rows, skipped=plan.skips_rows).for_each(body, empty(tokens))
