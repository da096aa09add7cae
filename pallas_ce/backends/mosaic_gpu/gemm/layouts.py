"""Where values live: a tile in registers, vectors beside it, and matrices on their way through shared memory.

A tile is `[rows, columns]` float32 in the layout of a wgmma accumulator: a row lies in four neighbouring threads, so
sums along it are mostly thread-local, and a vector by row costs one register for each 32 rows.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, BLOCK_BYTES, WARPGROUPS, Config

# Of a wgmma accumulator: of each row a thread has two neighbouring numbers.
_LEAST_COLUMNS = 8

_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def column_ids(shape: tuple[int, ...]) -> jax.Array:
    """`shape` int32: each entry's column within the tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def along_columns(by_row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A vector by row, the same in every column."""
    return jax.lax.broadcast_in_dim(by_row, shape, [0])


def rows_of(ref: Any, row: jax.Array, rows: int) -> jax.Array:
    """`rows` numbers of a vector by row in global memory."""
    return plgpu.load(ref.at[pl.ds(row, rows)], layout=_BY_ROW, optimized=False)


def columns_of(ref: Any, column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of a vector by column in global memory, the same in every row of `shape`."""
    by_column = plgpu.load(ref.at[pl.ds(column, shape[1])], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return jax.lax.broadcast_in_dim(by_column, shape, [1])


def sum_of_rows(x: jax.Array) -> jax.Array:
    """The sum of each row, in an order that does not depend on how many rows there are, as Mosaic's would."""
    pieces = (x[:, first : first + _LEAST_COLUMNS] for first in range(0, x.shape[1], _LEAST_COLUMNS))
    return functools.reduce(jnp.add, pieces).sum(axis=1)


def constant_by_row(rows: int, value: jax.Array | float, dtype: Any = jnp.float32) -> jax.Array:
    """A vector by row with one value."""
    return plgpu.layout_cast(jnp.full((rows,), value, dtype), _BY_ROW)


def swizzled(dtype: Any, *lengths: int) -> tuple[Any, ...]:
    """The shared-memory layout that TMA and wgmma need for matrices whose rows have `lengths` elements.

    The swizzle spans 128 bytes where all rows are multiples of 128 bytes, else 64 or 32.
    """
    itemsize = jnp.dtype(dtype).itemsize
    span = next(s for s in (128, 64, 32) if all(length * itemsize % s == 0 for length in lengths))
    tiling = plgpu.TilingTransform((8, span // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(span)  # type: ignore[abstract]


def tile_staging(config: Config, columns: int, dtype: Any) -> Any:
    """Shared memory from which `store_block` stores to an array with `columns` columns.

    Rows exactly as long as a block's are stored in halves: along an axis of a single block TMA ignores the block's
    number, and would write a tile's second block over its first.
    """
    wide = BLOCK_BYTES // jnp.dtype(dtype).itemsize
    transforms = swizzled(dtype, columns // 2 if columns == wide else columns)
    return plgpu.SMEM((WARPGROUPS, config.staged, BLOCK, wide), dtype, transforms=transforms)


def store_block(staging: Any, index: int, place: Any, x: jax.Array, add: jax.Array | bool = False) -> None:
    """Starts storing a tile's block `index` through a warpgroup's `staging`; blocks come in order, none left out.

    It is added to the array's values where `add`, a Python bool or `[]` bool, is true.
    """
    slots = staging.shape[0]
    if index == 0:  # the tile before this one was stored long ago
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    elif index >= slots:  # the store that used this slot must have read it
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    block = staging.at[index % slots]
    block[...] = x
    plgpu.commit_smem()
    store = functools.partial(plgpu.copy_smem_to_gmem, block, place)
    if isinstance(add, bool):
        store(reduction_op="add" if add else None)
    else:
        pl.when(add)(lambda: store(reduction_op="add"))
        pl.when(~add)(store)
