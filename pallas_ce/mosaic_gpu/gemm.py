"""The matrix product that all kernels share: left·right, tile by tile, handed to an epilogue while in registers.

One persistent thread block a processor: two compute warpgroups, and one that only issues TMA loads. Loads run ahead
through a ring of `stages` slots in shared memory, across the borders of tiles and windows: the next tile's operands
arrive while an epilogue runs. A slot's `filled` barrier is completed by the loads, its `free` barrier by the compute
warpgroups (of both thread blocks, where a cluster shares a load).

What happens to a finished tile is up to the `Epilogue`. It works on one warpgroup's `[rows, columns]` part,
may carry values from tile to tile of a window, and never sees the pipeline.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.mosaic_gpu import layouts
from pallas_ce.mosaic_gpu.config import COMPUTE_WARPGROUPS, Config, Launch
from pallas_ce.mosaic_gpu.walk import Walk

# Registers of a thread, set when the kernel starts: loads need few, accumulators many. 2·128·232 + 128·40 ≤ 65536.
_COMPUTE_REGISTERS = 232
_LOAD_REGISTERS = 40

Carry = Any

# Given to kernels packed into one array, so that preparing them is one operation for XLA.
Numbers = dict[str, jax.Array]

_NUMBERS = "numbers"


class Place(NamedTuple):
    """Where a warpgroup's part of a tile lies.

    Attributes:
        warpgroup: 0 or 1.
        row: first row.
        slot: which of the partial results this one is.
        column: first column; that of the window where there is no tile.
        full: whether the tile is known not to be the window's last, so that all of its columns are the operands'.
    """

    warpgroup: jax.Array
    row: jax.Array
    slot: jax.Array
    column: jax.Array
    full: bool = False


class Epilogue(Hashable, Protocol):
    """What a kernel does with its product; `refs` holds inputs, outputs and scratch by name. Equal ones do the same."""

    def scratch(self, config: Config) -> dict[str, Any]:
        """Shared memory to allocate, by name."""

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """The carry of a new window."""

    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Takes `product [rows, columns]` float32, in the layout of a wgmma accumulator."""

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Writes what the window leaves."""


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
            know "live_rows" and "live_columns" (blocks of the product behind them are skipped, and left undefined),
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
    ring = {
        "left_smem": slots((config.stages, *left_tile)),
        "right_smem": slots((config.stages, *right_tile)),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "free": barriers(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=config.stages),
    }
    if config.lead:
        ring["ahead"] = plgpu.Barrier(num_arrivals=1)

    def scoped(ring: dict[str, Any], scratch: dict[str, Any]) -> None:
        warpgroup = lax.axis_index("warpgroup")
        walk = Walk(launch, refs)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            _load(left_gmem, right_gmem, ring, walk)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute(ring, {**refs, **scratch}, walk, epilogue, warpgroup)

    pl.run_scoped(scoped, ring, epilogue.scratch(config), collective_axes="warpgroup")


def _load(left_gmem: Any, right_gmem: Any, ring: dict[str, Any], walk: Walk) -> None:
    config, problem = walk.config, walk.problem
    left_peers = "peer" if config.cluster == "rows" else None
    right_peers = "peer" if config.cluster == "columns" else None

    def part(matrix: Any, axis: int, along: Any, depth: Any) -> Any:
        return matrix.at[along, depth] if axis == 0 else matrix.at[depth, along]

    def load(row: jax.Array, column: jax.Array, k: jax.Array, slot: jax.Array) -> jax.Array:
        depth, right_depth = (pl.ds(first + k * config.depth, config.depth) for first in (0, walk.first_length))
        left = part(left_gmem, problem.left_axis, pl.ds(row, config.tile_rows), depth)
        columns = pl.ds(walk.first_column + column, config.columns)
        right = part(right_gmem, problem.right_axis, columns, right_depth)
        plgpu.barrier_wait(ring["free"].at[slot])
        filled = ring["filled"].at[slot]
        plgpu.copy_gmem_to_smem(left, ring["left_smem"].at[slot], filled, collective_axes=left_peers)
        plgpu.copy_gmem_to_smem(right, ring["right_smem"].at[slot], filled, collective_axes=right_peers)
        return walk.next(slot)

    def load_item(index: jax.Array, slot: jax.Array) -> jax.Array:
        item = walk.item(index)

        def tile(i: jax.Array, slot: jax.Array) -> jax.Array:
            column = walk.column(item.block + i)
            return lax.fori_loop(0, item.steps, lambda k, slot: load(item.row, column, item.step + k, slot), slot)

        return lax.fori_loop(0, item.tiles, tile, slot)

    slot = lax.fori_loop(0, walk.items, load_item, jnp.int32(0))

    # Leaving only when every slot is free again keeps this block's memory alive for its peer's loads and arrivals.
    def drain(_: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(ring["free"].at[slot])
        return walk.next(slot)

    lax.fori_loop(0, config.stages, drain, slot)


def _compute(ring: dict[str, Any], refs: dict[str, Any], walk: Walk, epilogue: Epilogue, warpgroup: jax.Array) -> None:
    config, problem = walk.config, walk.problem
    rows = pl.ds(warpgroup * config.rows, config.rows)

    # All slots start free.
    for slot in range(config.stages):
        plgpu.barrier_arrive(ring["free"].at[slot])

    def follow(steps: jax.Array) -> None:
        """The second warpgroup waits at the start of a tile until the first is `lead` steps into it."""
        if config.lead:

            @pl.when((warpgroup == 1) & (steps > 0))
            def _() -> None:
                plgpu.barrier_wait(ring["ahead"])

    def tell(k: jax.Array, steps: jax.Array) -> None:
        """The first warpgroup tells that it has begun its step k."""
        if config.lead:

            @pl.when((warpgroup == 0) & (k == jnp.minimum(config.lead, steps) - 1))
            def _() -> None:
                plgpu.barrier_arrive(ring["ahead"])

    def product(
        steps: jax.Array, slot: jax.Array, beside: Sequence[Callable[[Carry], Carry]], carry: Carry
    ) -> tuple[jax.Array, jax.Array, Carry]:
        """One tile's product, the slot after its last one, and what the functions `beside` make of `carry`.

        Each of these works while one of the first steps is multiplied.
        """
        follow(steps)

        def scoped(accumulator: Any) -> tuple[jax.Array, jax.Array, Carry]:
            def multiply(slot: jax.Array) -> None:
                plgpu.barrier_wait(ring["filled"].at[slot])
                if problem.left_axis == 0:
                    left = ring["left_smem"].at[slot, rows]
                else:
                    left = ring["left_smem"].at[slot, :, rows].transpose((1, 0))
                right = ring["right_smem"].at[slot]
                plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if problem.right_axis == 0 else right)

            def give_back(slot: jax.Array) -> None:
                plgpu.barrier_arrive(ring["free"].at[slot])

            if config.in_flight == 0:

                def step(k: jax.Array, slot: jax.Array) -> jax.Array:
                    multiply(slot)
                    plgpu.wgmma_wait(0)
                    give_back(slot)
                    tell(k, steps)
                    return walk.next(slot)

                after = lax.fori_loop(0, steps, step, slot)
                return accumulator[...], after, carry

            # `overlap` steps are under way while a piece works; the oldest is waited for when one more has been issued.
            under_way: list[jax.Array] = []
            after, made = slot, carry

            def issue(slot: jax.Array) -> jax.Array:
                multiply(slot)
                under_way.append(slot)
                return walk.next(slot)

            def wait(left: int) -> None:
                plgpu.wgmma_wait(left)
                give_back(under_way.pop(0))

            for _ in range(config.overlap if beside else 0):
                after = issue(after)
            for work in beside:
                made = work(made)
                after = issue(after)
                wait(config.overlap)
            for left in reversed(range(1, len(under_way))):
                wait(left)

            # With one product in flight, a slot is given back when the product after its own has been issued; the last
            # one only when the accumulator has been read, which waits for all of them.
            def step_behind(k: jax.Array, slots: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                previous, slot = slots
                multiply(slot)
                plgpu.wgmma_wait(1)
                pl.when(k > 0)(lambda: give_back(previous))
                tell(k, steps)
                return slot, walk.next(slot)

            done = config.overlap + len(beside) if beside else 0
            last, after = lax.fori_loop(done, steps, step_behind, (under_way[0] if beside else slot, after))
            value = accumulator[...]
            pl.when(steps > 0)(lambda: give_back(last))
            return value, after, made

        return pl.run_scoped(scoped, plgpu.ACC((config.rows, config.columns), jnp.float32))

    def compute_item(index: jax.Array, slot: jax.Array) -> jax.Array:
        item = walk.item(index)
        place = Place(warpgroup, item.row + warpgroup * config.rows, item.slot, walk.column(item.block))

        def tile(i: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            slot, carry = state
            value, slot, _ = product(item.steps, slot, (), None)
            return slot, epilogue.tile(refs, place._replace(column=walk.column(item.block + i)), value, carry)

        def pieces(i: jax.Array, value: jax.Array, *, full: bool) -> list[Callable[[Carry], Carry]]:
            """The epilogue of tile i, cut into tiles of fewer columns."""

            def piece(first: int, carry: Carry) -> Carry:
                where = place._replace(column=walk.column(item.block + i) + first, full=full)
                return epilogue.tile(refs, where, value[:, first : first + config.width], carry)

            return [functools.partial(piece, first) for first in range(0, config.columns, config.width)]

        def tile_behind(i: jax.Array, state: tuple[jax.Array, Carry, jax.Array]) -> tuple[jax.Array, Carry, jax.Array]:
            slot, carry, previous = state
            value, slot, new = product(item.steps, slot, pieces(i - 1, previous, full=True), carry)
            # Before the first tile there is none.
            kept = jax.tree.map(lambda x, y: lax.select(lax.broadcast(i > 0, x.shape), x, y), new, carry)
            return slot, kept, value

        carry = epilogue.start(refs, place)
        if config.overlap and -(-problem.length // config.depth) >= config.overlap + config.columns // config.width:
            nothing = layouts.constant((config.rows, config.columns), 0.0)
            slot, carry, value = lax.fori_loop(0, item.tiles, tile_behind, (slot, carry, nothing))
            for work in pieces(item.tiles - 1, value, full=False):
                carry = work(carry)
        else:
            slot, carry = lax.fori_loop(0, item.tiles, tile, (slot, carry))
        epilogue.finish(refs, place, carry)
        return slot

    lax.fori_loop(0, walk.items, compute_item, jnp.int32(0))
