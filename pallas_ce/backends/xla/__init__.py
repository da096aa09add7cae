"""The portable backend: tiles over rows and vocabulary in plain JAX, compiled by XLA for any device.

It is also the readable description of the algorithm. One tile is a plain matrix product and a few reductions over
`[rows, columns]`; XLA fuses the elementwise work. The forward keeps one tile of logits at a time. The in-forward mode
keeps the logits of one block of rows in a scratch `[tiles, rows, columns]` of accumulator dtype, so that its second
pass over the vocabulary needs no third product.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.protocol import Backend, Gradient, HeadSums, Mode, Plan
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec, Products, TileStep, WeightSum
from pallas_ce.statistics.gradient import dlogits
from pallas_ce.statistics.row import Partial, merge, partial_of_tile
from pallas_ce.streaming.loops import fori_loop
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tile, Tiles, shrink

# Rows of a block, and elements of a tile (8 MiB of float32), when memory does not ask for less. Larger tiles gain
# nothing on a CPU; smaller ones make the products inefficient.
ROWS = 1024
TILE_ELEMENTS = 2**21
_FEW_ROWS = 128


class XlaBackend(Backend):
    """See `protocol.Backend`."""

    name = "xla"

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Never: plain JAX serves every head and all rows."""
        return None

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """The scratch of one row and one column at a time."""
        return _scratch(spec, mode, 1, 1)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """Blocks and tiles of the preferred size, as far as they fit."""
        rows = min(tokens, ROWS)
        if mode == "in_forward":
            # A quarter of the tokens: a quarter of the logits' memory, and few passes over the weight's gradient.
            rows = min(rows, max(_FEW_ROWS, -(-tokens // 4)))
        return tiled_plan(spec.vocab_size, rows, functools.partial(_scratch, spec, mode), scratch_bytes)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """Statistics tile by tile, merged as they come."""

        def step(tile: Tile) -> Partial:
            return _partial(head, tile, _tile_logits(head, batch, tile), batch.labels, names)

        return _tiles(head, plan).fold(step, merge)

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """The logits of one tile once more, and their products."""

        def step(tile_index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightSum | None) -> Products:
            tile = _tiles(head, plan).tile(tile_index)
            logits = _tile_logits(head, batch, tile)
            for_hidden, for_weight, for_bias = _products(head, batch, gradient, tile, logits)
            if weight_sum is not None and for_weight is not None:
                for_weight = weight_sum.add(for_weight, head.spec.vocab_axis)
            return block.add(hidden_sum, for_hidden), for_weight, for_bias

        return step

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, jax.Array]:
        """Statistics, and the logits themselves `[tiles, rows, columns]`."""
        tiles = _tiles(head, plan)

        def step(tile: Tile) -> tuple[Partial, jax.Array]:
            logits = _tile_logits(head, batch, tile)
            return _partial(head, tile, logits, batch.labels, names), logits

        def body(i: jax.Array, carry: tuple[Partial, jax.Array]) -> tuple[Partial, jax.Array]:
            done, kept = carry
            partial, logits = step(tiles.tile(i))
            return merge(done, partial), lax.dynamic_update_index_in_dim(kept, logits, i, 0)

        partial, logits = step(tiles.tile(0))
        kept = jnp.zeros((tiles.count, *logits.shape), logits.dtype)
        kept = lax.dynamic_update_index_in_dim(kept, logits, 0, 0)
        return fori_loop(1, tiles.count, body, (partial, kept))

    def stash_products(
        self,
        head: Head,
        batch: Batch,
        gradient: Gradient,
        stash: jax.Array,
        sums: HeadSums,
        plan: Plan,
        block: RowBlock,
    ) -> tuple[jax.Array | None, HeadSums]:
        """A second pass over the tiles, on the stashed logits."""
        tiles, factor, adds = _tiles(head, plan), gradient.factor, block.number != 0

        def body(i: jax.Array, carry: Products) -> Products:
            tile = tiles.tile(i)
            logits = lax.dynamic_index_in_dim(stash, i, 0, keepdims=False)
            for_hidden, for_weight, for_bias = _products(head, batch, gradient, tile, logits)
            hidden, weight, bias = carry
            if hidden is not None and for_hidden is not None:
                hidden = hidden + for_hidden
            if weight is not None and for_weight is not None:
                weight = tile.add_or_replace(weight, factor * for_weight, adds, head.spec.vocab_axis)
            if bias is not None and for_bias is not None:
                bias = tile.add_or_replace(bias, factor * for_bias, adds)
            return hidden, weight, bias

        zeros = jnp.zeros(batch.hidden.shape, head.spec.accumulator) if gradient.needs.hidden_product else None
        for_hidden, *found = fori_loop(0, tiles.count, body, (zeros, sums.weight, sums.bias))
        return for_hidden, HeadSums(*found)


BACKEND = XlaBackend()


def tiled_plan(
    vocab_size: int, rows: int, scratch: Callable[[int, int], int], limit: int, least_columns: int = 1
) -> Plan:
    """Blocks of at most `rows`, tiles of the preferred size, halved along their longer side until they fit."""
    columns = min(vocab_size, max(least_columns, TILE_ELEMENTS // rows))
    rows, columns = shrink(rows, columns, scratch, limit, least_columns)
    return Plan(rows, columns, scratch(rows, columns), vocab_size)


def tiles_bytes(specs: Sequence[HeadSpec], entry_bytes: int, mode: Mode | None, rows: int, columns: int) -> int:
    """Bytes of blocks of `rows` and tiles of `columns`, of heads that are streamed together.

    An entry of a tile takes `entry_bytes`; blocks of hidden states and of the weight live as operands and, in a
    backward, as products and as sums.
    """
    sums = 2 * max(spec.accumulator.itemsize for spec in specs) if mode else 0
    operands = sum((spec.dtype.itemsize + sums) * spec.hidden_size for spec in specs)
    return entry_bytes * rows * columns + operands * (rows + columns)


def _scratch(spec: HeadSpec, mode: Mode | None, rows: int, columns: int) -> int:
    """A tile lives as logits, as their exponentials or dlogits, and as the products' operand."""
    wide = spec.accumulator.itemsize
    kept = wide * rows * spec.vocab_size if mode == "in_forward" else 0
    return kept + tiles_bytes((spec,), 2 * wide + spec.dtype.itemsize, mode, rows, columns)


def _tiles(head: Head, plan: Plan) -> Tiles:
    return Tiles(head.spec.vocab_size, plan.columns, head.valid_columns)


def _tile_logits(head: Head, batch: Batch, tile: Tile) -> jax.Array:
    return head.tile_logits(batch.hidden, tile, batch.inverse_temperature)


def _partial(head: Head, tile: Tile, logits: jax.Array, labels: jax.Array | None, names: frozenset[str]) -> Partial:
    weights = head.tile_logit_weights(tile.start, tile.size) if "mean_logit" in names else None
    return partial_of_tile(logits, tile.columns, tile.valid, labels, weights, names)


def _products(head: Head, batch: Batch, gradient: Gradient, tile: Tile, logits: jax.Array) -> Products:
    """The three products of one tile."""
    c, lse, argmax, needs, _ = gradient
    weights = None if c.logit_weights is None else head.tile_logit_weights(tile.start, tile.size)
    bound = head.bound(batch.inverse_temperature)
    dz = dlogits(c, logits, lse, tile.columns, tile.valid, batch.labels, argmax, weights, bound)
    return head.tile_products(batch.hidden, dz, tile, needs)
