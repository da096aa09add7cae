"""Partial statistics on their way from a kernel's registers to XLA: one `Partial` for each row and column block."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue, Place
from pallas_ce.backends.mosaic_gpu.kernels.operands import Operands
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES
from pallas_ce.statistics.row import Partial, fields_for, joined, merge
from pallas_ce.streaming.loops import fori_loop

_OUTPUT = "partial_"

# Most launches that a program holds in place of a loop: a choice between branches with loops goes by way of the host.
_MOST_WITHOUT_LOOP = 16


def vectors(names: frozenset[str]) -> int:
    """How many vectors by row a kernel keeps for these statistics, as `schedule.rule` counts them.

    Targets' logits take none, and a maximum is there anyway. A weighted sum counts as two, with the sum of the weights.
    Deviations count as three: a piece's mean must be known first, and its distances are held until then.
    """
    fields = set(fields_for(names)) - {"max"}
    return len(fields) + 2 * ("sum_exp_deviation_sq" in fields)


def outputs(fields: tuple[str, ...], column_blocks: int, padded_rows: int) -> dict[str, Any]:
    """An array `[column blocks, padded rows]` for each field."""
    return {_OUTPUT + field: jax.ShapeDtypeStruct((column_blocks, padded_rows), jnp.float32) for field in fields}


def write(refs: dict[str, Any], place: Place, partial: Partial) -> None:
    """Writes the `Partial` of a warpgroup's part of a tile to the `outputs`."""
    for field, value in partial._asdict().items():
        if value is not None:
            rows = pl.ds(place.row, value.shape[0])
            refs[_OUTPUT + field][place.block, rows] = value.astype(jnp.float32)  # column numbers are exact in float32


def read(
    found: dict[str, jax.Array], fields: tuple[str, ...], join: Callable[[Partial, Partial], Partial] = merge
) -> Partial:
    """Joins the column blocks of a kernel's outputs into one `Partial`."""
    whole = joined(Partial(**{field: found[_OUTPUT + field] for field in fields}), join)
    return whole if whole.argmax is None else whole._replace(argmax=whole.argmax.astype(jnp.int32))


def in_launches(
    name: str,
    given: Operands,
    epilogue: Epilogue,
    fields: tuple[str, ...],
    rows: int,
    partial_bytes: int = PARTIALS_BYTES,
    valid_rows: jax.Array | None = None,
) -> Partial:
    """The `Partial` `[rows]`, from launches of nearly equal size whose partial statistics fit in `partial_bytes`.

    One row of tiles is made in any case. Rows from `valid_rows []` on are undefined, and whole tiles of them skipped.
    """
    config, column_blocks = given.product.config, given.product.column_blocks

    def launch(first: Any, count: int) -> Partial:
        """The `Partial` `[count]` of whole tiles of rows from `first` on."""
        valid = None if valid_rows is None else jnp.clip(valid_rows - first, 0, count)
        numbers = {"valid_rows": valid, "first_row": first if count < rows else None}
        product = dataclasses.replace(given.product, row_blocks=config.row_blocks(count))
        some = given._replace(product=product)
        return read(some.run(name, epilogue, outputs(fields, column_blocks, count), numbers=numbers), fields)

    blocks = config.row_blocks(rows)
    fit = partial_bytes // (4 * len(fields) * column_blocks) // config.tile_rows
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
