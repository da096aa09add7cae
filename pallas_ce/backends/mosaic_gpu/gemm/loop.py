"""The main loop of every kernel: tiles are loaded into shared memory, multiplied, and handed to an epilogue.

The section "The loop" of `docs/hopper.md` explains it. One product is always in flight: once the product of a step has
been issued, the product before it is awaited, and its slot of the ring is filled for the step `stages` later.
"""

import abc
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, STEP, WARPGROUPS, Config, Product


class Place(NamedTuple):
    """Where a warpgroup's part of a tile lies."""

    warpgroup: jax.Array  # 0 or 1
    row: jax.Array  # the first
    column: jax.Array  # the first
    block: jax.Array  # which column block
    part: jax.Array  # which part of the length
    config: Config


class Epilogue(abc.ABC):
    """What a kernel does with a tile, or with stored tiles side by side; hashable.

    `refs` holds inputs, outputs and scratch by name.
    """

    # The array that `store` writes to: an output or, where none has the name, the stored numbers themselves.
    target: ClassVar[str | None] = None
    starts: int = 0  # tiles are stored from a multiple of its greatest common divisor with a row's length on

    def scratch(self, config: Config) -> dict[str, Any]:
        """Shared memory to allocate, by name."""
        return {}

    @abc.abstractmethod
    def __call__(self, refs: dict[str, Any], place: Place, thread: "Thread") -> None:
        """Calls `thread.multiply` or `each` once; a product hides the wait for numbers read before it."""

    def store(
        self, refs: dict[str, Any], place: Place, first: int, x: jax.Array, add: jax.Array | bool = False
    ) -> None:
        """Starts storing a piece of the tile, from its column `first` on; entries outside the array are dropped.

        The pieces of a tile come in order and have one width. For `add` see `layouts.store_block`.
        """
        target, staging = refs[self.target or ""], refs["blocks"]
        target = target.at[place.part] if len(target.shape) == 3 else target
        wide = staging.shape[-1]
        assert x.shape[1] % wide == 0
        x = x.astype(staging.dtype)
        corners = itertools.product(range(0, x.shape[0], BLOCK), range(0, x.shape[1], wide))
        for index, (r, c) in enumerate(corners, first // wide * (x.shape[0] // BLOCK)):
            at = target.at[pl.ds(place.row + r, BLOCK), pl.ds(place.column + first + c, wide)]
            layouts.store_block(staging.at[place.warpgroup], index, at, x[r : r + BLOCK, c : c + wide], add)


def number(refs: dict[str, Any], name: str, multiple: int = STEP) -> jax.Array | int:
    """The offset of that name, a multiple of a number, which Mosaic wants to know; 0 if it is not given."""
    return pl.multiple_of(refs[name][0], multiple) if name in refs else 0


def _blocks(refs: dict[str, Any], name: str, size: int, most: int) -> jax.Array | int:
    return lax.div(refs[name][0] + (size - 1), size) if name in refs else most


def _divided(x: jax.Array, by: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of numbers below 2²⁴.

    Division by a run-time value would be a call, and no product is asynchronous in a kernel with calls.
    """
    if isinstance(by, int):
        return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))
    return corrected((x.astype(jnp.float32) / by.astype(jnp.float32)).astype(jnp.int32), x, by)


def corrected(guess: jax.Array, x: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder from a quotient that may be one too large or too small."""
    rest = x - guess * by
    quotient = guess + (rest >= by).astype(jnp.int32) - (rest < 0).astype(jnp.int32)
    return quotient, x - quotient * by


class Walk:
    """One thread block's work in order: `tiles` of `steps` each; a tile's first `products` steps are multiplied."""

    def __init__(self, product: Product, refs: dict[str, Any]) -> None:
        self._product, config = product, product.config
        self._row_blocks = _blocks(refs, "valid_rows", config.tile_rows, product.row_blocks)
        self._column_blocks = _blocks(refs, "valid_columns", config.columns, product.column_blocks)
        self.first_row, self._worker = number(refs, "first_row"), lax.axis_index("worker")
        every = self._row_blocks * self._column_blocks * product.parts
        self.tiles = lax.div(every + (product.workers - 1) - self._worker, jnp.int32(product.workers))
        # Where no number of the length is valid, one step runs and reads zeros beyond the operands' end.
        steps = _blocks(refs, "valid_length", STEP, product.steps)
        self.products = steps if isinstance(steps, int) else jnp.maximum(steps, 1)
        self._skip = 0 if isinstance(steps, int) else jnp.where(steps == 0, product.steps, 0)
        self.steps = self.products + (WARPGROUPS * (1 - refs["first"][0]) if product.held else 0)

    def place(self, tile: jax.Array, warpgroup: jax.Array | int = 0) -> Place:
        """Where a warpgroup's part of this thread block's tile number `tile` lies; rows are counted from 0."""
        product, config = self._product, self._product.config
        rest = tile * product.workers + self._worker
        part = jnp.int32(0)
        if product.parts > 1:  # concurrent tiles work on the same part of the length
            part, rest = _divided(rest, self._row_blocks * self._column_blocks)
        in_group = min(config.row_group, product.row_blocks)
        group, rest = _divided(rest, self._column_blocks * in_group)
        last = self._row_blocks % in_group if isinstance(self._row_blocks, int) else None
        width = in_group if last == 0 else jnp.minimum(in_group, self._row_blocks - group * in_group)
        block, row_block = _divided(rest, width)
        row_block = group * in_group + row_block
        # Each group goes the other way, to begin with columns that are in the cache.
        block = jnp.where(lax.rem(group, 2) == 1, self._column_blocks - 1 - block, block)
        row = row_block * config.tile_rows + warpgroup * config.rows
        return Place(jnp.int32(warpgroup), row, block * config.columns * max(1, product.stored), block, part, config)

    def along(self, place: Place, own: jax.Array) -> jax.Array:
        """Which step along the operands' length a tile's own step is."""
        along = own + self._skip
        return along + place.part * self.products if self._product.parts > 1 else along


def run(matrices: list[Any], refs: dict[str, Any], product: Product, epilogue: Epilogue) -> None:
    """The kernel's body; see `launch`.

    `matrices` are the left and the right operand. A low-rank term adds two of the same layout, and steps to each tile.
    Stored numbers are one matrix, which the epilogue may overwrite: each tile is read once, before that.

    Numbers: "valid_rows" and "valid_columns" (blocks of the product behind them are skipped and left undefined),
    "valid_length" (entries sum over this many numbers, in whole steps), "finite_length" (the right operand's numbers
    behind as many count as 0 whatever they are), "first_row" (the left operand's row where the product begins),
    "first_column" (likewise for the right one) and "first_length" (the right operand's number that meets the left's
    first). The last three are multiples of `STEP`.
    """
    config, dtype = product.config, matrices[0].dtype
    if product.stored:
        slots = {"left": (config.tile_rows, config.columns)}
        along = matrices[0].shape[1], config.columns
    else:  # both operands need the same swizzle
        left, right = (config.tile_rows, STEP), (config.columns, STEP)
        left, right = left[::-1] if product.left_axis else left, right[::-1] if product.right_axis else right
        slots = {"left": left, "right": right}
        of_left = config.rows if product.left_axis else STEP
        along = *(x.shape[1] for x in matrices[:2]), of_left, slots["right"][1]
    transforms = layouts.swizzled(dtype, *along)
    ring: dict[str, Any] = {
        "full": plgpu.Barrier(num_arrivals=len(slots), num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
    } | {name: plgpu.SMEM((config.stages, *slot), dtype, transforms=transforms) for name, slot in slots.items()}
    if "finite_length" in refs:
        ring["cleared"] = plgpu.Barrier(num_arrivals=WARPGROUPS)

    scratch = epilogue.scratch(config)
    if epilogue.target:
        refs = {epilogue.target: matrices[0], **refs}
        target = refs[epilogue.target]
        columns = math.gcd(target.shape[-1], epilogue.starts)
        scratch["blocks"] = layouts.tile_staging(config, columns, target.dtype)

    def scoped(ring: dict[str, Any], scratch: dict[str, Any]) -> None:
        Thread(matrices, ring, {**refs, **scratch}, product, epilogue).run()

    pl.run_scoped(scoped, ring, scratch, collective_axes="warpgroup")


class Thread:
    """One warpgroup's work."""

    def __init__(
        self, matrices: list[Any], ring: dict[str, Any], refs: dict[str, Any], product: Product, epilogue: Epilogue
    ) -> None:
        self.matrices, self.ring, self.refs, self.product, self.epilogue = matrices, ring, refs, product, epilogue
        self.config, self.warpgroup, self.walk = product.config, lax.axis_index("warpgroup"), Walk(product, refs)
        self.first_column, self.first_length = (number(refs, name) for name in ("first_column", "first_length"))
        self.rows = pl.ds(self.warpgroup * self.config.rows, self.config.rows)
        self.steps = self.walk.tiles * self.walk.steps

    def run(self) -> None:
        """Works through all tiles of the thread block."""
        for step in range(self.config.stages):
            pl.when((self.warpgroup == 0) & (step < self.steps))(functools.partial(self._load, jnp.int32(step), step))

        def tile(index: jax.Array, _: None) -> None:
            self.index, self.place = index, self.walk.place(index, self.warpgroup)
            self.epilogue(self.refs, self.place, self)

        lax.fori_loop(0, self.walk.tiles, tile, None)
        plgpu.wait_smem_to_gmem(0)

    def each[Carry](self, tile: Callable[[Place, jax.Array, Carry], Carry], carry: Carry) -> Carry:
        """What `tile(place, values, carry)` makes of the carry, of a product or of one stored tile after the other.

        `values [rows, columns]` are float32, in the layout of a wgmma accumulator.
        """
        if not self.product.stored:
            return tile(self.place, self.multiply(), carry)
        index, place = self.index, self.place

        def side_by_side(k: jax.Array, carry: Carry) -> Carry:
            at = place._replace(column=place.column + k * self.config.columns)
            step = index * self.walk.steps + k
            slot = self._slot(step)
            plgpu.barrier_wait(self.ring["full"].at[slot])
            values = plgpu.load(self.ring["left"].at[slot, self.rows], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            plgpu.commit_smem()  # the copy engine must not overwrite the slot before it has been read
            self._refill(step)
            return tile(at, values, carry)

        return lax.fori_loop(0, self.product.stored, side_by_side, carry)

    def multiply(self) -> jax.Array:
        """The tile's product, in the layout of a wgmma accumulator."""
        product, walk, index, place = self.product, self.walk, self.index, self.place
        if product.held:
            self.held = index * walk.steps + walk.products
            self.held_slot = self._slot(self.held + self.warpgroup)
        first = index * walk.steps

        def accumulated(accumulator: Any) -> jax.Array:
            def step(k: jax.Array, _: None) -> None:
                step = first + k
                slot = self._slot(step)
                plgpu.barrier_wait(self.ring["full"].at[slot])
                if "finite_length" in self.refs:
                    self._clear(slot, self.refs["finite_length"][0] - walk.along(place, k) * STEP)
                left, right = self.ring["left"], self.ring["right"].at[slot]
                left = left.at[slot, :, self.rows].transpose((1, 0)) if product.left_axis else left.at[slot, self.rows]
                plgpu.wgmma(accumulator, left, right if product.right_axis else right.transpose((1, 0)))
                plgpu.wgmma_wait(1)
                pl.when((k if product.held else step) > 0)(lambda: self._refill(step - 1))

            lax.fori_loop(0, walk.products, step, None)
            return accumulator[...]

        value = pl.run_scoped(accumulated, plgpu.ACC((self.config.rows, self.config.columns), jnp.float32))
        if product.held:  # the ring's next slots hold the sum, not operands
            self._refill(first + walk.products - 1)
        return value

    def _clear(self, slot: jax.Array, finite: jax.Array) -> None:
        """Replaces the right operand's numbers from `finite` on by 0: the left's are 0 there, but 0·NaN is not."""
        right, axis = self.ring["right"].at[slot], 1 - self.product.right_axis

        def clear(block: int) -> None:
            columns = pl.ds(block * BLOCK, BLOCK)
            part = right.at[columns] if axis else right.at[:, columns]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            ids = plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(ids < finite, values, jnp.zeros_like(values))

        @pl.when(finite < STEP)
        def _() -> None:
            for block in range(self.config.columns // BLOCK):  # the two warpgroups in turn
                pl.when(self.warpgroup == block % WARPGROUPS)(functools.partial(clear, block))
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.ring["cleared"])
            plgpu.barrier_wait(self.ring["cleared"])

    def _slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.config.stages))

    def _refill(self, done: jax.Array) -> None:
        """Frees the slot of the step `done`, and loads into it for the step `stages` later."""
        slot, ahead = self._slot(done), done + self.config.stages

        @pl.when(ahead < self.steps)
        def _() -> None:
            plgpu.barrier_arrive(self.ring["empty"].at[slot])

            @pl.when(self.warpgroup == 0)
            def _() -> None:
                plgpu.barrier_wait(self.ring["empty"].at[slot])
                self._load(ahead, slot)

    def _load(self, step: jax.Array, slot: jax.Array | int) -> None:
        product, config, full = self.product, self.config, self.ring["full"].at[slot]
        tile, own = _divided(step, self.walk.steps)
        place = self.walk.place(tile)
        place = place._replace(row=place.row + self.walk.first_row)
        along = self.walk.along(place, own)
        rows, columns = pl.ds(place.row, config.tile_rows), pl.ds(self.first_column + place.column, config.columns)
        if product.stored:
            # No tile lies beyond the end: the last one is read again, and none of its columns counts there.
            last = (config.column_blocks(self.matrices[0].shape[1]) - 1) * config.columns
            column = jnp.minimum(place.column + own * config.columns, last)
            columns = pl.ds(pl.multiple_of(column, STEP), config.columns)
            plgpu.copy_gmem_to_smem(self.matrices[0].at[rows, columns], self.ring["left"].at[slot], full)
            return

        def copy(left: Any, right: Any, k: jax.Array) -> None:
            depth, right_depth = (pl.ds(first + k * STEP, STEP) for first in (0, self.first_length))
            left = left.at[depth, rows] if product.left_axis else left.at[rows, depth]
            right = right.at[right_depth, columns] if product.right_axis else right.at[columns, right_depth]
            plgpu.copy_gmem_to_smem(left, self.ring["left"].at[slot], full)
            plgpu.copy_gmem_to_smem(right, self.ring["right"].at[slot], full)

        left, right, *term = self.matrices
        if product.held:
            pl.when(own < self.walk.products)(lambda: copy(left, right, along))
            pl.when(own >= self.walk.products)(lambda: self._load_held(place, own - self.walk.products, slot))
            return
        if not term:
            copy(left, right, along)
            return
        low, up = term
        pl.when(along < product.own_steps)(lambda: copy(left, right, along))
        pl.when(along >= product.own_steps)(lambda: copy(low, up, along - product.own_steps))

    def _load_held(self, place: Place, warpgroup: jax.Array, slot: jax.Array | int) -> None:
        config, full = self.config, self.ring["full"].at[slot]
        rows = pl.ds(pl.multiple_of(place.row + warpgroup * config.rows, STEP), config.rows)
        for name, side, width in (("lower", "left", config.columns // 2), ("product", "right", config.columns)):
            source = self.refs[name].at[rows, pl.ds(place.block * width, width)]
            plgpu.copy_gmem_to_smem(source, self.ring[side].at[slot], full)

    def wait_held(self) -> None:
        """Waits until the sum that the tile is added to has arrived: a step for each warpgroup's part."""
        for warpgroup in range(WARPGROUPS):  # the other's, too: each phase of a barrier must be awaited
            plgpu.barrier_wait(self.ring["full"].at[self._slot(self.held + warpgroup)])

    def read_held(self, name: str, first: int, width: int) -> jax.Array:
        """`width` columns from `first` on of this warpgroup's part, in the layout of a wgmma accumulator.

        "product" `[rows, columns]` lies in the right operand's place, "lower" `[rows, columns / 2]` in the left one's.
        """
        part = self.ring["right" if name == "product" else "left"].at[self.held_slot, :, pl.ds(first, width)]
        return plgpu.load(part, layout=plgpu.Layout.WGMMA)

    def release_held(self) -> None:
        """Frees the sum's slots after it has been read."""
        for warpgroup in range(WARPGROUPS):
            self._refill(self.held + warpgroup)
