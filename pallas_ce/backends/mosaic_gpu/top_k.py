"""The k largest logits of each row on Hopper: a kernel stores a block's logits, a selection reads few of them.

For each row of V entries the kernel writes 4·V bytes of logits while it multiplies. A tournament
(`streaming.selection`) reads and sorts V/8 bytes of maxima, and 128·k bytes of logits are read again.
"""

import bisect
import dataclasses
import math

import jax

from pallas_ce.backends.mosaic_gpu.kernels import logits_kernel, operands
from pallas_ce.backends.mosaic_gpu.kernels.logits_kernel import GROUP
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming import selection
from pallas_ce.streaming.budget import budget
from pallas_ce.streaming.selection import Largest

# Rows of a block are a multiple of this where there are as many, so that tiles are full.
_ROW_STEP = 256

# Arrays alive at a time, of a row's maxima and of its k groups' entries: as found, by row, sorted with their places.
_MAXIMA_ARRAYS = 3
_CANDIDATE_ARRAYS = 6


@dataclasses.dataclass(frozen=True)
class StoredBlocks:
    """Stores the logits of as many rows as fit the budget, and selects k; static and hashable."""

    spec: HeadSpec
    k: int
    scratch_bytes: int | None

    def block_sizes(self, tokens: int) -> Plan:
        """See `protocol.TopKFinder`."""
        limit = budget(self.scratch_bytes, self._scratch(1), self._scratch(tokens), "one row of logits")
        most = bisect.bisect_right(range(1, tokens + 1), limit, key=self._scratch)
        if _ROW_STEP < most < tokens:
            most -= most % _ROW_STEP
        rows = -(-tokens // -(-tokens // most))  # of nearly equal blocks
        if rows > _ROW_STEP:
            rows = min(tokens, operands.round_up(rows, _ROW_STEP))
        return Plan(rows, self.spec.vocab_size, self._scratch(rows), self.spec.vocab_size)

    def find(self, head: Head, batch: Batch, plan: Plan) -> tuple[Largest, Partial]:
        """See `protocol.TopKFinder`."""
        del plan
        rows = batch.hidden.shape[0]
        logits, maxima, partial = logits_kernel.logits(head, batch.hidden, batch.inverse_temperature)
        # Padding's rows are undefined, and dropped at the end: a slice of the stored array might be a copy.
        padded = logits.shape[0]
        found = selection.largest_in_groups(logits.reshape(padded, -1, GROUP), self.k, maxima.T[:padded])
        return jax.tree.map(lambda x: x[:rows], found), partial

    def _scratch(self, rows: int) -> int:
        """Bytes of logits, maxima in full tiles, candidates and hidden states."""
        shape = logits_kernel.stored_shape(rows, self.spec.vocab_size)
        stored, groups = 4 * math.prod(shape), shape[1] // GROUP
        maxima = 4 * _MAXIMA_ARRAYS * operands.round_up(rows, logits_kernel.CONFIG.tile_rows) * groups
        candidates = 4 * _CANDIDATE_ARRAYS * rows * min(self.k, groups) * GROUP
        return stored + maxima + candidates + self.spec.dtype.itemsize * rows * self.spec.hidden_size
