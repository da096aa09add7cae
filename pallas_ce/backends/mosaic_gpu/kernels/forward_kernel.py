"""The forward: row statistics of hidden·weightᵀ, kept in registers across a window of the vocabulary.

Each tile of logits yields a `Partial` of its own, measured from its own maximum, which `row.merge` joins with the
window's. A window writes one `Partial` a row; joining the windows is left to XLA. Memory: `rows × windows` numbers for
each statistic.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, operands, partials
from pallas_ce.backends.mosaic_gpu.schedule.config import PARTIALS_BYTES, Config, keeps_pace
from pallas_ce.head import Head
from pallas_ce.statistics.logits import reference_of
from pallas_ce.statistics.row import Partial, add, fields_for, merge, reads_logit_weights


def statistics(
    head: Head,
    hidden: jax.Array,
    names: frozenset[str],
    config: Config,
    partial_bytes: int = PARTIALS_BYTES,
    valid_rows: jax.Array | None = None,
) -> Partial:
    """The `Partial` of `hidden [N, H]` over the vocabulary entries that are `operands.covered`; no targets.

    `partial_bytes` bounds the temporary memory. With `valid_rows []` only about as many rows are worked on; what is
    returned for the others is undefined.
    """
    fields = fields_for(names)
    if not fields:
        return Partial()
    weighted, bytes_per_row = reads_logit_weights(names), 4 * len(fields)
    given = operands.operands(head, hidden, config, weighted, bytes_per_row, partial_bytes=partial_bytes)
    outputs = partials.outputs(fields, given.slots, given.padded_rows)
    epilogue = StatisticsEpilogue(given.logits, fields, config.width)
    numbers = None if valid_rows is None else {"valid_rows": valid_rows}
    paced = keeps_pace(config, given.rows, given.logits.columns, given.product.length)
    found = given.run("pallas_ce_forward", epilogue, outputs, numbers=numbers, paced=paced)
    return partials.read(found, fields, given.rows)


@dataclasses.dataclass(frozen=True)
class StatisticsEpilogue(Epilogue):
    """Merges each tile's `Partial` into the window's, and writes that."""

    logits: epilogues.LogitSpec
    fields: tuple[str, ...]
    width: int

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for what is written."""
        return partials.staging(config)

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Nothing seen yet."""
        return epilogues.no_columns(refs["partials_smem"].shape[1], self.fields)

    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Measures the tile from its own maximum, and merges it into the window."""
        column = place.column
        z = self.logits.logits(refs, column, product)
        parts = [
            (column + first, self.logits.mask(refs, column + first, piece))
            for first, piece in epilogues.pieces(z, self.width)
        ]
        top = functools.reduce(jnp.maximum, [piece.max(axis=1) for _, piece in parts]) if "max" in self.fields else None
        reference = None if top is None else reference_of(top)

        def of_all(fields: tuple[str, ...]) -> Partial:
            found = (epilogues.piece_partial(self.logits, fields, refs, at, piece, reference)[0] for at, piece in parts)
            return functools.reduce(add, found)

        # A piece's own maximum only matters for finding its place.
        others = tuple(f for f in self.fields if f != "max" or "argmax" in self.fields)
        return merge(carry, of_all(others)._replace(max=top))

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Writes the window's statistics."""
        partials.write(refs, place, carry)
