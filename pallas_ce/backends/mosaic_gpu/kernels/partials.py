"""Partial statistics on their way from a kernel's registers to XLA: one of each row and column block."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm.loop import Place
from pallas_ce.statistics.row import Partial, fields_for, joined, merge

_OUTPUT = "partial_"


def vectors(names: frozenset[str]) -> int:
    """How many vectors by row a kernel keeps for these statistics, as the rule counts them; no targets' logits.

    A maximum is there anyway, and sums of u take no registers to speak of. Deviations count as three: a piece's mean
    must be known first, and its distances are held until then.
    """
    fields = set(fields_for(names)) - {"max", "sum_weights"}
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
    found: dict[str, jax.Array],
    fields: tuple[str, ...],
    rows: int,
    join: Callable[[Partial, Partial], Partial] = merge,
) -> Partial:
    """Joins the column blocks of a kernel's outputs into one `Partial` of `[rows]`."""
    whole = joined(Partial(**{field: found[_OUTPUT + field] for field in fields}), join)
    whole = jax.tree.map(lambda x: x[:rows], whole)
    return whole if whole.argmax is None else whole._replace(argmax=whole.argmax.astype(jnp.int32))
