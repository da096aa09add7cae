"""The matrix product that all kernels share: left·right, tile by tile, handed to an epilogue while in registers.

A persistent thread block runs on each multiprocessor. It has two compute warpgroups, and one that only issues TMA
loads. Loads run ahead through a ring of `stages` slots in shared memory, also across the borders of tiles and windows,
so the next tile's operands arrive while an epilogue runs. The loads complete a slot's `full` barrier, the compute
warpgroups its `empty` barrier (those of both thread blocks, where a cluster shares a load). In ping-pong each warpgroup
has `full` barriers of its own, since one that does not wait for every completion of a barrier loses count of them.

The `Epilogue` decides what happens to a finished tile. It works on one warpgroup's `[rows, columns]` part, may carry
values from tile to tile of a window, and never sees the pipeline.

The warpgroups either multiply the two halves of a tile together, or work in ping-pong: one is in its epilogue while the
other multiplies, so that the tensor cores never rest.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts, pace
from pallas_ce.backends.mosaic_gpu.gemm.walk import Item, Walk
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Config, Product

# Registers of a thread that loads, which needs few, and of one that computes. 2·128·240 + 128·24 ≤ 65536.
_REGISTERS = (24, 240)

Carry = Any

# The name of the number in memory by which thread blocks keep `pace`, 0 before the launch.
COUNTED = "counted"


class Place(NamedTuple):
    """Where a warpgroup's part of a tile lies.

    Attributes:
        warpgroup: 0 or 1.
        row: first row.
        slot: which of the partial results this one is.
        column: first column; that of the window where there is no tile.
    """

    warpgroup: jax.Array
    row: jax.Array
    slot: jax.Array
    column: jax.Array


class At(NamedTuple):
    """How far a thread block's work is.

    Attributes:
        slot: of the ring, the next to be filled or multiplied.
        turn: which warpgroup the next tile belongs to, where they work in ping-pong.
        counts: how often it has counted, where it keeps pace with others.
    """

    slot: jax.Array
    turn: jax.Array
    counts: jax.Array | None = None

    @staticmethod
    def start(*, paced: bool = False) -> "At":
        """Before the first tile."""
        return At(jnp.int32(0), jnp.int32(0), jnp.int32(0) if paced else None)


class Epilogue(abc.ABC):
    """What a kernel does with its product; `refs` holds inputs, outputs and scratch by name. Hashable."""

    @abc.abstractmethod
    def scratch(self, config: Config) -> dict[str, Any]:
        """Shared memory to allocate, by name."""

    @abc.abstractmethod
    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """The carry of a new window."""

    @abc.abstractmethod
    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Takes `product [rows, columns]` float32, in the layout of a wgmma accumulator."""

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Writes what the window leaves; waits until the last tile has left shared memory."""
        plgpu.wait_smem_to_gmem(0)


def multiply(matrices: list[Any], refs: dict[str, Any], product: Product, epilogue: Epilogue) -> None:
    """The kernel that hands left·right to an epilogue; for `launch.run`.

    Numbers that it knows: "valid_rows" and "valid_columns" (blocks of the product behind them are skipped, and left
    undefined), "valid_length" (about so many numbers of each row are summed over), "first_column" (the right operand's
    that is the product's first) and "first_length" (the right operand's number that meets the left's first); the last
    two are multiples of `walk.STEP`.

    A product with a rank has two more matrices, laid out like the operands: more steps of each tile.
    """
    left_gmem, right_gmem = matrices[:2]
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
            lambda: load(matrices, ring, walk, refs.get(COUNTED)),
            lambda: Multiplier(ring, {**refs, **scratch}, walk, epilogue, warpgroup).run(),
        )

    pl.run_scoped(scoped, ring, epilogue.scratch(config), collective_axes="warpgroup")


def specialised(
    warpgroup: jax.Array, registers: tuple[int, int], load: Callable[[], None], compute: Callable[[], None]
) -> None:
    """What the loading and the compute warpgroups do, with so many registers of each thread."""

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(registers[0], action="decrease")
        load()

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(registers[1], action="increase")
        compute()


def load(matrices: list[Any], ring: dict[str, Any], walk: Walk, counted: Any) -> None:
    """What the loading warpgroup does: fills slots as they become empty, for all tiles of this thread block in turn.

    Given where steps are `counted`, it keeps pace with the others while each of them has an item.
    """
    config, product = walk.config, walk.product
    left_peers = "peer" if config.cluster == "rows" else None
    right_peers = "peer" if config.cluster == "columns" else None

    def part(matrix: Any, axis: int, along: Any, depth: Any) -> Any:
        return matrix.at[along, depth] if axis == 0 else matrix.at[depth, along]

    def fill(row: jax.Array, column: jax.Array, k: jax.Array, at: At) -> At:
        def operands(left_gmem: Any, right_gmem: Any, k: jax.Array) -> tuple[Any, Any]:
            depth, right_depth = (pl.ds(first + k * config.depth, config.depth) for first in (0, walk.first_length))
            left = part(left_gmem, product.left_axis, pl.ds(row, config.tile_rows), depth)
            columns = pl.ds(walk.first_column + column, config.columns)
            return left, part(right_gmem, product.right_axis, columns, right_depth)

        def copy(left: Any, right: Any) -> None:
            full = ring["full"].at[walk.full(at.slot, at.turn)]
            plgpu.copy_gmem_to_smem(left, ring["left_smem"].at[at.slot], full, collective_axes=left_peers)
            plgpu.copy_gmem_to_smem(right, ring["right_smem"].at[at.slot], full, collective_axes=right_peers)

        own = operands(matrices[0], matrices[1], k)
        plgpu.barrier_wait(ring["empty"].at[at.slot])
        if product.rank:
            pl.when(k < product.own_steps)(lambda: copy(*own))
            of_term = operands(matrices[2], matrices[3], k - product.own_steps)
            pl.when(k >= product.own_steps)(lambda: copy(*of_term))
        else:
            copy(*own)
        return at._replace(slot=walk.next(at.slot))

    def keep_pace(index: jax.Array, k: jax.Array, at: At) -> At:
        if at.counts is None:
            return at
        due = (lax.rem(k, jnp.int32(pace.EVERY)) == 0) & (index < walk.full_rounds())
        counts = at.counts + due.astype(jnp.int32)
        blocks = walk.schedule.clusters * config.cluster_size
        pl.when(due)(lambda: pace.keep(counted, (counts - pace.AHEAD) * blocks))
        return at._replace(counts=counts)

    def load_item(index: jax.Array, at: At) -> At:
        item = walk.item(index)

        def tile(i: jax.Array, at: At) -> At:
            column = walk.column(item.block + i)

            def step(k: jax.Array, at: At) -> At:
                return fill(item.row, column, item.step + k, keep_pace(index, k, at))

            at = lax.fori_loop(0, item.steps, step, at)
            return at._replace(turn=1 - at.turn)

        return lax.fori_loop(0, item.tiles, tile, at)

    at = lax.fori_loop(0, walk.items, load_item, At.start(paced=counted is not None))

    # Leaving only when every slot is empty again keeps this block's memory alive for its peer's loads and arrivals.
    def drain(_: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(ring["empty"].at[slot])
        return walk.next(slot)

    lax.fori_loop(0, config.stages, drain, at.slot)


class Multiplier:
    """What a compute warpgroup does: multiplies its part of every tile, and hands it to the epilogue."""

    def __init__(
        self, ring: dict[str, Any], refs: dict[str, Any], walk: Walk, epilogue: Epilogue, warpgroup: jax.Array
    ) -> None:
        self.ring, self.refs, self.walk, self.epilogue, self.warpgroup = ring, refs, walk, epilogue, warpgroup
        self.config = walk.config
        self.first_row = 0 if self.config.ping_pong else warpgroup * self.config.rows
        self.rows = pl.ds(self.first_row, self.config.rows)

    def run(self) -> None:
        """All items of this thread block."""

        # All slots start empty; of warpgroups that work in ping-pong, one says so.
        @pl.when((self.warpgroup == 0) | (not self.config.ping_pong))
        def _() -> None:
            for slot in range(self.config.stages):
                self._give_back(slot)

        lax.fori_loop(0, self.walk.items, self._item, At.start())

    def _item(self, index: jax.Array, at: At) -> At:
        config, item = self.config, self.walk.item(index)
        # Each leaves a result of its own, but where items are tiles: a tile's only one is whoever's turn it is.
        own = config.ping_pong and not self.walk.schedule.split
        result = item.slot * COMPUTE_WARPGROUPS + self.warpgroup if own else item.slot
        place = Place(self.warpgroup, item.row + self.first_row, result, self.walk.column(item.block))
        carry = self.epilogue.start(self.refs, place)
        at, carry = self._tiles(item, place, at, carry)
        self.epilogue.finish(self.refs, place, carry)
        return at

    def _tiles(self, item: Item, place: Place, at: At, carry: Carry) -> tuple[At, Carry]:
        """This warpgroup's tiles of an item, each with its epilogue after it.

        Turns go on from item to item, so that the warpgroup that made an item's last tile is in its epilogue while the
        other makes the next item's first.
        """
        walk, every, first = self.walk, 1, jnp.int32(0)
        if self.config.ping_pong:
            every, first = COMPUTE_WARPGROUPS, jnp.bitwise_xor(at.turn, self.warpgroup)

        def tile(j: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            slot, carry = state
            value, slot = self._product(item.steps, slot)
            where = place._replace(column=walk.column(item.block + first + every * j))
            return walk.after(slot, (every - 1) * item.steps), self.epilogue.tile(self.refs, where, value, carry)

        own = lax.div(item.tiles + (every - 1) - first, jnp.int32(every))
        _, carry = lax.fori_loop(0, own, tile, (walk.after(at.slot, first * item.steps), carry))
        turn = jnp.bitwise_and(at.turn + item.tiles, COMPUTE_WARPGROUPS - 1)
        return At(walk.after(at.slot, item.tiles * item.steps), turn), carry

    def _product(self, steps: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One tile's product, and the slot after its last one."""
        walk = self.walk
        self._follow(steps)

        def one_by_one(accumulator: Any) -> tuple[jax.Array, jax.Array]:
            def step(k: jax.Array, slot: jax.Array) -> jax.Array:
                self._multiply(accumulator, slot)
                plgpu.wgmma_wait(0)
                self._give_back(slot)
                self._tell(k, steps)
                return walk.next(slot)

            after = lax.fori_loop(0, steps, step, slot)
            return accumulator[...], after

        def in_flight(accumulator: Any) -> tuple[jax.Array, jax.Array]:
            # A slot is given back when the product after its own has been issued; the last one only when the
            # accumulator has been read, which waits for all of them.
            def step(k: jax.Array, slots: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                previous, slot = slots
                self._multiply(accumulator, slot)
                plgpu.wgmma_wait(1)
                pl.when(k > 0)(lambda: self._give_back(previous))
                self._tell(k, steps)
                return slot, walk.next(slot)

            last, after = lax.fori_loop(0, steps, step, (slot, slot))
            value = accumulator[...]
            pl.when(steps > 0)(lambda: self._give_back(last))
            return value, after

        accumulator = plgpu.ACC((self.config.rows, self.config.columns), jnp.float32)
        return pl.run_scoped(in_flight if self.config.in_flight else one_by_one, accumulator)

    def _multiply(self, accumulator: Any, slot: jax.Array) -> None:
        """Issues the product of what a slot holds, once it is there."""
        plgpu.barrier_wait(self.ring["full"].at[self.walk.full(slot, self.warpgroup)])
        if self.walk.product.left_axis == 0:
            left = self.ring["left_smem"].at[slot, self.rows]
        else:
            left = self.ring["left_smem"].at[slot, :, self.rows].transpose((1, 0))
        right = self.ring["right_smem"].at[slot]
        plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if self.walk.product.right_axis == 0 else right)

    def _give_back(self, slot: jax.Array | int) -> None:
        plgpu.barrier_arrive(self.ring["empty"].at[slot])

    def _follow(self, steps: jax.Array) -> None:
        """The second warpgroup waits at the start of a tile until the first is `lead` steps into it."""
        if self.config.lead:

            @pl.when((self.warpgroup == 1) & (steps > 0))
            def _() -> None:
                plgpu.barrier_wait(self.ring["ahead"])

    def _tell(self, k: jax.Array, steps: jax.Array) -> None:
        """The first warpgroup tells that it has begun its step k."""
        if self.config.lead:

            @pl.when((self.warpgroup == 0) & (k == jnp.minimum(self.config.lead, steps) - 1))
            def _() -> None:
                plgpu.barrier_arrive(self.ring["ahead"])
