"""The gradient products, from a stored `[n, V]` of exponentials or dlogits: for hidden states and for the weight.

*For hidden*, `stored·weight [n, H]` has few tiles, each a sum over the whole vocabulary. To fill the chip, the
vocabulary is cut into parts. XLA adds up their partial products in a fixed order, which atomics would not keep.

*For the weight*, `storedᵀ·rows [V, H]` has many tiles, each a sum over the n rows of the block. A float32 sum over
blocks lies in memory: the first block stores its tiles, and the copy engine adds the ones of later blocks, which takes
neither registers nor waiting. A launch adds to every number once, so results do not vary.

A bfloat16 gradient is summed over blocks in three bytes a number: a float32 number's upper 16 bits are a bfloat16, kept
where the result will be. The next 8 bits lie in an array of their own, two columns packed into one 16-bit number. A
block's product is thus added within 2⁻¹⁵ of the sum's magnitude, where a bfloat16 sum would be off by 2⁻⁸. The last
block rounds the upper bits to nearest, which leaves the result.

    bits(sum) = upper·2¹⁶ + lower·2⁸,    sum ← sum + storedᵀ·rows

The old sum of a tile comes through the ring of operands (`Product.held`).

Rows that do not count cost nothing: a launch reads on the device how many rows count.
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

from pallas_ce.backends.arrays import apart
from pallas_ce.backends.mosaic_gpu.gemm import launch, layouts, loop
from pallas_ce.backends.mosaic_gpu.gemm.loop import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels.operands import ROW_MULTIPLE, padded, round_up
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, COLUMN_STEP, TALL, WIDE, Config, Product, cost
from pallas_ce.streaming.tiles import Columns, pad

_MOST_PARTS = 8

# A partial product is written and read again: on an H200 about as long as this many vocabulary entries take.
_PART_COST = 700

# Partial products take memory, so that a gain below this share of the time is left.
_NEGLIGIBLE = 0.02

# Tiles to choose from: the one that loses least to its edges, the first where they lose alike.
_TILES = (TALL, WIDE, Config(rows=128, columns=128))


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
    tiles, workers = config.row_blocks(rows) * config.column_blocks(hidden_size), config.workers

    def time(count: int) -> float:
        rounds = -(-tiles * count // workers)
        return rounds * workers / (tiles * count) + (count - 1) * _PART_COST / vocab_size

    times = [time(count) for count in range(1, 1 + min(_MOST_PARTS, -(-vocab_size // config.depth)))]
    return 1 + next(i for i, t in enumerate(times) if t <= min(times) + _NEGLIGIBLE)


def for_hidden(
    stored: jax.Array,
    weight: jax.Array,
    vocab_axis: int,
    valid_rows: jax.Array | None = None,
    existing: jax.Array | None = None,
    *,
    scale: jax.Array | None = None,
    dtype: Any = jnp.float32,
    splits: bool = True,
) -> jax.Array:
    """`scale∘stored·weight [n, H]` in `dtype`, of `stored [n, V]`; undefined in rows from `valid_rows []` on.

    The weight counts as 0 from its entry `existing []` on, whatever it is; `stored` is 0 there. None: it has no such
    entries in reach of a step, or finite ones. `splits` tells whether there is memory for partial products.
    """
    rows, hidden_size = stored.shape[0], weight.shape[1 - vocab_axis]
    product, matrices = _hidden_product(stored, weight, vocab_axis)
    count = parts(product.config, rows, hidden_size, product.length) if splits else 1
    product = dataclasses.replace(product, parts=count)
    shape = count, matrices[0].shape[0], hidden_size
    outputs = {"product": jax.ShapeDtypeStruct(shape, dtype if count == 1 else jnp.float32)}
    numbers = {"valid_rows": valid_rows, "finite_length": existing}
    inputs = {"row_scale": None if scale is None else pad(scale, (product.padded_rows,))}
    found = launch.run("pallas_ce_for_hidden", product, matrices, ProductEpilogue(), inputs, outputs, numbers)
    return found["product"].sum(axis=0, dtype=jnp.float32)[:rows].astype(dtype)


def add_for_hidden(
    stored: jax.Array,
    weight: jax.Array,
    vocab_axis: int,
    total: jax.Array,
    part: Columns | None = None,
    to_row: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
    existing: jax.Array | None = None,
) -> jax.Array:
    """`total [N, H]` float32 with `stored·weight` added in place, from its row `to_row` on; see `for_hidden`.

    N is a multiple of 8, and `stored` holds the columns of `part` only; `existing` counts from the vocabulary's first.
    """
    product, matrices = _hidden_product(stored, weight, vocab_axis)
    numbers = {} if part is None else {"valid_length": part.count, "first_length": part.start}
    if part is not None and existing is not None:
        existing = existing - part.start
    numbers |= {"valid_rows": valid_rows, "to_row": to_row, "finite_length": existing}
    epilogue = ProductEpilogue(adds=True)
    found = launch.run("pallas_ce_add_for_hidden", product, matrices, epilogue, {}, {"product": total}, numbers)
    return found["product"]


def _hidden_product(stored: jax.Array, weight: jax.Array, vocab_axis: int) -> tuple[Product, tuple[jax.Array, ...]]:
    rows, hidden_size = stored.shape[0], weight.shape[1 - vocab_axis]
    config, stored = hidden_config(rows, hidden_size), padded(stored)
    blocks = config.row_blocks(rows), config.column_blocks(hidden_size)
    return Product(config, *blocks, stored.shape[1], right_axis=1 - vocab_axis), (stored, weight)


def for_weight(
    stored: jax.Array,
    rows: jax.Array,
    vocab_axis: int,
    into: jax.Array,
    *,
    replaced: jax.Array | bool = True,
    valid_rows: jax.Array | None = None,
    multiplier: jax.Array | None = None,
    part: Columns | None = None,
    starts: int = 0,
) -> jax.Array:
    """`into`, of the weight's shape, replaced by `multiplier·storedᵀ·rows [n, H]` or, in float32, added to.

    `stored [n, c]` has the columns of `part`; rows from `valid_rows []` on are left out. `replaced`, a Python bool or
    `[]`, tells whether the product replaces old values. `part.start` is a multiple of the greatest common divisor of
    `starts` and a row's length.
    """
    config = weight_config(stored.shape[1], rows.shape[1], vocab_axis)
    product, matrices = weight_product(stored, rows, vocab_axis, config)
    limit = stored.shape[1] if part is None or part.count is None else part.count
    if valid_rows is not None and replaced is not True:  # nothing is added where no row is valid
        limit = jnp.where(replaced | (valid_rows > 0), limit, 0)
    numbers = {
        "valid_length": valid_rows,
        ("valid_rows", "valid_columns")[vocab_axis]: limit if isinstance(limit, jax.Array) else None,
        ("to_row", "to_column")[vocab_axis]: None if part is None else part.start,
        "first": None if isinstance(replaced, bool) else replaced,
    }
    inputs = {"multiplier": None if multiplier is None else multiplier.astype(jnp.float32).reshape(1)}
    epilogue = ProductEpilogue(starts if vocab_axis else 0, adds=replaced is not True)
    found = launch.run("pallas_ce_for_weight", product, matrices, epilogue, inputs, {"product": into}, numbers)
    return found["product"]


def weight_product(
    stored: jax.Array, rows: jax.Array, vocab_axis: int, config: Config
) -> tuple[Product, tuple[jax.Array, ...]]:
    """The product `storedᵀ·rows` in the weight's layout, and its operands."""
    stored, rows = padded(stored), padded(apart(rows))
    left, right = (stored, rows) if vocab_axis == 0 else (rows, stored)
    blocks = config.row_blocks(left.shape[1]), config.column_blocks(right.shape[1])
    return Product(config, *blocks, stored.shape[0], left_axis=1, right_axis=1), (left, right)


@dataclasses.dataclass(frozen=True)
class ProductEpilogue(Epilogue):
    """Stores a tile of the product, or adds it to the old values.

    The output is `[rows, columns]` or `[parts, rows, columns]`. The product begins at its row "to_row" and column
    "to_column". Tiles are added where `adds`, except in the launch that the number "first" marks.
    """

    starts: int = 0
    adds: bool = False
    target = "product"

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Reads whether to add."""
        return refs["first"][0] == 0 if "first" in refs else None

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> None:
        """Stores the tile or adds it."""
        if "multiplier" in refs:
            values = values * refs["multiplier"][0]
        if "row_scale" in refs:
            by_row = layouts.rows_of(refs["row_scale"], place.row, place.config.rows)
            values *= layouts.along_columns(by_row, values.shape)
        target = refs["product"]
        row = place.row + loop.number(refs, "to_row", ROW_MULTIPLE)
        column = place.column + loop.number(refs, "to_column", math.gcd(loop.STEP, target.shape[-1], self.starts))
        target = target.at[place.part] if len(target.shape) == 3 else target
        add = self.adds if carry is None else carry
        layouts.store_piece(refs["blocks"], place.warpgroup, target, row, column, 0, values, add=add)


# A warpgroup's part of a tile must have as many rows as a step has numbers of each row.
NARROW_CONFIG = WIDE


def lower_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the lower bits of a sum `[rows, columns]`."""
    return rows, NARROW_CONFIG.column_blocks(columns) * NARROW_CONFIG.columns // 2


def add_narrow_for_weight(
    stored: jax.Array,
    rows: jax.Array,
    vocab_axis: int,
    total: tuple[jax.Array, jax.Array],
    *,
    first: jax.Array,
    last: jax.Array,
    valid_rows: jax.Array | None = None,
    multiplier: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`total`, upper bits in the weight's shape and lower ones, with `multiplier·storedᵀ·rows` added in place.

    Rows from `valid_rows []` on are left out. Where `first []` is true the total is undefined and counts as 0; where
    `last []` is, the upper bits are rounded to nearest, and the lower ones left undefined.
    """
    product, matrices = weight_product(stored, rows, vocab_axis, NARROW_CONFIG)
    numbers = {"first": first, "last": last}
    if valid_rows is not None:
        needed = first | last | (valid_rows > 0)
        numbers |= {"valid_length": valid_rows, "valid_rows": jnp.where(needed, matrices[0].shape[1], 0)}
    product, epilogue = dataclasses.replace(product, held=True), NarrowSumEpilogue(total[0].shape[1])
    outputs = {"upper": total[0], "lower": total[1]}
    inputs = {"multiplier": None if multiplier is None else multiplier.astype(jnp.float32).reshape(1)}
    found = launch.run("pallas_ce_add_for_weight", product, matrices, epilogue, inputs, outputs, numbers)
    return found["upper"], found["lower"]


@dataclasses.dataclass(frozen=True)
class NarrowSumEpilogue(Epilogue):
    """Adds a tile to its part of the sum in the ring; `columns` is the length of the sum's rows."""

    columns: int

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for the stores."""
        return {"sum_smem": layouts.tile_staging(config, self.columns, jnp.bfloat16)}

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Reads whether the sum begins and ends."""
        return refs["first"][0] != 0, refs["last"][0] != 0

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> None:
        """Adds piece by piece; two pieces share one piece of lower bits."""
        (first, last), thread, staging = carry, refs["thread"], refs["sum_smem"].at[place.warpgroup]
        if "multiplier" in refs:
            values = values * refs["multiplier"][0]
        wide, half = staging.shape[-1], values.shape[1] // 2
        # The last block's lower bits go beyond the end of the array, where the copy engine drops them.
        beyond = round_up(refs["lower"].shape[0], NARROW_CONFIG.tile_rows)
        lower_row = pl.multiple_of(place.row + jnp.where(last, beyond, 0), loop.STEP)

        def old(name: str, column: int) -> jax.Array:
            def zeros() -> jax.Array:
                return plgpu.layout_cast(jnp.zeros((values.shape[0], wide), jnp.bfloat16), plgpu.Layout.WGMMA)

            return lax.bitcast_convert_type(
                lax.cond(first, zeros, lambda: thread.read_held(name, column, wide)), jnp.uint16
            )

        pl.when(jnp.logical_not(first))(thread.wait_held)
        count = itertools.count()
        for piece in range(0, half, wide):
            before, after = old("lower", piece), []
            for column, lower in ((piece, before & 0xFF), (piece + half, before >> 8)):
                new = values[:, column : column + wide]
                bits = (old("upper", column).astype(jnp.uint32) << 16) | (lower.astype(jnp.uint32) << 8)
                new += lax.bitcast_convert_type(bits, jnp.float32)
                bits = lax.bitcast_convert_type(new, jnp.uint32)
                upper = lax.cond(last, lambda x, bits: x.astype(jnp.bfloat16), lambda x, bits: _narrow(bits), new, bits)
                target = refs["upper"].at[pl.ds(place.row, BLOCK), pl.ds(place.column + column, wide)]
                layouts.store_block(staging, next(count), target, upper)
                after.append((bits >> 8) & 0xFF)
            target = refs["lower"].at[pl.ds(lower_row, BLOCK), pl.ds(place.block * half + piece, wide)]
            layouts.store_block(staging, next(count), target, _narrow((after[0] | (after[1] << 8)) << 16))
        pl.when(jnp.logical_not(first))(thread.release_held)


def _narrow(bits: jax.Array) -> jax.Array:
    """The upper half of 32 bits."""
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
