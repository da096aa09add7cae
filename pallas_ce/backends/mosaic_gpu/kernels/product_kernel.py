"""The gradient products, from a stored `[n, V]` of exponentials or dlogits: for hidden states and for the weight.

*For hidden*, `stored·weight [n, H]` has few tiles, each a sum over the whole vocabulary. To fill the chip, the
vocabulary is cut into parts. XLA adds up their partial products in a fixed order, which atomics would not keep.

*For the weight*, `storedᵀ·rows [V, H]` has many tiles, each a sum over the n rows of the block. The sum over blocks is
kept in float32 in memory. The first block stores its tiles. The copy engine adds the tiles of later blocks in memory,
which takes neither registers nor waiting. A launch adds to every number once, so results do not vary.

Rows that do not count cost nothing: a launch reads on the device how many rows count.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import launch, layouts, loop
from pallas_ce.backends.mosaic_gpu.gemm.launch import Numbers
from pallas_ce.backends.mosaic_gpu.gemm.loop import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels.operands import LENGTH_MULTIPLE, Part, apart
from pallas_ce.backends.mosaic_gpu.schedule import TALL, WIDE, Config, Product, cost
from pallas_ce.head import HeadSpec
from pallas_ce.streaming.rows import RowBlock

# Below this many rows there is little to skip, and hidden's product takes the tiles of a shorter sum.
_LEAST_ROWS = 2048

# Below this width, products are so short that other costs dominate.
_LEAST_WIDTH = 256

# Blocks of rows end where a pipeline stage does.
_STAGE_ROWS = 64

_MOST_PARTS = 8

# A partial product is written and read again: on an H200 about as long as this many vocabulary entries take.
_PART_COST = 700

# Partial products take memory, so that a gain below this share of the time is left.
_NEGLIGIBLE = 0.02

# Tiles to choose from: the one that loses least to its edges, the first where they lose alike.
_TILES = (TALL, WIDE, Config(rows=128, columns=128))

# Parts of the vocabulary are multiples of this wide, and tiles of the weight's gradient divide it, so that a part's
# product ends where the next part's begins.
COLUMN_STEP = 256


def serves(spec: HeadSpec, rows: int) -> bool:
    """Whether the kernels can read and write the operands in place; where not, no rows are skipped."""
    return (
        spec.hidden_size >= _LEAST_WIDTH
        and spec.hidden_size % LENGTH_MULTIPLE == 0
        and spec.weight_rows % LENGTH_MULTIPLE == 0
        and spec.vocab_size == spec.weight_rows
        and rows % _STAGE_ROWS == 0
    )


def skips(spec: HeadSpec, block: RowBlock) -> bool:
    """Whether rows of the block that are not valid are skipped; not in a small problem's only block."""
    rows = block.tile.size
    small = isinstance(block.number, int) and rows < _LEAST_ROWS
    return block.filled is not None and not small and serves(spec, rows)


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
    config: Config,
    valid_rows: jax.Array | None = None,
    *,
    splits: bool = True,
) -> jax.Array:
    """`stored·weight [n, H]` float32.

    Args:
        stored: `[n, V]`.
        weight: `[V, H]`, or `[H, V]` with `vocab_axis` 1.
        vocab_axis: of the weight.
        config: of the kernel.
        valid_rows: `[]` int32: rows of the result from there on are undefined; None: none.
        splits: whether there is memory for partial products.
    """
    (rows, length), hidden_size = stored.shape, weight.shape[1 - vocab_axis]
    count = parts(config, rows, hidden_size, length) if splits else 1
    product = _hidden_product(config, rows, hidden_size, length, vocab_axis, count)
    by_part = jax.ShapeDtypeStruct((count, rows, hidden_size), jnp.float32)
    return _run("pallas_ce_for_hidden", product, stored, weight, by_part, _limits(None, valid_rows)).sum(axis=0)


def _hidden_product(
    config: Config, rows: int, hidden_size: int, length: int, vocab_axis: int, parts: int = 1
) -> Product:
    blocks = config.row_blocks(rows), config.column_blocks(hidden_size)
    return Product(config, *blocks, length, right_axis=1 - vocab_axis, parts=parts)


def add_for_hidden(
    stored: jax.Array,
    weight: jax.Array,
    vocab_axis: int,
    config: Config,
    total: jax.Array,
    *,
    to_row: jax.Array | None = None,
    valid_rows: jax.Array | None = None,
    part: Part | None = None,
) -> jax.Array:
    """`total [N, H]` float32 with `stored·weight` added in place, from its row `to_row` on; see `for_hidden`."""
    (rows, length), hidden_size = stored.shape, weight.shape[1 - vocab_axis]
    product = _hidden_product(config, rows, hidden_size, length, vocab_axis)
    numbers = _limits(part, valid_rows) | ({} if to_row is None else {"to_row": to_row})
    return _run("pallas_ce_add_for_hidden", product, stored, weight, total, numbers, adds=True)


def _limits(part: Part | None, valid_rows: jax.Array | None) -> Numbers:
    """The numbers for a product that sums over vocabulary entries."""
    numbers = {} if part is None else {"valid_length": part.valid, "first_length": part.first}
    return numbers if valid_rows is None else numbers | {"valid_rows": valid_rows}


def for_weight(
    stored: jax.Array,
    rows: jax.Array,
    vocab_axis: int,
    config: Config,
    into: jax.Array | jax.ShapeDtypeStruct,
    *,
    replaced: jax.Array | bool = True,
    valid_rows: jax.Array | None = None,
    multiplier: jax.Array | None = None,
    part: Part | None = None,
) -> jax.Array:
    """`into`, of the weight's shape, replaced by `multiplier·storedᵀ·rows` or with this product added.

    Args:
        stored: `[n, V]`, or the columns of `part` only.
        rows: `[n, H]`.
        vocab_axis: of the weight.
        config: of the kernel.
        into: an array, float32 where something is added; or the shape and dtype of a new one.
        replaced: whether the product replaces old values; a Python bool, or `[]` if known at run time only.
        valid_rows: `[]` int32: rows from there on are left out; None: none.
        multiplier: `[]` float32; None: 1.
        part: the vocabulary entries; None: all.
    """
    rows = apart(rows)
    left, right = (stored, rows) if vocab_axis == 0 else (rows, stored)
    blocks = config.row_blocks(left.shape[1]), config.column_blocks(right.shape[1])
    numbers = {} if valid_rows is None else {"valid_length": valid_rows}
    limit = part.valid if part is not None else stored.shape[1]
    if valid_rows is not None and replaced is not True:  # nothing is added where no row is valid
        limit = jnp.where(replaced | (valid_rows > 0), limit, 0)
    if isinstance(limit, jax.Array):
        numbers["valid_rows" if vocab_axis == 0 else "valid_columns"] = limit
    if part is not None:
        numbers["to_row" if vocab_axis == 0 else "to_column"] = part.first
    if not isinstance(replaced, bool):
        numbers["first"] = replaced
    inputs = {} if multiplier is None else {"multiplier": multiplier.astype(jnp.float32).reshape(1)}
    product = Product(config, *blocks, stored.shape[0], left_axis=1, right_axis=1)
    return _run("pallas_ce_for_weight", product, left, right, into, numbers, inputs, adds=replaced is not True)


def _run(
    name: str,
    product: Product,
    left: jax.Array,
    right: jax.Array,
    into: jax.Array | jax.ShapeDtypeStruct,
    numbers: Numbers,
    inputs: dict[str, jax.Array] | None = None,
    *,
    adds: bool = False,
) -> jax.Array:
    """`into` after the kernel, `[rows, columns]` or `[parts, rows, columns]`; an array is changed in place."""
    epilogue = ProductEpilogue(jnp.dtype(into.dtype), into.shape[-1], len(into.shape) == 3, adds)

    start = functools.partial(launch.run, name, product, (left, right), epilogue, numbers=numbers)
    inputs = inputs or {}
    if isinstance(into, jax.ShapeDtypeStruct):
        return start(inputs, {"product": into})["product"]

    def write(ref: Any) -> None:
        start({**inputs, "product": ref}, {})

    return pl.run_state(write)(into)


@dataclasses.dataclass(frozen=True)
class ProductEpilogue(Epilogue):
    """Stores a tile of the product, or adds it to the old values.

    The number "first" marks the first launch, whose tiles are stored. The product begins at row "to_row" and column
    "to_column" of the output, multiples of `loop.STEP`.

    Attributes:
        dtype: the output's.
        columns: the length of the output's rows.
        by_part: whether "product" is `[parts, rows, columns]`; else `[rows, columns]`.
        adds: whether tiles are added, except in the first launch.
    """

    dtype: Any
    columns: int
    by_part: bool
    adds: bool

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for the stores."""
        return {"product_smem": layouts.tile_staging(config, self.columns, self.dtype)}

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Reads whether to add."""
        return refs["first"][0] == 0 if "first" in refs else None

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> None:
        """Stores the tile or adds it."""
        if "multiplier" in refs:
            values = values * refs["multiplier"][0]
        target = refs["product"].at[place.part] if self.by_part else refs["product"]
        row, column = place.row + loop.number(refs, "to_row"), place.column + loop.number(refs, "to_column")
        add = self.adds if carry is None else carry
        layouts.store_piece(refs["product_smem"], place.warpgroup, target, row, column, 0, values, add=add)
