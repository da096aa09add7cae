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

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts, pipeline
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Epilogue
from pallas_ce.backends.mosaic_gpu.gemm.walk import Walk
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Launch

# Registers of a thread, set when the kernel starts: loads need few, accumulators many. 2·128·240 + 128·24 ≤ 65536.
_COMPUTE_REGISTERS = 240
_LOAD_REGISTERS = 24

# Given to kernels packed into one array, so that preparing them is one operation for XLA.
Numbers = dict[str, jax.Array]

_NUMBERS = "numbers"


def run(
    name: str,
    launch: Launch,
    left: jax.Array,
    right: jax.Array,
    epilogue: Epilogue,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    numbers: Numbers | None = None,
) -> dict[str, jax.Array]:
    """Runs one kernel; returns its outputs by name.

    Args:
        name: what profilers show.
        launch: sizes, tiles and schedule.
        left: matrix whose rows are the product's.
        right: matrix whose rows or columns are the product's columns.
        epilogue: what is done with the product.
        inputs: arrays that the epilogue reads, by name, and `jax.Ref`s that it changes.
        outputs: shapes and dtypes that it writes, by name.
        numbers: `[]` int32 by name, where a part of the work is to be done; the epilogue finds each as `[1]`. Kernels
            know "valid_rows" and "valid_columns" (blocks of the product behind them are skipped, and left undefined),
            "live_length" (about so many numbers of each row are summed over), "first_column" (the right operand's that
            is the product's first) and "first_length" (the right operand's number that meets the left's first); the
            last two are multiples of `walk.STEP`.
    """
    numbers = numbers or {}
    given = kernel_function(
        name,
        launch,
        epilogue,
        tuple(inputs),
        tuple(numbers),
        tuple((key, value.shape, jnp.dtype(value.dtype)) for key, value in outputs.items()),
    )
    with jax.named_scope(name):
        others = [x if isinstance(x, jax.Ref) else at_run_time(x) for x in inputs.values()]
        if numbers:
            others.append(at_run_time(jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers.values()])))
        results = given(left, right, *others)
    return dict(zip(outputs, results, strict=True))


def at_run_time(x: jax.Array) -> jax.Array:
    """`x`, never folded into a constant: those lie in the executable wherever they fit, and kernels need alignment."""
    return x + lax.optimization_barrier(jnp.zeros((), x.dtype))


@functools.lru_cache(maxsize=1024)
def kernel_function(
    name: str,
    launch: Launch,
    epilogue: Epilogue,
    input_names: tuple[str, ...],
    numbers: tuple[str, ...],
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...],
) -> Any:
    """The kernel as a jitted function `(left, right, *inputs, numbers) -> outputs`: one for each set of static facts.

    So a kernel that a program uses twice is traced, lowered and assembled once. One function must not serve several
    sets, either: JAX 0.11 confuses the grids of a kernel function that is used with several.
    """
    names = (*input_names, *[_NUMBERS][: len(numbers)], *(output for output, _, _ in outputs))

    def body(left_gmem: Any, right_gmem: Any, *others: Any) -> None:
        refs = dict(zip(names, others, strict=True))
        refs |= {number: refs[_NUMBERS].at[pl.ds(place, 1)] for place, number in enumerate(numbers)}
        _kernel(left_gmem, right_gmem, refs, launch, epilogue)

    peers = {"cluster": (launch.config.cluster_size,), "cluster_names": ("peer",)}
    return warpgroups(name, body, [x[1:] for x in outputs], launch.schedule.clusters, **peers)


def warpgroups(name: str, body: Any, outputs: list[Any], workers: int, **mesh: Any) -> Any:
    """`body(*inputs, *outputs)` as a jitted kernel of so many workers, each with a warpgroup that loads; named so.

    `outputs` holds their shapes and dtypes, `mesh` more of `plgpu.kernel`'s arguments.
    """
    body.__name__ = name
    kernel = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*output) for output in outputs),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **mesh,
    )

    def run(*arrays: Any) -> Any:
        return kernel(*arrays)

    run.__name__ = name
    return jax.jit(run)


def _kernel(left_gmem: Any, right_gmem: Any, refs: dict[str, Any], launch: Launch, epilogue: Epilogue) -> None:
    problem, config, _ = launch
    left_tile = (config.tile_rows, config.depth) if problem.left_axis == 0 else (config.depth, config.tile_rows)
    right_tile = (config.columns, config.depth) if problem.right_axis == 0 else (config.depth, config.columns)
    barriers = functools.partial(plgpu.ClusterBarrier, collective_axes=("peer",)) if config.cluster else plgpu.Barrier
    # Both operands need the same swizzle.
    along = (config.rows if problem.left_axis else config.depth, right_tile[1])
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
        walk = Walk(launch, refs)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            pipeline.load(left_gmem, right_gmem, ring, walk)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            pipeline.Multiplier(ring, {**refs, **scratch}, walk, epilogue, warpgroup).run()

    pl.run_scoped(scoped, ring, epilogue.scratch(config), collective_axes="warpgroup")
