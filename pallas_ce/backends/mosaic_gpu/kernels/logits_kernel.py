"""The logits of a block of rows in float32, with the largest of each group of columns and each row's log-sum-exp.

A selection has to look at single logits more than once. The groups' maxima, a thirty-second of the numbers, tell it
where. A tile's logits leave the registers while its exponentials are summed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, operands, partials
from pallas_ce.backends.mosaic_gpu.schedule import WARPGROUPS, Config
from pallas_ce.head import Head
from pallas_ce.statistics.logits import reference_of
from pallas_ce.statistics.row import Partial

# Columns of a group: 128 bytes, one memory transaction. A tile's width is a multiple.
GROUP = 32

# Two blocks of float32 on their way to memory leave shared memory for three stages.
CONFIG = Config(rows=128, columns=128, stages=3)

_FIELDS = ("max", "sum_exp")


class Stored(NamedTuple):
    """The kernel's outputs for N rows.

    Attributes:
        logits: `[rows, groups · GROUP]` float32, undefined behind N rows; -inf in padding's columns.
        maxima: `[groups, padded rows]` float32, each group's largest logit; undefined behind N rows.
        partial: `max` and `sum_exp` `[N]` of the tempered logits.
    """

    logits: jax.Array
    maxima: jax.Array
    partial: Partial


def stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the stored logits, whose columns are whole groups."""
    return operands.stored_shape(rows, operands.round_up(columns, GROUP))


def logits(head: Head, hidden: jax.Array, inverse_temperature: jax.Array | None) -> Stored:
    """Stores the logits of `hidden [N, H]`.

    `inverse_temperature [N]`, positive, multiplies the logits in `partial` only.
    """
    given = operands.operands(head, hidden, CONFIG, weighted_mean=False)
    rows = hidden.shape[0]
    shape = stored_shape(rows, given.logits.columns)
    outputs = {
        **partials.outputs(_FIELDS, given.product.column_blocks, given.padded_rows),
        "logits": jax.ShapeDtypeStruct(shape, jnp.float32),
        "maxima": jax.ShapeDtypeStruct((shape[1] // GROUP, given.padded_rows), jnp.float32),
    }
    inputs = {}
    if inverse_temperature is not None:
        inputs["inverse_temperature"] = given.by_row(inverse_temperature.astype(jnp.float32), 1)
    found = given.run("pallas_ce_logits", LogitsEpilogue(given.logits), outputs, inputs)
    partial = jax.tree.map(lambda x: x[:rows], partials.read(found, _FIELDS))
    return Stored(found["logits"], found["maxima"], partial)


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
        if "inverse_temperature" in refs:
            return layouts.rows_of(refs["inverse_temperature"], place.row, place.config.rows)
        return None

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
        partials.write(refs, place, part._replace(max=top))
