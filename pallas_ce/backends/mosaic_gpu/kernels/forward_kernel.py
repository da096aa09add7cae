"""The forward: row statistics of hidden·weightᵀ, a `Partial` from each tile.

A tile's `Partial` is measured from the tile's own maximum. Each statistic takes one number in memory for each row and
tile along the vocabulary. A launch works on as many rows as a budget holds.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm.loop import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, operands, partials
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES
from pallas_ce.head import Head
from pallas_ce.statistics.logits import reference_of
from pallas_ce.statistics.row import Partial, add, fields_for, merge, reads_logit_weights


def statistics(
    head: Head,
    hidden: jax.Array,
    names: frozenset[str],
    partial_bytes: int = PARTIALS_BYTES,
    valid_rows: jax.Array | None = None,
) -> Partial:
    """The `Partial` of `hidden [N, H]` over the vocabulary, without the targets' logits.

    `partial_bytes` bounds the temporary memory. Rows from `valid_rows []` on are undefined, and whole tiles of them
    skipped.
    """
    fields = fields_for(names)
    if not fields:
        return Partial()
    config = operands.tiles_of("forward", head, hidden.shape[0], partials.vectors(names))
    given = operands.operands(head, hidden, config, reads_logit_weights(names))
    epilogue = StatisticsEpilogue(given.logits, fields)
    rows = hidden.shape[0]
    return partials.in_launches("pallas_ce_forward", given, epilogue, fields, rows, partial_bytes, valid_rows)


@dataclasses.dataclass(frozen=True)
class StatisticsEpilogue(Epilogue):
    """Writes each tile's `Partial`, measured from its own maximum.

    Attributes:
        logits: how a tile's values become logits.
        fields: the fields of `Partial` to compute.
        shared: whether tiles that are read side by side share one `Partial`.
    """

    logits: epilogues.LogitSpec
    fields: tuple[str, ...]
    shared: bool = False

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """The neutral `Partial` where tiles share one."""
        return epilogues.no_columns(place.config.rows, self.fields) if self.shared else None

    def end(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Writes the `Partial`."""
        partials.write(refs, place, carry)

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> Carry:
        """Finds the maximum, then the sums measured from it."""
        z = self.logits.logits(refs, place.column, values)
        parts = [
            (place.column + first, self.logits.mask(refs, place.column + first, piece))
            for first, piece in epilogues.pieces(z, place.config.width)
        ]
        top = functools.reduce(jnp.maximum, [piece.max(axis=1) for _, piece in parts]) if "max" in self.fields else None
        reference = None if top is None else reference_of(top)

        def of_all(fields: tuple[str, ...]) -> Partial:
            found = (epilogues.piece_partial(self.logits, fields, refs, at, piece, reference)[0] for at, piece in parts)
            return functools.reduce(add, found)

        # A piece needs its own maximum only for `argmax`.
        others = tuple(f for f in self.fields if f != "max" or "argmax" in self.fields)
        found = of_all(others)._replace(max=top)
        return found if carry is None else merge(carry, found)
