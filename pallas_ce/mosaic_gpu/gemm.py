"""The matrix product that all kernels share: hidden·weightᵀ, tile by tile, handed to an epilogue while in registers.

One persistent thread block a processor: two compute warpgroups, and one that only issues TMA loads. Loads run ahead
through a ring of `stages` slots in shared memory, across the borders of tiles and windows: the next tile's operands
arrive while an epilogue runs. A slot's `filled` barrier is completed by the loads, its `free` barrier by the compute
warpgroups (of both thread blocks, where a cluster shares a load).

What happens to a finished tile of logits is up to the `Epilogue`. It works on one warpgroup's `[rows, columns]` part,
may carry values from tile to tile of a window, and never sees the pipeline.
"""

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.mosaic_gpu import layouts
from pallas_ce.mosaic_gpu.config import COMPUTE_WARPGROUPS, Config, Problem, Schedule
from pallas_ce.mosaic_gpu.operands import Operands

# Registers of a thread, set when the kernel starts: loads need few, accumulators many. 2·128·232 + 128·40 ≤ 65536.
_COMPUTE_REGISTERS = 232
_LOAD_REGISTERS = 40

Carry = Any


class Place(NamedTuple):
    """Where a warpgroup's part of a tile lies.

    Attributes:
        warpgroup: 0 or 1.
        row: first row.
        slot: which of the partial results this one is, below `Operands.slots`.
        column: first vocabulary entry; that of the window where there is no tile.
    """

    warpgroup: jax.Array
    row: jax.Array
    slot: jax.Array
    column: jax.Array


class Epilogue(Hashable, Protocol):
    """What a kernel does with logits. `refs` holds its inputs, outputs and scratch by name. Equal ones do the same."""

    def scratch(self, config: Config) -> dict[str, Any]:
        """Shared memory to allocate, by name."""

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """The carry of a new window."""

    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Takes `product [rows, columns]` float32, in the layout of a wgmma accumulator."""

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Writes what the window leaves."""


def run(
    name: str, operands: Operands, epilogue: Epilogue, inputs: dict[str, jax.Array], outputs: dict[str, Any]
) -> dict[str, jax.Array]:
    """Runs one kernel; returns its outputs by name.

    Args:
        name: what profilers show.
        operands: matrices, sizes and schedule.
        epilogue: what is done with the logits.
        inputs: arrays that the epilogue reads, by name, and `jax.Ref`s that it changes; `rows_limit` if given.
        outputs: shapes and dtypes that it writes, by name.
    """
    program = _program(
        name,
        operands.problem,
        operands.config,
        operands.schedule,
        epilogue,
        tuple(inputs),
        tuple((key, value.shape, jnp.dtype(value.dtype)) for key, value in outputs.items()),
    )
    with jax.named_scope(name):
        given = (x if isinstance(x, jax.Ref) else _at_run_time(x) for x in inputs.values())
        results = program(operands.hidden, operands.weight, *given)
    return dict(zip(outputs, results, strict=True))


def _at_run_time(x: jax.Array) -> jax.Array:
    """`x`, never folded into a constant: those lie in the executable wherever they fit, and kernels need alignment."""
    return x + lax.optimization_barrier(jnp.zeros((), x.dtype))


@functools.lru_cache(maxsize=1024)
def _program(
    name: str,
    problem: Problem,
    config: Config,
    schedule: Schedule,
    epilogue: Epilogue,
    input_names: tuple[str, ...],
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...],
) -> Any:
    """The kernel as a jitted function: one for each set of static facts.

    So a kernel that a program uses twice is traced, lowered and assembled once. One function must not serve several
    sets, either: JAX 0.11 confuses the grids of a kernel function that is used with several.
    """
    names = input_names + tuple(output for output, _, _ in outputs)

    def body(hidden_gmem: Any, weight_gmem: Any, *others: Any) -> None:
        _kernel(hidden_gmem, weight_gmem, dict(zip(names, others, strict=True)), problem, config, schedule, epilogue)

    body.__name__ = name
    kernel = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs),
        grid=(schedule.clusters,),
        grid_names=("worker",),
        cluster=(config.cluster_size,),
        cluster_names=("peer",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )

    def run(*arrays: Any) -> Any:
        return kernel(*arrays)

    run.__name__ = name
    return jax.jit(run)


def rows_limit(live_rows: jax.Array) -> dict[str, jax.Array]:
    """An input that makes a kernel skip the row blocks from row `live_rows []` on, whose outputs are left undefined."""
    return {"live_rows": live_rows.astype(jnp.int32).reshape(1)}


def _kernel(
    hidden_gmem: Any,
    weight_gmem: Any,
    refs: dict[str, Any],
    problem: Problem,
    config: Config,
    schedule: Schedule,
    epilogue: Epilogue,
) -> None:
    weight_tile = (config.columns, config.depth) if problem.vocab_axis == 0 else (config.depth, config.columns)
    barriers = functools.partial(plgpu.ClusterBarrier, collective_axes=("peer",)) if config.cluster else plgpu.Barrier
    # Both operands need the same swizzle.
    lengths = (hidden_gmem.shape[1], weight_gmem.shape[1], config.depth, config.columns)
    dtype = hidden_gmem.dtype
    slots = functools.partial(plgpu.SMEM, dtype=dtype, transforms=layouts.swizzled(dtype, *lengths))
    ring = {
        "hidden_smem": slots((config.stages, config.tile_rows, config.depth)),
        "weight_smem": slots((config.stages, *weight_tile)),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "free": barriers(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=config.stages),
    }
    if config.lead:
        ring["ahead"] = plgpu.Barrier(num_arrivals=1)

    def scoped(ring: dict[str, Any], scratch: dict[str, Any]) -> None:
        warpgroup = lax.axis_index("warpgroup")
        walk = _Walk(problem, config, schedule, refs.get("live_rows"))

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            _load(hidden_gmem, weight_gmem, ring, walk)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute(ring, {**refs, **scratch}, walk, epilogue, warpgroup)

    pl.run_scoped(scoped, ring, epilogue.scratch(config), collective_axes="warpgroup")


class _Walk:
    """The order of work, the same for all warpgroups: items of this cluster, tiles of an item, steps of a tile."""

    def __init__(self, problem: Problem, config: Config, schedule: Schedule, live_rows: Any | None) -> None:
        self.problem, self.config, self.schedule = problem, config, schedule
        self.steps = -(-problem.hidden_size // config.depth)
        self.worker, self.peer = lax.axis_index("worker"), lax.axis_index("peer")
        self.row_blocks = jnp.int32(schedule.row_blocks)
        if live_rows is not None:
            self.row_blocks = lax.div(live_rows[0] + (config.block_rows - 1), config.block_rows)
        self.items = lax.div(
            self.row_blocks * schedule.windows + schedule.clusters - 1 - self.worker, schedule.clusters
        )

    def item(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """This thread block's first row, window, first column block, and number of column blocks of its item `index`.

        Items are ordered by groups of row blocks, in a group by window, in a window by row block: what runs at one time
        shares a few row blocks, which stay in the L2 cache, and walks through few windows side by side.
        """
        schedule, config = self.schedule, self.config
        group_rows = min(config.row_group, schedule.row_blocks)
        group_items = group_rows * schedule.windows
        linear = index * schedule.clusters + self.worker
        group, rest = lax.div(linear, group_items), lax.rem(linear, group_items)
        width = jnp.minimum(group_rows, self.row_blocks - group * group_rows)
        window = lax.div(rest, width)
        row_block = group * group_rows + lax.rem(rest, width)
        first = lax.div(window * schedule.column_blocks, schedule.windows)
        last = lax.div((window + 1) * schedule.column_blocks, schedule.windows)
        row = row_block * config.block_rows
        if config.cluster == "columns":
            row = row + self.peer * config.tile_rows
        return row, window, first, last - first

    def column(self, block: jax.Array) -> jax.Array:
        """This thread block's first vocabulary entry in column block `block`."""
        column = block * self.config.block_columns
        return column + self.peer * self.config.columns if self.config.cluster == "rows" else column

    def slot(self, window: jax.Array) -> jax.Array:
        """The partial result that this thread block makes of `window`."""
        return window * 2 + self.peer if self.config.cluster == "rows" else window

    def next(self, slot: jax.Array) -> jax.Array:
        """The ring's next slot."""
        return jnp.where(slot == self.config.stages - 1, 0, slot + 1)


def _load(hidden_gmem: Any, weight_gmem: Any, ring: dict[str, Any], walk: _Walk) -> None:
    config = walk.config
    shared_hidden = "peer" if config.cluster == "rows" else None
    shared_weight = "peer" if config.cluster == "columns" else None

    def step(row: jax.Array, column: jax.Array, k: jax.Array, slot: jax.Array) -> jax.Array:
        depth = pl.ds(k * config.depth, config.depth)
        columns = pl.ds(column, config.columns)
        weight = weight_gmem.at[columns, depth] if walk.problem.vocab_axis == 0 else weight_gmem.at[depth, columns]
        plgpu.barrier_wait(ring["free"].at[slot])
        plgpu.copy_gmem_to_smem(
            hidden_gmem.at[pl.ds(row, config.tile_rows), depth],
            ring["hidden_smem"].at[slot],
            ring["filled"].at[slot],
            collective_axes=shared_hidden,
        )
        plgpu.copy_gmem_to_smem(
            weight, ring["weight_smem"].at[slot], ring["filled"].at[slot], collective_axes=shared_weight
        )
        return walk.next(slot)

    def item(index: jax.Array, slot: jax.Array) -> jax.Array:
        row, _, first, count = walk.item(index)

        def tile(i: jax.Array, slot: jax.Array) -> jax.Array:
            column = walk.column(first + i)
            return lax.fori_loop(0, walk.steps, lambda k, slot: step(row, column, k, slot), slot)

        return lax.fori_loop(0, count, tile, slot)

    slot = lax.fori_loop(0, walk.items, item, jnp.int32(0))

    # Leaving only when every slot is free again keeps this block's memory alive for its peer's loads and arrivals.
    def drain(_: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(ring["free"].at[slot])
        return walk.next(slot)

    lax.fori_loop(0, config.stages, drain, slot)


def _compute(ring: dict[str, Any], refs: dict[str, Any], walk: _Walk, epilogue: Epilogue, warpgroup: jax.Array) -> None:
    config = walk.config
    rows = pl.ds(warpgroup * config.rows, config.rows)

    # All slots start free.
    for slot in range(config.stages):
        plgpu.barrier_arrive(ring["free"].at[slot])

    lead = min(config.lead, walk.steps)

    def follow() -> None:
        """The second warpgroup waits at the start of a tile until the first is `lead` steps into it."""
        if lead:

            @pl.when(warpgroup == 1)
            def _() -> None:
                plgpu.barrier_wait(ring["ahead"])

    def tell(k: jax.Array) -> None:
        """The first warpgroup tells that its step k is done."""
        if lead:

            @pl.when((warpgroup == 0) & (k == lead - 1))
            def _() -> None:
                plgpu.barrier_arrive(ring["ahead"])

    def product(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One tile's product, and the slot after its last one."""
        follow()

        def scoped(accumulator: Any) -> tuple[jax.Array, jax.Array]:
            def multiply(slot: jax.Array) -> None:
                plgpu.barrier_wait(ring["filled"].at[slot])
                weight = ring["weight_smem"].at[slot]
                plgpu.wgmma(
                    accumulator,
                    ring["hidden_smem"].at[slot, rows],
                    weight.transpose((1, 0)) if walk.problem.vocab_axis == 0 else weight,
                )

            if config.in_flight == 0:

                def step(k: jax.Array, slot: jax.Array) -> jax.Array:
                    multiply(slot)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(ring["free"].at[slot])
                    tell(k)
                    return walk.next(slot)

                after = lax.fori_loop(0, walk.steps, step, slot)
                return accumulator[...], after

            # With one product in flight, a slot is given back when the product after its own has been issued; the last
            # one only when the accumulator has been read, which waits for all of them.
            def step_behind(k: jax.Array, previous: jax.Array) -> jax.Array:
                slot = walk.next(previous)
                multiply(slot)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(ring["free"].at[previous])
                tell(k)
                return slot

            multiply(slot)
            tell(jnp.int32(0))
            last = lax.fori_loop(1, walk.steps, step_behind, slot)
            value = accumulator[...]
            plgpu.barrier_arrive(ring["free"].at[last])
            return value, walk.next(last)

        return pl.run_scoped(scoped, plgpu.ACC((config.rows, config.columns), jnp.float32))

    def item(index: jax.Array, slot: jax.Array) -> jax.Array:
        row, window, first, count = walk.item(index)
        place = Place(warpgroup, row + warpgroup * config.rows, walk.slot(window), walk.column(first))

        def tile(i: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            slot, carry = state
            value, slot = product(slot)
            where = place._replace(column=walk.column(first + i))
            return slot, epilogue.tile(refs, where, value, carry)

        slot, carry = lax.fori_loop(0, count, tile, (slot, epilogue.start(refs, place)))
        epilogue.finish(refs, place, carry)
        return slot

    lax.fori_loop(0, walk.items, item, jnp.int32(0))
