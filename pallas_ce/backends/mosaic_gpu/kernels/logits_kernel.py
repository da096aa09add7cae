"""The k largest logits of each row: a kernel stores a block's logits, a selection reads few of them.

A selection has to look at single logits more than once. The largest of each group of columns, a thirty-second of the
numbers, tell it where. For each row of V entries the kernel writes 4·V bytes of float32 logits while it multiplies: a
tile's leave the registers while its exponentials are summed. A tournament (`streaming.selection`) reads and sorts V/8
bytes of maxima, and 128·k bytes of logits are read again.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue, Place, Thread
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, forward_kernel, operands
from pallas_ce.backends.mosaic_gpu.schedule import LOGITS, WARPGROUPS, Config
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.logits import reference_of
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.budget import budget, quickest, sizes
from pallas_ce.streaming.selection import Largest, largest_in_groups

# Columns of a group: 128 bytes, one memory transaction. A tile's width is a multiple.
GROUP = 32

_FIELDS = ("max", "sum_exp")

# Rows of a block are a multiple of this where there are as many, so that tiles are full.
_ROW_STEP = 256

# Arrays alive at a time, of a row's maxima and of its k groups' entries: as found, by row, sorted with their places.
_MAXIMA_ARRAYS = 3
_CANDIDATE_ARRAYS = 6


@dataclasses.dataclass(frozen=True)
class LogitsEpilogue(Epilogue):
    """Stores a tile's logits, -inf in padding's columns, its groups' maxima, and its `Partial` after temperature."""

    logits: epilogues.LogitSpec
    target = "logits"

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for the maxima."""
        return {"maxima_smem": plgpu.SMEM((WARPGROUPS, config.columns // GROUP, config.rows), jnp.float32)}

    def __call__(self, refs: dict[str, Any], place: Place, thread: Thread) -> None:
        """Stores the logits first: they are on their way while the rest is computed."""
        given = refs.get("inverse_temperature")
        inverse = None if given is None else layouts.rows_of(given, place.row, place.config.rows)
        values = thread.multiply()
        logits = self.logits.logits(refs, place.column, values)
        z = self.logits.mask(refs, place.column, logits)
        self.store(refs, place, 0, z)
        maxima = [group.max(axis=1) for _, group in epilogues.pieces(z, GROUP)]
        top = functools.reduce(jnp.maximum, maxima)
        if inverse is not None:
            # Padding is masked again: -inf times a factor of 0 would be NaN.
            z = self.logits.mask(refs, place.column, logits * layouts.along_columns(inverse, z.shape))
            top = top * inverse
        part, _ = epilogues.piece_partial(self.logits, ("sum_exp",), refs, place.column, z, reference_of(top))
        staged = refs["maxima_smem"].at[place.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for index, by_row in enumerate(maxima):
            staged[index] = by_row
        plgpu.commit_smem()
        groups, rows = pl.ds(place.column // GROUP, staged.shape[0]), pl.ds(place.row, staged.shape[1])
        plgpu.copy_smem_to_gmem(staged, refs["maxima"].at[groups, rows])
        forward_kernel.write(refs, place, part._replace(max=top))


@dataclasses.dataclass(frozen=True)
class StoredBlocks:
    """Stores the logits of as many rows as fit the budget, and selects k; static and hashable."""

    spec: HeadSpec
    k: int
    scratch_bytes: int | None

    def block_sizes(self, tokens: int) -> Plan:
        """Blocks of nearly equal size, in full tiles, as large as the budget allows."""
        limit = budget(self.scratch_bytes, self._scratch(1), self._scratch(tokens), "one row of logits")
        v, choices = self.spec.vocab_size, ((rows, 0) for rows in sizes(tokens, _ROW_STEP, 1))
        rows, _ = quickest(choices, lambda rows, _: self._scratch(rows), limit, lambda rows, _: -(-tokens // rows))
        return Plan(rows, v, self._scratch(rows), v)

    def find(self, head: Head, batch: Batch, plan: Plan) -> tuple[Largest, Partial]:
        """From the stored logits of a block and their maxima."""
        rows, inverse = len(batch.hidden), batch.inverse_temperature
        of_logits, given = operands.operands("logits", head, batch.hidden, _FIELDS)
        shape = self._shape(rows)
        outputs = {
            **forward_kernel.outputs(_FIELDS, given.product),
            "logits": jax.ShapeDtypeStruct(shape, jnp.float32),
            "maxima": jax.ShapeDtypeStruct((shape[1] // GROUP, given.product.padded_rows), jnp.float32),
        }
        inputs = {"inverse_temperature": None if inverse is None else given.by_row(inverse.astype(jnp.float32), 1)}
        found = given.run("pallas_ce_logits", LogitsEpilogue(of_logits), outputs, inputs)
        partial = jax.tree.map(lambda x: x[:rows], forward_kernel.read(found, _FIELDS))
        # Padding's rows are undefined, and dropped at the end: a slice of the stored array might be a copy.
        groups, maxima = found["logits"].reshape(shape[0], -1, GROUP), found["maxima"].T[: shape[0]]
        return jax.tree.map(lambda x: x[:rows], largest_in_groups(groups, self.k, maxima)), partial

    def _shape(self, rows: int) -> tuple[int, int]:
        """Shape of the stored logits: whole groups."""
        return operands.stored_shape(rows, operands.round_up(self.spec.vocab_size, GROUP))

    def _scratch(self, rows: int) -> int:
        """Bytes of logits, maxima in full tiles, candidates and hidden states."""
        shape = self._shape(rows)
        stored, groups = 4 * math.prod(shape), shape[1] // GROUP
        maxima = 4 * _MAXIMA_ARRAYS * operands.round_up(rows, LOGITS.tile_rows) * groups
        candidates = 4 * _CANDIDATE_ARRAYS * rows * min(self.k, groups) * GROUP
        return stored + maxima + candidates + self.spec.dtype.itemsize * rows * self.spec.hidden_size
