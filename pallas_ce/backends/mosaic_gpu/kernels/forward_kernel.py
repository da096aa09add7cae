"""Row statistics of hidden·weightᵀ, a `Partial` from each tile, and how XLA joins these.

*The forward* measures a tile's `Partial` from the tile's own maximum. Each statistic takes one number in memory for
each row and tile along the vocabulary. A launch works on as many rows as a budget holds.

*In_forward's kernel* also stores exponentials measured from a reference that is known in advance, by which all tiles
measure a row's sums; `backends.exponentials` derives their use. If the reference was a bad one, they are made again
from each row's largest logit, which the kernel finds.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.launch import Operands
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue, Place, Thread
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, operands
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, PARTIALS_BYTES, Product
from pallas_ce.head import Head
from pallas_ce.statistics.logits import present, reference_of
from pallas_ce.statistics.row import Partial, add, fields_of, joined, merge
from pallas_ce.statistics.table import FIELDS
from pallas_ce.streaming.loops import fori_loop

_OUTPUT = "partial_"

# Most launches that a program holds in place of a loop: a choice between branches with loops goes by way of the host.
_MOST_WITHOUT_LOOP = 16


def outputs(fields: tuple[str, ...], product: Product) -> dict[str, Any]:
    """An array `[column blocks, padded rows]` for each field."""
    shape = jax.ShapeDtypeStruct((product.column_blocks, product.padded_rows), jnp.float32)
    return {_OUTPUT + field: shape for field in fields}


def write(refs: dict[str, Any], place: Place, partial: Partial) -> None:
    """Writes the `Partial` of a warpgroup's part of a tile to the `outputs`."""
    for field, value in partial._asdict().items():
        if value is not None:
            rows = pl.ds(place.row, value.shape[0])
            refs[_OUTPUT + field][place.block, rows] = value.astype(jnp.float32)  # column numbers are exact in float32


def read(found: dict[str, jax.Array], fields: tuple[str, ...], join: Callable[..., Partial] = merge) -> Partial:
    """Joins the column blocks of a kernel's outputs into one `Partial`."""
    whole = joined(Partial(**{field: found[_OUTPUT + field] for field in fields}), join)
    return whole if whole.argmax is None else whole._replace(argmax=whole.argmax.astype(jnp.int32))


def in_launches(
    name: str,
    given: Operands,
    epilogue: "StatisticsEpilogue",
    rows: int,
    budget: int = PARTIALS_BYTES,
    filled: jax.Array | None = None,
) -> Partial:
    """The `Partial` `[rows]`, from launches of nearly equal size whose partial statistics fit in `budget` bytes.

    One row of tiles is made in any case. Rows from `filled []` on are undefined, and whole tiles of them skipped.
    """
    config, fields = given.product.config, epilogue.fields

    def launch(first: Any, count: int) -> Partial:
        """The `Partial` `[count]` of whole tiles of rows from `first` on."""
        valid = None if filled is None else jnp.clip(filled - first, 0, count)
        numbers = {"valid_rows": valid, "first_row": first if count < rows else None}
        some = given._replace(product=dataclasses.replace(given.product, row_blocks=config.row_blocks(count)))
        return read(some.run(name, epilogue, outputs(fields, some.product), numbers=numbers), fields)

    blocks = config.row_blocks(rows)
    fit = budget // (4 * len(fields) * given.product.column_blocks) // config.tile_rows
    launches = -(-blocks // max(1, fit))
    count = -(-blocks // launches) * config.tile_rows
    launches = -(-rows // count)
    if launches <= _MOST_WITHOUT_LOOP:
        each = [launch(0, count)]
        for index in range(1, launches):  # one after the other, in the same memory
            first, each[-1] = lax.optimization_barrier((jnp.int32(index * count), each[-1]))
            each.append(launch(first, count))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[:rows], *each)

    def one(index: jax.Array, whole: Partial) -> Partial:
        first = index * count
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, (first,)), whole, launch(first, count))

    some = jax.eval_shape(lambda: launch(0, count))
    empty = jax.tree.map(lambda x: lax.empty((launches * count,), x.dtype), some)
    return jax.tree.map(lambda x: x[:rows], fori_loop(0, launches, one, empty))


def statistics(
    head: Head, hidden: jax.Array, names: frozenset[str], budget: int = PARTIALS_BYTES, filled: jax.Array | None = None
) -> Partial:
    """The `Partial` of `hidden [N, H]` over the vocabulary, without the targets' logits; see `in_launches`."""
    if not (fields := fields_of(names, targets=False)):
        return Partial()
    logits, given = operands.operands("forward", head, hidden, fields)
    return in_launches("pallas_ce_forward", given, StatisticsEpilogue(logits, fields), len(hidden), budget, filled)


@dataclasses.dataclass(frozen=True)
class StatisticsEpilogue(Epilogue):
    """Writes each tile's `Partial`, measured from its own maximum; one of tiles side by side where it is `shared`."""

    logits: epilogues.LogitSpec
    fields: tuple[str, ...]
    shared: bool = False

    def __call__(self, refs: dict[str, Any], place: Place, thread: Thread) -> None:
        """Finds the maximum, then the sums measured from it."""
        neutral = None
        if self.shared:
            dtypes = {f: jnp.int32 if f == "argmax" else jnp.float32 for f in self.fields}
            value = functools.partial(layouts.constant_by_row, place.config.rows)
            neutral = Partial(**{f: value(FIELDS[f].neutral, dtype) for f, dtype in dtypes.items()})

        def tile(at: Place, values: jax.Array, before: Partial | None) -> Partial:
            z = self.logits.logits(refs, at.column, values)
            parts = [
                (at.column + first, self.logits.mask(refs, at.column + first, piece))
                for first, piece in epilogues.pieces(z, at.config.piece)
            ]
            top = functools.reduce(jnp.maximum, [x.max(axis=1) for _, x in parts]) if "max" in self.fields else None
            reference = None if top is None else reference_of(top)
            # A piece needs its own maximum only for `argmax`.
            fields = tuple(f for f in self.fields if f != "max" or "argmax" in self.fields)
            each = (epilogues.piece_partial(self.logits, fields, refs, *part, reference)[0] for part in parts)
            found = functools.reduce(add, each)._replace(max=top)
            return found if before is None else merge(before, found)

        write(refs, place, present(thread.each(tile, neutral)))


# The fields that need no exponential.
_OF_LOGITS = ("weighted_sum", "max", "argmax")


@dataclasses.dataclass(frozen=True)
class StashEpilogue(Epilogue):
    """Stores a tile's exponentials and adds up its statistics."""

    logits: epilogues.LogitSpec
    fields: tuple[str, ...]
    target = "stash"

    def __call__(self, refs: dict[str, Any], place: Place, thread: Thread) -> None:
        """Stores exponentials rounded, and sums them unrounded."""
        # Tall tiles leave no register to hold the rows' references during the product.
        early = layouts.rows_of(refs["reference"], place.row, place.config.rows) if place.config.rows <= BLOCK else None
        values = thread.multiply()
        whole = None
        reference = layouts.rows_of(refs["reference"], place.row, place.config.rows) if early is None else early
        of_logits = tuple(field for field in self.fields if field in _OF_LOGITS)
        of_exponentials = tuple(field for field in self.fields if field not in _OF_LOGITS)
        for first, piece in epilogues.pieces(values, place.config.piece):
            column = place.column + first
            z = self.logits.mask(refs, column, self.logits.logits(refs, column, piece))
            # In this order no register spills: each piece leaves the registers as soon as it can.
            part, _ = epilogues.piece_partial(self.logits, of_logits, refs, column, z, reference)
            sums, exp = epilogues.piece_partial(self.logits, of_exponentials, refs, column, z, reference)
            part = Partial(*(x if y is None else y for x, y in zip(part, sums, strict=True)))
            whole = part if whole is None else add(whole, part)
            self.store(refs, place, first, present(exp))
        write(refs, place, present(whole))
