"""The weight's gradient summed over blocks of rows in three bytes a number: a bfloat16 result, and 8 bits beside it.

A float32 number's upper 16 bits are a bfloat16, kept where the result will be. The next 8 bits lie in an array of their
own, two columns packed into one 16-bit number. A block's product is thus added within 2⁻¹⁵ of the sum's magnitude,
where a bfloat16 sum would be off by 2⁻⁸. The last block rounds the upper bits to nearest, which leaves the result.

    bits(sum) = upper·2¹⁶ + lower·2⁸,    sum ← sum + storedᵀ·rows

The old sum of a tile comes through the ring of operands (`Product.held`).
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import launch, layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import STEP, Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels.operands import round_up
from pallas_ce.backends.mosaic_gpu.kernels.product_kernel import weight_product
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, WIDE, Config

# A warpgroup's part of a tile must have as many rows as a step has numbers of each row.
CONFIG = WIDE


def lower_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the lower bits of a sum `[rows, columns]`."""
    return rows, CONFIG.column_blocks(columns) * CONFIG.columns // 2


def add_for_weight(
    stored: jax.Array,
    rows: jax.Array,
    vocab_axis: int,
    total: tuple[jax.Array, jax.Array],
    *,
    first: jax.Array,
    last: jax.Array,
    valid_rows: jax.Array | None = None,
    multiplier: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`total`, upper bits in the weight's shape and lower ones, with `multiplier·storedᵀ·rows` added in place.

    Rows from `valid_rows []` on are left out. Where `first []` is true the total is undefined and counts as 0; where
    `last []` is, the upper bits are rounded to nearest, and the lower ones left undefined.
    """
    product, matrices = weight_product(stored, rows, vocab_axis, CONFIG)
    numbers = {"first": first, "last": last}
    if valid_rows is not None:
        needed = first | last | (valid_rows > 0)
        numbers |= {"valid_length": valid_rows, "valid_rows": jnp.where(needed, matrices[0].shape[1], 0)}
    product, epilogue = dataclasses.replace(product, held=True), NarrowSumEpilogue(total[0].shape[1])
    outputs = {"upper": total[0], "lower": total[1]}
    inputs = {"multiplier": None if multiplier is None else multiplier.astype(jnp.float32).reshape(1)}
    found = launch.run("pallas_ce_add_for_weight", product, matrices, epilogue, inputs, outputs, numbers)
    return found["upper"], found["lower"]


@dataclasses.dataclass(frozen=True)
class NarrowSumEpilogue(Epilogue):
    """Adds a tile to its part of the sum in the ring; `columns` is the length of the sum's rows."""

    columns: int

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for the stores."""
        return {"sum_smem": layouts.tile_staging(config, self.columns, jnp.bfloat16)}

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Reads whether the sum begins and ends."""
        return refs["first"][0] != 0, refs["last"][0] != 0

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> None:
        """Adds piece by piece; two pieces share one piece of lower bits."""
        (first, last), thread, staging = carry, refs["thread"], refs["sum_smem"].at[place.warpgroup]
        if "multiplier" in refs:
            values = values * refs["multiplier"][0]
        wide, half = staging.shape[-1], values.shape[1] // 2
        # The last block's lower bits go beyond the end of the array, where the copy engine drops them.
        beyond = round_up(refs["lower"].shape[0], CONFIG.tile_rows)
        lower_row = pl.multiple_of(place.row + jnp.where(last, beyond, 0), STEP)

        def old(name: str, column: int) -> jax.Array:
            def zeros() -> jax.Array:
                return plgpu.layout_cast(jnp.zeros((values.shape[0], wide), jnp.bfloat16), plgpu.Layout.WGMMA)

            return lax.bitcast_convert_type(
                lax.cond(first, zeros, lambda: thread.read_held(name, column, wide)), jnp.uint16
            )

        pl.when(jnp.logical_not(first))(thread.wait_held)
        count = itertools.count()
        for piece in range(0, half, wide):
            before, after = old("lower", piece), []
            for column, lower in ((piece, before & 0xFF), (piece + half, before >> 8)):
                new = values[:, column : column + wide]
                bits = (old("upper", column).astype(jnp.uint32) << 16) | (lower.astype(jnp.uint32) << 8)
                new += lax.bitcast_convert_type(bits, jnp.float32)
                bits = lax.bitcast_convert_type(new, jnp.uint32)
                upper = lax.cond(last, lambda x, bits: x.astype(jnp.bfloat16), lambda x, bits: _narrow(bits), new, bits)
                target = refs["upper"].at[pl.ds(place.row, BLOCK), pl.ds(place.column + column, wide)]
                layouts.store_block(staging, next(count), target, upper)
                after.append((bits >> 8) & 0xFF)
            target = refs["lower"].at[pl.ds(lower_row, BLOCK), pl.ds(place.block * half + piece, wide)]
            layouts.store_block(staging, next(count), target, _narrow((after[0] | (after[1] << 8)) << 16))
        pl.when(jnp.logical_not(first))(thread.release_held)


def _narrow(bits: jax.Array) -> jax.Array:
    """The upper half of 32 bits."""
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
