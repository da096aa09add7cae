"""Tiles of a matrix that lies in memory, one after the other at the rate of memory, handed to an epilogue.

This is the loop of `pipeline` without a product. One warpgroup only issues TMA loads and fills a ring of slots with
tiles. Two others hand the tiles to an `Epilogue`, as float32 in the layout of a wgmma accumulator, so an item of work,
a statistic and the gradient's formula mean the same as there. An epilogue may overwrite the matrix: each tile is read
once, before anything is written in its place.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Carry, Epilogue, Place, specialised
from pallas_ce.backends.mosaic_gpu.schedule.config import (
    COMPUTE_WARPGROUPS,
    RESERVED_BYTES,
    SHARED_MEMORY_BYTES,
    Config,
    Schedule,
)

# Registers of a thread that loads and of one that computes, as in `pipeline`.
_REGISTERS = (40, 232)

# Columns of a tile span so many bytes, for which a row of a wgmma accumulator has registers at 16 and at 32 bits.
_TILE_BYTES = 512
_TILE_ROWS = 64


def tiles(itemsize: int, staged_bytes: int = 0, piece: int | None = None) -> Config:
    """Tiles of numbers of `itemsize`, in as many stages as shared memory holds beside `staged_bytes`."""
    free = SHARED_MEMORY_BYTES - RESERVED_BYTES - staged_bytes
    stages = free // (COMPUTE_WARPGROUPS * _TILE_ROWS * _TILE_BYTES)
    return Config(rows=_TILE_ROWS, columns=_TILE_BYTES // itemsize, stages=stages, cluster=None, piece=piece)


class Facts(NamedTuple):
    """Static facts: tiles, no clusters, and how they are handed out."""

    config: Config
    schedule: Schedule

    @property
    def padded_rows(self) -> int:
        """Rows of the schedule's blocks: what vectors by row are padded to."""
        return self.schedule.row_blocks * self.config.block_rows


def stream(matrices: list[Any], refs: dict[str, Any], facts: Facts, epilogue: Epilogue) -> None:
    """The kernel that hands the tiles of a matrix to an epilogue; for `launch.run`.

    The matrix, a `jax.Ref` where the epilogue changes it, has rows and columns as TMA wants them (`operands`). The
    epilogue finds it as "matrix" among its `refs`.
    """
    (matrix,), (config, schedule) = matrices, facts
    refs = {"matrix": matrix, **refs}
    dtype, shape = matrix.dtype, (config.stages, config.tile_rows, config.columns)
    transforms = layouts.swizzled(dtype, matrix.shape[1], config.columns)
    ring = {
        "tiles": plgpu.SMEM(shape, dtype, transforms=transforms),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=config.stages),
    }
    worker = lax.axis_index("worker")
    items = lax.div(schedule.items + schedule.clusters - 1 - worker, schedule.clusters)

    def item(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """First row, window, first tile and number of tiles. What runs at one time lies side by side in a few rows."""
        linear = index * schedule.clusters + worker
        row_block, window = lax.div(linear, schedule.windows), lax.rem(linear, schedule.windows)
        first = lax.div(window * schedule.column_blocks, schedule.windows)
        last = lax.div((window + 1) * schedule.column_blocks, schedule.windows)
        return row_block * config.tile_rows, window, first, last - first

    def next_slot(slot: jax.Array) -> jax.Array:
        return jnp.where(slot == config.stages - 1, 0, slot + 1)

    def load(ring: dict[str, Any]) -> None:
        def one(index: jax.Array, slot: jax.Array) -> jax.Array:
            row, _, first, count = item(index)

            def tile(i: jax.Array, slot: jax.Array) -> jax.Array:
                columns = pl.ds((first + i) * config.columns, config.columns)
                plgpu.barrier_wait(ring["empty"].at[slot])
                plgpu.copy_gmem_to_smem(
                    matrix.at[pl.ds(row, config.tile_rows), columns],
                    ring["tiles"].at[slot],
                    ring["full"].at[slot],
                )
                return next_slot(slot)

            return lax.fori_loop(0, count, tile, slot)

        slot = lax.fori_loop(0, items, one, jnp.int32(0))

        # Leaves when every slot is empty again: no barrier has a phase that nobody waits for.
        def drain(_: jax.Array, slot: jax.Array) -> jax.Array:
            plgpu.barrier_wait(ring["empty"].at[slot])
            return next_slot(slot)

        lax.fori_loop(0, config.stages, drain, slot)

    def compute(ring: dict[str, Any], refs: dict[str, Any], warpgroup: jax.Array) -> None:
        for slot in range(config.stages):
            plgpu.barrier_arrive(ring["empty"].at[slot])

        def one(index: jax.Array, slot: jax.Array) -> jax.Array:
            row, window, first, count = item(index)
            place = Place(warpgroup, row + warpgroup * config.rows, window, first * config.columns)

            def tile(i: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
                slot, carry = state
                plgpu.barrier_wait(ring["full"].at[slot])
                rows = pl.ds(warpgroup * config.rows, config.rows)
                stored = plgpu.load(ring["tiles"].at[slot, rows], layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(ring["empty"].at[slot])
                where = place._replace(column=(first + i) * config.columns)
                return next_slot(slot), epilogue.tile(refs, where, stored.astype(jnp.float32), carry)

            slot, carry = lax.fori_loop(0, count, tile, (slot, epilogue.start(refs, place)))
            epilogue.finish(refs, place, carry)
            return slot

        lax.fori_loop(0, items, one, jnp.int32(0))

    def scoped(ring: dict[str, Any], scratch: dict[str, Any]) -> None:
        warpgroup = lax.axis_index("warpgroup")
        specialised(warpgroup, _REGISTERS, lambda: load(ring), lambda: compute(ring, {**refs, **scratch}, warpgroup))

    pl.run_scoped(scoped, ring, epilogue.scratch(config), collective_axes="warpgroup")
