"""What the warpgroups of a kernel do: one loads ahead through a ring in shared memory, two multiply what it loads.

A ring is a dictionary of slots and barriers, made in `gemm`. The product of a tile goes to the kernel's `Epilogue`
while in registers: when it is finished, or in pieces beside the first steps of the next tile (`Config.overlap`).
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
from pallas_ce.mosaic_gpu.config import COMPUTE_WARPGROUPS, Config
from pallas_ce.mosaic_gpu.walk import Item, Walk

Carry = Any


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


def load(left_gmem: Any, right_gmem: Any, ring: dict[str, Any], walk: Walk) -> None:
    """What the loading warpgroup does: fills slots as they become free, for all tiles of this thread block in turn."""
    config, problem = walk.config, walk.problem
    left_peers = "peer" if config.cluster == "rows" else None
    right_peers = "peer" if config.cluster == "columns" else None

    def part(matrix: Any, axis: int, along: Any, depth: Any) -> Any:
        return matrix.at[along, depth] if axis == 0 else matrix.at[depth, along]

    def fill(row: jax.Array, i: jax.Array, column: jax.Array, k: jax.Array, slot: jax.Array) -> jax.Array:
        depth, right_depth = (pl.ds(first + k * config.depth, config.depth) for first in (0, walk.first_length))
        left = part(left_gmem, problem.left_axis, pl.ds(row, config.tile_rows), depth)
        columns = pl.ds(walk.first_column + column, config.columns)
        right = part(right_gmem, problem.right_axis, columns, right_depth)
        plgpu.barrier_wait(ring["free"].at[slot])
        filled = ring["filled"].at[walk.filled(slot, i)]
        plgpu.copy_gmem_to_smem(left, ring["left_smem"].at[slot], filled, collective_axes=left_peers)
        plgpu.copy_gmem_to_smem(right, ring["right_smem"].at[slot], filled, collective_axes=right_peers)
        return walk.next(slot)

    def load_item(index: jax.Array, slot: jax.Array) -> jax.Array:
        item = walk.item(index)

        def tile(i: jax.Array, slot: jax.Array) -> jax.Array:
            column = walk.column(item.block + i)
            return lax.fori_loop(0, item.steps, lambda k, slot: fill(item.row, i, column, item.step + k, slot), slot)

        return lax.fori_loop(0, item.tiles, tile, slot)

    slot = lax.fori_loop(0, walk.items, load_item, jnp.int32(0))

    # Leaving only when every slot is free again keeps this block's memory alive for its peer's loads and arrivals.
    def drain(_: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(ring["free"].at[slot])
        return walk.next(slot)

    lax.fori_loop(0, config.stages, drain, slot)


class Multiplier:
    """What a compute warpgroup does: multiplies its part of every tile, and hands it to the epilogue."""

    def __init__(
        self, ring: dict[str, Any], refs: dict[str, Any], walk: Walk, epilogue: Epilogue, warpgroup: jax.Array
    ) -> None:
        self.ring, self.refs, self.walk, self.epilogue, self.warpgroup = ring, refs, walk, epilogue, warpgroup
        self.config, self.problem = walk.config, walk.problem
        self.first_row = 0 if self.config.turns else warpgroup * self.config.rows
        self.rows = pl.ds(self.first_row, self.config.rows)

    def run(self) -> None:
        """All items of this thread block."""

        # All slots start free; of warpgroups that take turns, one says so.
        @pl.when((self.warpgroup == 0) | (not self.config.turns))
        def _() -> None:
            for slot in range(self.config.stages):
                self._give_back(slot)

        lax.fori_loop(0, self.walk.items, self._item, jnp.int32(0))

    def _item(self, index: jax.Array, slot: jax.Array) -> jax.Array:
        config, item = self.config, self.walk.item(index)
        slot_of_result = item.slot * COMPUTE_WARPGROUPS + self.warpgroup if config.turns else item.slot
        place = Place(self.warpgroup, item.row + self.first_row, slot_of_result, self.walk.column(item.block))
        carry = self.epilogue.start(self.refs, place)
        pieces, steps = config.columns // config.width, -(-self.problem.length // config.depth)
        tiles = self._tiles_in_turns if config.turns else self._tiles
        if config.overlap and steps >= config.overlap + pieces:
            tiles = self._tiles_overlapping
        slot, carry = tiles(item, place, slot, carry)
        self.epilogue.finish(self.refs, place, carry)
        return slot

    def _tiles(self, item: Item, place: Place, slot: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        """All tiles of an item, each with its epilogue after it."""

        def tile(i: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            slot, carry = state
            value, slot, _ = self._product(item.steps, slot, (), None)
            where = place._replace(column=self.walk.column(item.block + i))
            return slot, self.epilogue.tile(self.refs, where, value, carry)

        return lax.fori_loop(0, item.tiles, tile, (slot, carry))

    def _tiles_in_turns(self, item: Item, place: Place, slot: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        """Every second tile of an item, the first for the first warpgroup, each with its epilogue after it."""
        config, walk = self.config, self.walk

        def tile(j: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            slot, carry = state
            value, slot, _ = self._product(item.steps, slot, (), None)
            column = walk.column(item.block + 2 * j + self.warpgroup)
            for first in range(0, config.columns, config.width):
                where = place._replace(column=column + first)
                carry = self.epilogue.tile(self.refs, where, value[:, first : first + config.width], carry)
            return walk.after(slot, item.steps), carry  # past the other's tile

        own = lax.div(item.tiles + 1 - self.warpgroup, 2)
        _, carry = lax.fori_loop(0, own, tile, (walk.after(slot, self.warpgroup * item.steps), carry))
        return walk.after(slot, item.tiles * item.steps), carry

    def _tiles_overlapping(self, item: Item, place: Place, slot: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        """All tiles of an item, each with its epilogue beside the next one's product."""
        config = self.config

        def pieces(i: jax.Array, value: jax.Array, *, full: bool) -> list[Callable[[Carry], Carry]]:
            """The epilogue of tile i, as those of tiles of fewer columns."""

            def piece(first: int, carry: Carry) -> Carry:
                # Before the first tile there is none: what would be stored goes behind all rows, where it is dropped.
                row = jnp.where(i >= 0, place.row, place.row + self.walk.rows)
                column = self.walk.column(item.block + jnp.maximum(i, 0)) + first
                where = place._replace(row=row, column=column, full=full)
                return self.epilogue.tile(self.refs, where, value[:, first : first + config.width], carry)

            return [functools.partial(piece, first) for first in range(0, config.columns, config.width)]

        def tile(i: jax.Array, state: tuple[jax.Array, Carry, jax.Array]) -> tuple[jax.Array, Carry, jax.Array]:
            slot, carry, previous = state
            value, slot, new = self._product(item.steps, slot, pieces(i - 1, previous, full=True), carry)
            kept = jax.tree.map(lambda x, y: lax.select(lax.broadcast(i > 0, x.shape), x, y), new, carry)
            return slot, kept, value

        nothing = layouts.constant((config.rows, config.columns), 0.0)
        slot, carry, value = lax.fori_loop(0, item.tiles, tile, (slot, carry, nothing))
        for work in pieces(item.tiles - 1, value, full=False):
            carry = work(carry)
        return slot, carry

    def _product(
        self, steps: jax.Array, slot: jax.Array, beside: Sequence[Callable[[Carry], Carry]], carry: Carry
    ) -> tuple[jax.Array, jax.Array, Carry]:
        """One tile's product, the slot after its last one, and what the functions `beside` make of `carry`.

        Each of these works while one of the first steps is multiplied.
        """
        config, walk = self.config, self.walk
        self._follow(steps)

        def one_by_one(accumulator: Any) -> tuple[jax.Array, jax.Array, Carry]:
            def step(k: jax.Array, slot: jax.Array) -> jax.Array:
                self._multiply(accumulator, slot)
                plgpu.wgmma_wait(0)
                self._give_back(slot)
                self._tell(k, steps)
                return walk.next(slot)

            after = lax.fori_loop(0, steps, step, slot)
            return accumulator[...], after, carry

        def in_flight(accumulator: Any) -> tuple[jax.Array, jax.Array, Carry]:
            # `overlap` steps are under way while a piece works; the oldest is waited for when one more has been issued.
            under_way: list[jax.Array] = []
            after, made = slot, carry

            def issue(slot: jax.Array) -> jax.Array:
                self._multiply(accumulator, slot)
                under_way.append(slot)
                return walk.next(slot)

            def wait(left: int) -> None:
                plgpu.wgmma_wait(left)
                self._give_back(under_way.pop(0))

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
            def step(k: jax.Array, slots: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                previous, slot = slots
                self._multiply(accumulator, slot)
                plgpu.wgmma_wait(1)
                pl.when(k > 0)(lambda: self._give_back(previous))
                self._tell(k, steps)
                return slot, walk.next(slot)

            done = config.overlap + len(beside) if beside else 0
            last, after = lax.fori_loop(done, steps, step, (under_way[0] if beside else slot, after))
            value = accumulator[...]
            pl.when(steps > 0)(lambda: self._give_back(last))
            return value, after, made

        accumulator = plgpu.ACC((config.rows, config.columns), jnp.float32)
        return pl.run_scoped(in_flight if config.in_flight else one_by_one, accumulator)

    def _multiply(self, accumulator: Any, slot: jax.Array) -> None:
        """Issues the product of what a slot holds, once it is there."""
        plgpu.barrier_wait(self.ring["filled"].at[self.walk.filled(slot, self.warpgroup)])
        if self.problem.left_axis == 0:
            left = self.ring["left_smem"].at[slot, self.rows]
        else:
            left = self.ring["left_smem"].at[slot, :, self.rows].transpose((1, 0))
        right = self.ring["right_smem"].at[slot]
        plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if self.problem.right_axis == 0 else right)

    def _give_back(self, slot: jax.Array | int) -> None:
        plgpu.barrier_arrive(self.ring["free"].at[slot])

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
