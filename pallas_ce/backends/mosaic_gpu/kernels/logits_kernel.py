"""The logits of a block of rows in float32, with the largest of each group of columns and each row's log-sum-exp.

A selection has to look at single logits more than once. The groups' maxima, a thirty-second of the numbers, tell it
where. A tile's logits leave the registers while its exponentials are summed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, forward_kernel, operands
from pallas_ce.backends.mosaic_gpu.schedule import WARPGROUPS, Config
from pallas_ce.head import Head
from pallas_ce.statistics.logits import reference_of
from pallas_ce.statistics.row import Partial

# Columns of a group: 128 bytes, one memory transaction. A tile's width is a multiple.
GROUP = 32

# Two blocks of float32 on their way to memory leave shared memory for three stages.
CONFIG = Config(rows=128, columns=128, stages=3)

_FIELDS = ("max", "sum_exp")


def stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the stored logits, whose columns are whole groups."""
    return operands.stored_shape(rows, operands.round_up(columns, GROUP))


def logits(
    head: Head, hidden: jax.Array, inverse_temperature: jax.Array | None
) -> tuple[jax.Array, jax.Array, Partial]:
    """Logits of `hidden [N, H]`, maxima, and the `Partial` `[N]` of the logits times `inverse_temperature [N]`.

    Logits `[rows, groups · GROUP]` are -inf in padding's columns. Maxima `[groups, padded rows]` are each group's
    largest logit. Both are float32, and undefined behind N rows.
    """
    given = operands.operands(head, hidden, CONFIG, weighted_mean=False)
    shape = stored_shape(hidden.shape[0], given.logits.columns)
    outputs = {
        **forward_kernel.outputs(_FIELDS, given.product),
        "logits": jax.ShapeDtypeStruct(shape, jnp.float32),
        "maxima": jax.ShapeDtypeStruct((shape[1] // GROUP, given.product.padded_rows), jnp.float32),
    }
    inputs = {}
    if inverse_temperature is not None:
        inputs["inverse_temperature"] = given.by_row(inverse_temperature.astype(jnp.float32), 1)
    found = given.run("pallas_ce_logits", LogitsEpilogue(given.logits), outputs, inputs)
    partial = jax.tree.map(lambda x: x[: len(hidden)], forward_kernel.read(found, _FIELDS))
    return found["logits"], found["maxima"], partial


@dataclasses.dataclass(frozen=True)
class LogitsEpilogue(Epilogue):
    """Stores a tile's logits, its groups' maxima and its `Partial`."""

    logits: epilogues.LogitSpec
    target = "logits"

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for the maxima."""
        return {"maxima_smem": plgpu.SMEM((WARPGROUPS, config.columns // GROUP, config.rows), jnp.float32)}

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Reads the rows' inverse temperatures."""
        given = refs.get("inverse_temperature")
        return None if given is None else layouts.rows_of(given, place.row, place.config.rows)

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> None:
        """Stores the logits first: they are on their way while the rest is computed."""
        logits = self.logits.logits(refs, place.column, values)
        z = self.logits.mask(refs, place.column, logits)
        self.store(refs, place, 0, z)
        maxima = [group.max(axis=1) for _, group in epilogues.pieces(z, GROUP)]
        top = functools.reduce(jnp.maximum, maxima)
        if carry is not None:
            # Padding is masked again: -inf times a factor of 0 would be NaN.
            z = self.logits.mask(refs, place.column, logits * layouts.along_columns(carry, z.shape))
            top = top * carry
        part, _ = epilogues.piece_partial(self.logits, ("sum_exp",), refs, place.column, z, reference_of(top))
        staged = refs["maxima_smem"].at[place.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for index, by_row in enumerate(maxima):
            staged[index] = by_row
        plgpu.commit_smem()
        groups, rows = pl.ds(place.column // GROUP, staged.shape[0]), pl.ds(place.row, staged.shape[1])
        plgpu.copy_smem_to_gmem(staged, refs["maxima"].at[groups, rows])
        forward_kernel.write(refs, place, part._replace(max=top))
