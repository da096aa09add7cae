"""The gradient products, from a stored `[n, V]` of exponentials or dlogits: for hidden states and for the weight.

*For hidden*, `stored·weight [n, H]` has few tiles, each a sum over the whole vocabulary. To fill the chip, the
vocabulary is cut into parts. XLA adds up their partial products in a fixed order, which atomics would not keep.

*For the weight*, `storedᵀ·rows [V, H]` has many tiles, each a sum over the n rows of the block. A float32 sum over
blocks lies in memory: the first block stores its tiles, and the copy engine adds the ones of later blocks, which takes
neither registers nor waiting. A launch adds to every number once, so results do not vary.

A bfloat16 gradient is summed over blocks in three bytes a number, its old sum coming through the ring of operands
(`Product.held`). A float32 number's upper 16 bits are a bfloat16, kept where the result will be. The next 8 bits lie in
an array of their own, two columns packed into one 16-bit number:

    bits(sum) = upper·2¹⁶ + lower·2⁸,    sum ← sum + storedᵀ·rows

So a block's product is added within 2⁻¹⁵ of the sum's magnitude, where a bfloat16 sum would be off by 2⁻⁸. The last
block rounds the upper bits to nearest, which leaves the result.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts, loop
from pallas_ce.backends.mosaic_gpu.gemm.launch import Operands
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue, Place, Thread
from pallas_ce.backends.mosaic_gpu.kernels.operands import ROW_MULTIPLE, padded, round_up
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, COLUMN_STEP, STEP, TALL, WIDE, Config, Product, cost
from pallas_ce.streaming.loops import apart

_MOST_PARTS = 8

# A partial product is written and read again: on an H200 about as long as this many vocabulary entries take.
_PART_COST = 700

# Partial products take memory, so that a gain below this share of the time is left.
_NEGLIGIBLE = 0.02

# Tiles to choose from: the one that loses least to its edges, the first where they lose alike.
_TILES = (TALL, WIDE, Config(rows=128, columns=128))

# Tiles of a narrow sum. A warpgroup's part of one must have as many rows as a step has numbers of each row.
NARROW_CONFIG = WIDE


def hidden_config(rows: int, hidden_size: int) -> Config:
    """Tiles of hidden's product."""
    return min(_TILES, key=lambda c: cost(c, rows, hidden_size))


def weight_config(columns: int, hidden_size: int, vocab_axis: int) -> Config:
    """Tiles of `for_weight` for `columns` vocabulary entries."""
    sides = (columns, hidden_size) if vocab_axis == 0 else (hidden_size, columns)
    fitting = [c for c in _TILES if COLUMN_STEP % (c.tile_rows, c.columns)[vocab_axis] == 0]
    return min(fitting, key=lambda c: cost(c, *sides))


def parts(config: Config, rows: int, hidden_size: int, vocab_size: int) -> int:
    """The fewest parts of the vocabulary with which the multiprocessors lose little time at the end."""
    tiles, workers, times = config.row_blocks(rows) * config.column_blocks(hidden_size), config.workers, []
    for count in range(1, 1 + min(_MOST_PARTS, -(-vocab_size // STEP))):
        rounds = -(-tiles * count // workers)
        times.append(rounds * workers / (tiles * count) + (count - 1) * _PART_COST / vocab_size)
    return 1 + next(i for i, t in enumerate(times) if t <= min(times) + _NEGLIGIBLE)


def weight_operands(stored: jax.Array, rows: jax.Array, vocab_axis: int, *, held: bool) -> Operands:
    """Of the product `storedᵀ·rows` in the weight's layout."""
    config = NARROW_CONFIG if held else weight_config(stored.shape[1], rows.shape[1], vocab_axis)
    stored, rows = padded(stored), padded(apart(rows))
    left, right = (stored, rows) if vocab_axis == 0 else (rows, stored)
    blocks = config.row_blocks(left.shape[1]), config.column_blocks(right.shape[1])
    return Operands(Product(config, *blocks, stored.shape[0], left_axis=1, right_axis=1, held=held), (left, right))


@dataclasses.dataclass(frozen=True)
class ProductEpilogue(Epilogue):
    """Stores a tile of the product, or adds it to the old values.

    The output is `[rows, columns]` or `[parts, rows, columns]`. The product begins at its row "to_row" and column
    "to_column". Tiles are added where `adds`, except in the launch that the number "first" marks.
    """

    starts: int = 0
    adds: bool = False
    target = "product"

    def __call__(self, refs: dict[str, Any], place: Place, thread: Thread) -> None:
        """Stores the tile or adds it."""
        add = refs["first"][0] == 0 if "first" in refs else self.adds
        values = thread.multiply()
        if "multiplier" in refs:
            values = values * refs["multiplier"][0]
        if "row_scale" in refs:
            by_row = layouts.rows_of(refs["row_scale"], place.row, place.config.rows)
            values *= layouts.along_columns(by_row, values.shape)
        row = place.row + loop.number(refs, "to_row", ROW_MULTIPLE)
        multiple = math.gcd(STEP, refs["product"].shape[-1], self.starts)
        column = place.column + loop.number(refs, "to_column", multiple)
        self.store(refs, place._replace(row=row, column=column), 0, values, add)


def lower_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the lower bits of a sum `[rows, columns]`."""
    return rows, NARROW_CONFIG.column_blocks(columns) * NARROW_CONFIG.columns // 2


@dataclasses.dataclass(frozen=True)
class NarrowSumEpilogue(Epilogue):
    """Adds a tile to its part of the sum in the ring.

    The "first" launch takes an undefined sum for 0. The "last" one rounds the upper bits to nearest, and leaves the
    lower ones undefined.
    """

    target = "product"

    def __call__(self, refs: dict[str, Any], place: Place, thread: Thread) -> None:
        """Adds piece by piece; two pieces share one piece of lower bits."""
        first, last = refs["first"][0] != 0, refs["last"][0] != 0
        values = thread.multiply()
        staging = refs["blocks"].at[place.warpgroup]
        if "multiplier" in refs:
            values = values * refs["multiplier"][0]
        wide, half = staging.shape[-1], values.shape[1] // 2
        # The last block's lower bits go beyond the end of the array, where the copy engine drops them.
        beyond = round_up(refs["lower"].shape[0], NARROW_CONFIG.tile_rows)
        lower_row = pl.multiple_of(place.row + jnp.where(last, beyond, 0), STEP)

        def old(name: str, column: int) -> jax.Array:
            def zeros() -> jax.Array:
                return plgpu.layout_cast(jnp.zeros((values.shape[0], wide), jnp.bfloat16), plgpu.Layout.WGMMA)

            found = lax.cond(first, zeros, lambda: thread.read_held(name, column, wide))
            return lax.bitcast_convert_type(found, jnp.uint16)

        pl.when(jnp.logical_not(first))(thread.wait_held)
        count = itertools.count()
        for piece in range(0, half, wide):
            before, after = old("lower", piece), []
            for column, lower in ((piece, before & 0xFF), (piece + half, before >> 8)):
                new = values[:, column : column + wide]
                bits = (old("product", column).astype(jnp.uint32) << 16) | (lower.astype(jnp.uint32) << 8)
                new += lax.bitcast_convert_type(bits, jnp.float32)
                bits = lax.bitcast_convert_type(new, jnp.uint32)
                upper = lax.cond(last, lambda x, _: x.astype(jnp.bfloat16), lambda _, x: _narrow(x), new, bits)
                target = refs["product"].at[pl.ds(place.row, BLOCK), pl.ds(place.column + column, wide)]
                layouts.store_block(staging, next(count), target, upper)
                after.append((bits >> 8) & 0xFF)
            target = refs["lower"].at[pl.ds(lower_row, BLOCK), pl.ds(place.block * half + piece, wide)]
            layouts.store_block(staging, next(count), target, _narrow((after[0] | (after[1] << 8)) << 16))
        pl.when(jnp.logical_not(first))(thread.release_held)


def _narrow(bits: jax.Array) -> jax.Array:
    """The upper half of 32 bits."""
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
