"""The portable backend: tiles over rows and vocabulary in plain JAX, compiled by XLA for any device.

It is also the readable description of the algorithm. One tile is a plain matrix product and a few reductions over
`[rows, columns]`; XLA fuses the elementwise work. The forward keeps one tile of logits at a time. The in-forward mode
keeps the logits of one block of rows in a scratch `[tiles, rows, columns]` of accumulator dtype, so that its second
pass over the vocabulary needs no third product.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.backends import device as targets
from pallas_ce.backends import xla_tiling as tiling
from pallas_ce.backends.protocol import Backend, Gradient, Mode, Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.gradient import dlogits
from pallas_ce.statistics.row import Partial, fields_of, merge, partial_of_tile, without_columns
from pallas_ce.streaming.budget import default_bytes
from pallas_ce.streaming.gradient_products import BY_COLUMN, BY_ROW, Arrays, TileStep, WeightGradient, put_in_sums
from pallas_ce.streaming.loops import fori_loop
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tile, Tiles

# The fewest rows of in_forward's blocks on a CPU.
_FEW_ROWS = 128


class XlaBackend(Backend):
    """Both modes in plain JAX, with the block sizes of a platform."""

    name = "xla"

    def __init__(self, platform: str = "cpu"):
        self._tiling = tiling.preferred(platform)
        self._gpu = platform not in ("cpu", "tpu")

    def on(self, platform: str | None) -> "XlaBackend":
        """With that platform's block sizes."""
        return XlaBackend(platform or targets.platform())

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """The scratch of one row and one column at a time."""
        return tiling.scratch(spec, mode, tiling.preferred("cpu"), 1, 0, 1, 1)

    def default_scratch(self, spec: HeadSpec, mode: Mode | None, *, alone: bool = False) -> tuple[int, int]:
        """In_forward's stash is float32; a single block's takes what all logits do, and tiles are beside it."""
        default, by_logit = default_bytes(spec.vocab_size), spec.accumulator.itemsize
        if self._tiling.cached:
            return 0 if alone else default, by_logit
        wide = spec.dtype.itemsize > 2 or (mode == "in_forward" and not alone)
        return (1 + wide) * default, (1 + alone) * by_logit

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """Blocks and tiles of the size that the platform prefers, as far as they fit."""
        preferred = self._tiling
        if mode == "in_forward" and preferred.cached:
            # A quarter of the tokens: a quarter of the logits' memory, and few passes over the weight's gradient.
            preferred = preferred._replace(rows=min(preferred.rows, max(_FEW_ROWS, -(-tokens // 4))))
        scratch = functools.partial(tiling.scratch, spec, mode, preferred, tokens, spare_bytes)
        plan = tiling.tiled_plan(preferred, spec.vocab_size, tokens, scratch, scratch_bytes)
        # Products of float32 take four times as long, or longer.
        worth_adding = preferred.worth_adding // (4 if spec.dtype.itemsize > 2 else 1)
        if mode == "in_forward" and plan.rows < min(tokens, worth_adding):
            slower = f"the scratch budget holds {plan.rows} rows of logits: to add so few rows' share of the weight's "
            plan = plan._replace(slower=slower + "gradient to the others' takes longer than to make the logits again")
        return plan

    def empty_sum(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Every block's products are added where the sum lies, the first one's too: no choice stands between."""
        return jnp.zeros(shape, dtype)

    def _with_tiles(self, head: Head, plan: Plan) -> tuple[Head, Tiles]:
        head = head.on_gpu() if self._gpu else head
        return head, Tiles(head.spec.vocab_size, plan.columns, head.valid_columns, plan.last_apart)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """Statistics tile by tile, merged as they come."""
        head, tiles = self._with_tiles(head, plan)
        partial = functools.partial(_partial, head, batch.labels, names)
        return tiles.fold(lambda tile: partial(tile, head.tile_logits(batch, tile)), merge, without_columns)

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """The logits of one tile once more, and their products."""
        head, tiles = self._with_tiles(head, plan)

        def step(tile_index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            tile = tiles.tile(tile_index)
            found = _products(head, batch, gradient, tile, head.tile_logits(batch, tile))
            return put_in_sums(found, block, hidden_sum, weight_sum, head.spec.vocab_axis)

        return step

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, jax.Array]:
        """Statistics, and the logits themselves `[tiles, rows, columns]`."""
        head, tiles = self._with_tiles(head, plan)
        kept = lax.empty((tiles.count, batch.hidden.shape[0], plan.columns), head.spec.accumulator)
        partial = functools.partial(_partial, head, batch.labels, names)

        def put(tile: Tile, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = head.tile_logits(batch, tile)
            return made, lax.dynamic_update_index_in_dim(kept, made, tile.number, 0)

        if self._tiling.cached:

            def both(i: jax.Array | int, carry: tuple[Partial, jax.Array]) -> tuple[Partial, jax.Array]:
                made, kept = put(tile := tiles.tile(i), carry[1])
                return merge(carry[0], partial(tile, made)), kept

            first = tiles.tile(0)
            none = without_columns(jax.eval_shape(lambda: partial(first, head.tile_logits(batch, first))))
            return fori_loop(0, tiles.count, both, (none, kept))

        # A product that nothing else reads is written in place; one that is, XLA makes twice on a GPU.
        kept = tiles.for_each(lambda tile, kept: put(tile, kept)[1], kept)
        read = functools.partial(lax.dynamic_index_in_dim, kept, keepdims=False)
        return tiles.fold(lambda tile: partial(tile, read(tile.number)), merge, without_columns), kept

    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: jax.Array, sums: Arrays, plan: Plan, block: RowBlock
    ) -> tuple[Arrays, None]:
        """A second pass over the tiles, on the stashed logits."""
        head, tiles = self._with_tiles(head, plan)
        factor, c = gradient.factor, gradient.coefficients
        # In the wide range of exponents that all dtypes but float16 have, dlogits take the factor themselves, exactly.
        # Else it stands between the product and the sum that it is added to in place.
        narrow = head.spec.dtype == np.float16
        gradient = gradient if narrow else gradient._replace(coefficients=c.map(lambda x: x * factor))
        to = gradient.weight_sum
        replaced = isinstance(block.number, int) and (to is None or to.adds is False)

        def with_share(tile: Tile, axis: int, total: jax.Array, share: jax.Array) -> jax.Array:
            share = factor * share if narrow else share
            return tile.put(total, share.astype(total.dtype), axis) if replaced else tile.add(total, share, axis)

        def body(tile: Tile, carry: Arrays) -> Arrays:
            logits = lax.dynamic_index_in_dim(stash, tile.number, 0, keepdims=False)
            share = _products(head, batch, gradient, tile, logits)
            carry = carry.of(("weight",), functools.partial(with_share, tile, head.spec.vocab_axis), share)
            return carry.of(BY_COLUMN, functools.partial(with_share, tile, 0), share).of(BY_ROW, operator.add, share)

        sums = head.with_row_sums(sums._replace(weight=None if to is None else to.array), batch, gradient.needs)
        found = tiles.for_each(body, sums)
        return (found if narrow else found.of(BY_ROW, lambda x: x / factor)), None


BACKEND = XlaBackend()


def _partial(head: Head, labels: jax.Array | None, names: frozenset[str], tile: Tile, logits: jax.Array) -> Partial:
    weights = head.tile_logit_weights(tile.start, tile.size) if "sum_weights" in fields_of(names) else None
    return partial_of_tile(logits, tile.columns, tile.valid, labels, weights, names)


def _products(head: Head, batch: Batch, gradient: Gradient, tile: Tile, logits: jax.Array) -> Arrays:
    c, reference, argmax, needs, *_ = gradient
    weights = None if c.logit_weights is None else head.tile_logit_weights(tile.start, tile.size)
    bound = head.bound(batch.inverse_temperature)
    dz = dlogits(c, logits, reference, tile.columns, tile.valid, batch.labels, argmax, weights, bound)
    return head.tile_products(batch, dz, tile, needs)
