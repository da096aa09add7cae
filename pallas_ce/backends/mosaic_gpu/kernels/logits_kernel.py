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
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, operands, partials
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Config
from pallas_ce.head import Head
from pallas_ce.statistics.logits import reference_of
from pallas_ce.statistics.row import Partial, merge

# Columns of a group: 128 bytes, which is what memory hands out at a time. A tile's width is a multiple.
GROUP = 32

# Two blocks of float32 on their way to memory leave shared memory for three stages.
CONFIG = Config(stages=3)

_FIELDS = ("max", "sum_exp")


class Stored(NamedTuple):
    """What the kernel leaves of N rows.

    Attributes:
        logits: `[rows, groups · GROUP]` float32, N rows and undefined ones; -inf in columns that are not covered.
        maxima: `[groups, padded rows]` float32, each group's largest logit; undefined behind N rows.
        partial: of the covered columns, tempered; `max` and `sum_exp`, `[N]`.
    """

    logits: jax.Array
    maxima: jax.Array
    partial: Partial


def groups_of(columns: int) -> int:
    """How many groups the columns make; at least two, see `operands.stored_shape`."""
    return max(2, -(-columns // GROUP))


def stored_rows(rows: int) -> int:
    """Rows of the stored array."""
    return operands.round_up(rows, operands.ROW_MULTIPLE)


def logits(head: Head, hidden: jax.Array, inverse_temperature: jax.Array | None, config: Config) -> Stored:
    """Of `hidden [N, H]` and the vocabulary entries that are `operands.covered`.

    `inverse_temperature [N]`, positive, multiplies the logits in `partial` only.
    """
    given = operands.operands(head, hidden, config, weighted_mean=False, bytes_per_row=4 * len(_FIELDS))
    groups = groups_of(given.logits.columns)
    outputs = {
        **partials.outputs(_FIELDS, given.slots, given.padded_rows),
        "logits": jax.ShapeDtypeStruct((stored_rows(given.rows), groups * GROUP), jnp.float32),
        "maxima": jax.ShapeDtypeStruct((groups, given.padded_rows), jnp.float32),
    }
    inputs = {}
    if inverse_temperature is not None:
        inputs["inverse_temperature"] = given.by_row(inverse_temperature.astype(jnp.float32), 1)
    epilogue = LogitsEpilogue(given.logits, groups * GROUP)
    found = given.run("pallas_ce_logits", epilogue, outputs, inputs)
    return Stored(found["logits"], found["maxima"], partials.read(found, _FIELDS, given.rows))


@dataclasses.dataclass(frozen=True)
class LogitsEpilogue(Epilogue):
    """Stores a tile's logits and its groups' maxima, and merges its `Partial` into the window's."""

    logits: epilogues.LogitSpec
    columns: int

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for what is written."""
        return {
            **partials.staging(config),
            "logits_smem": layouts.tile_staging(config.staged, self.columns, jnp.float32),
            "maxima_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, config.columns // GROUP, config.rows), jnp.float32),
        }

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Vectors by row that the whole window needs."""
        rows = refs["partials_smem"].shape[1]
        by_row = None
        if "inverse_temperature" in refs:
            by_row = layouts.rows_of(refs["inverse_temperature"], place.row, rows)
        return by_row, epilogues.no_columns(rows, _FIELDS)

    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Stores the logits first: they are on their way while the rest is computed."""
        inverse_temperature, window = carry
        z = self.logits.mask(refs, place.column, self.logits.logits(refs, place.column, product))
        layouts.store_piece(refs["logits_smem"], place.warpgroup, refs["logits"], place.row, place.column, 0, z)
        maxima = [group.max(axis=1) for _, group in epilogues.pieces(z, GROUP)]
        top = functools.reduce(jnp.maximum, maxima)
        if inverse_temperature is not None:
            z, top = z * layouts.along_columns(inverse_temperature, z.shape), top * inverse_temperature
        part, _ = epilogues.piece_partial(self.logits, ("sum_exp",), refs, place.column, z, reference_of(top))
        self._store_maxima(refs, place, maxima)
        return inverse_temperature, merge(window, part._replace(max=top))

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Writes the window's statistics, and waits until all has left shared memory."""
        partials.write(refs, place, carry[1])

    def _store_maxima(self, refs: dict[str, Any], place: Place, maxima: list[jax.Array]) -> None:
        # The tile's first store of logits has waited until all earlier stores had read theirs, that of maxima included.
        staged = refs["maxima_smem"].at[place.warpgroup]
        for index, by_row in enumerate(maxima):
            staged[index] = by_row
        plgpu.commit_smem()
        groups, rows = pl.ds(place.column // GROUP, staged.shape[0]), pl.ds(place.row, staged.shape[1])
        plgpu.copy_smem_to_gmem(staged, refs["maxima"].at[groups, rows])
