"""The in-forward mode's kernel: statistics, and every logit's exponential `e^{z_ij - e_i}` kept in 16 bits.

`backends.exponentials` derives their use. The reference `e_i`, near row i's lse, is known in advance, so that all tiles
measure a row's sums from one number. The kernel also finds each row's largest logit, from which the exponentials are
made again where the reference was a bad one. The statistics come from the unrounded values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import Carry, Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, forward_kernel, operands
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK
from pallas_ce.head import Head
from pallas_ce.statistics.row import Partial, add, fields_for, reads_logit_weights

# The fields that need no exponential.
_OF_LOGITS = ("weighted_sum", "max", "argmax")


def stash(
    head: Head,
    hidden: jax.Array,
    reference: jax.Array,
    names: frozenset[str],
    valid_rows: jax.Array | None = None,
    into: jax.Array | None = None,
) -> tuple[Callable[[], Partial], jax.Array]:
    """`Block.exponentials` of `hidden [N, H]`.

    `E` has the shape `operands.stored_shape`. It is 0 in padding's columns as far as tiles reach, and undefined beyond
    and in rows from N on. `reference [N]` is finite. Rows from `valid_rows []` on are undefined, and whole tiles of
    them skipped. In an earlier `E` to write `into`, skipped rows keep their exponentials.
    """
    rows, spec = hidden.shape[0], head.spec
    # The sums of u are the same for all rows.
    fields = tuple(field for field in fields_for(names | {"lse"}) if field != "sum_weights")
    config = operands.tiles_of("stash", head, rows, 1 + forward_kernel.vectors(names))
    given = operands.operands(head, hidden, config, reads_logit_weights(names))
    # One kernel serves a program that learns at run time whether rows are skipped, or E is to be made again: the kernel
    # always reads how many rows are valid, and always writes into an array.
    numbers = {"valid_rows": jnp.int32(rows) if valid_rows is None else valid_rows}
    outputs = forward_kernel.outputs(fields, given.product)
    outputs["stash"] = lax.empty(operands.stored_shape(rows, spec.vocab_size), spec.dtype) if into is None else into
    inputs = {"reference": given.by_row(reference)}
    found = given.run("pallas_ce_stash", StashEpilogue(given.logits, fields), outputs, inputs, numbers)
    stored = found.pop("stash")

    def partial() -> Partial:
        whole = jax.tree.map(lambda x: x[:rows], forward_kernel.read(found, fields, add))
        if whole.weighted_sum is None:
            return whole
        u = head.tile_logit_weights(0, given.logits.columns)
        if head.valid_columns is not None:
            u = jnp.where(jnp.arange(given.logits.columns) < head.valid_columns, u, 0.0)
        return whole._replace(sum_weights=jnp.full(rows, u.sum()))

    return partial, stored


@dataclasses.dataclass(frozen=True)
class StashEpilogue(Epilogue):
    """Stores a tile's exponentials and adds up its statistics."""

    logits: epilogues.LogitSpec
    fields: tuple[str, ...]
    target = "stash"

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Reads the rows' references; tall tiles leave no register to hold them during the product."""
        return layouts.rows_of(refs["reference"], place.row, place.config.rows) if place.config.rows <= BLOCK else None

    def tile(self, refs: dict[str, Any], place: Place, values: jax.Array, carry: Carry) -> None:
        """Stores exponentials rounded, and sums them unrounded."""
        whole = None
        reference = layouts.rows_of(refs["reference"], place.row, place.config.rows) if carry is None else carry
        of_logits = tuple(field for field in self.fields if field in _OF_LOGITS)
        of_exponentials = tuple(field for field in self.fields if field not in _OF_LOGITS)
        for first, piece in epilogues.pieces(values, place.config.piece):
            column = place.column + first
            z = self.logits.mask(refs, column, self.logits.logits(refs, column, piece))
            # In this order no register spills: each piece leaves the registers as soon as it can.
            part, _ = epilogues.piece_partial(self.logits, of_logits, refs, column, z, reference)
            sums, exp = epilogues.piece_partial(self.logits, of_exponentials, refs, column, z, reference)
            assert exp is not None
            part = Partial(*(x if y is None else y for x, y in zip(part, sums, strict=True)))
            whole = part if whole is None else add(whole, part)
            self.store(refs, place, first, exp)
        assert whole is not None
        forward_kernel.write(refs, place, whole)
