"""The matrix product that all kernels share: left·right, tile by tile, handed to an epilogue while in registers.

A persistent thread block runs on each multiprocessor. It has two compute warpgroups, and one that only issues TMA
loads. Loads run ahead through a ring of `stages` slots in shared memory, also across the borders of tiles and windows,
so the next tile's operands arrive while an epilogue runs. The loads complete a slot's `full` barrier, the compute
warpgroups its `empty` barrier (those of both thread blocks, where a cluster shares a load). In ping-pong each warpgroup
has `full` barriers of its own, since one that does not wait for every completion of a barrier loses count of them.

The `Epilogue` decides what happens to a finished tile. It works on one warpgroup's `[rows, columns]` part, may carry
values from tile to tile of a window, and never sees the pipeline.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts, pipeline
from pallas_ce.backends.mosaic_gpu.gemm.launch import specialised
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Epilogue
from pallas_ce.backends.mosaic_gpu.gemm.walk import Walk
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Product

# Registers of a thread that loads, which needs few, and of one that computes. 2·128·240 + 128·24 ≤ 65536.
_REGISTERS = (24, 240)


def multiply(matrices: list[Any], refs: dict[str, Any], product: Product, epilogue: Epilogue) -> None:
    """The kernel that hands left·right to an epilogue; for `launch.run`.

    Numbers that it knows: "valid_rows" and "valid_columns" (blocks of the product behind them are skipped, and left
    undefined), "valid_length" (about so many numbers of each row are summed over), "first_column" (the right operand's
    that is the product's first) and "first_length" (the right operand's number that meets the left's first); the last
    two are multiples of `walk.STEP`.
    """
    left_gmem, right_gmem = matrices
    config = product.config
    left_tile = (config.tile_rows, config.depth) if product.left_axis == 0 else (config.depth, config.tile_rows)
    right_tile = (config.columns, config.depth) if product.right_axis == 0 else (config.depth, config.columns)
    barriers = functools.partial(plgpu.ClusterBarrier, collective_axes=("peer",)) if config.cluster else plgpu.Barrier
    # Both operands need the same swizzle.
    along = (config.rows if product.left_axis else config.depth, right_tile[1])
    dtype = left_gmem.dtype
    transforms = layouts.swizzled(dtype, left_gmem.shape[1], right_gmem.shape[1], *along)
    slots = functools.partial(plgpu.SMEM, dtype=dtype, transforms=transforms)
    readers = 1 if config.ping_pong else COMPUTE_WARPGROUPS
    ring = {
        "left_smem": slots((config.stages, *left_tile)),
        "right_smem": slots((config.stages, *right_tile)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages * COMPUTE_WARPGROUPS // readers),
        "empty": barriers(num_arrivals=readers, num_barriers=config.stages),
    }
    if config.lead:
        ring["ahead"] = plgpu.Barrier(num_arrivals=1)

    def scoped(ring: dict[str, Any], scratch: dict[str, Any]) -> None:
        warpgroup = lax.axis_index("warpgroup")
        walk = Walk(product, refs)
        specialised(
            warpgroup,
            _REGISTERS,
            lambda: pipeline.load(left_gmem, right_gmem, ring, walk),
            lambda: pipeline.Multiplier(ring, {**refs, **scratch}, walk, epilogue, warpgroup).run(),
        )

    pl.run_scoped(scoped, ring, epilogue.scratch(config), collective_axes="warpgroup")
