"""Partial statistics on their way from a kernel's registers to XLA: which there are, writing, reading, joining."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Place
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Config
from pallas_ce.statistics.row import Partial, fields_for, merge
from pallas_ce.statistics.table import FIELDS

_OUTPUT = "partial_"


def vectors(names: frozenset[str]) -> int:
    """How many vectors by row a kernel keeps for these statistics, as the rule counts them; no targets' logits.

    A maximum is there anyway. A weighted sum counts as two, with the sum of the weights. Deviations count as three: a
    piece's mean must be known first, and its distances are held until then.
    """
    fields = set(fields_for(names)) - {"max"}
    return len(fields) + 2 * ("sum_exp_deviation_sq" in fields)


def outputs(fields: tuple[str, ...], slots: int, padded_rows: int) -> dict[str, Any]:
    """An array `[slots, padded rows]` for each field, so that reading one needs no slice."""
    return {_OUTPUT + field: jax.ShapeDtypeStruct((slots, padded_rows), jnp.float32) for field in fields}


def staging(config: Config) -> dict[str, Any]:
    """Shared memory that `write` passes through."""
    return {"partials_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, config.rows), jnp.float32)}


def write(refs: dict[str, Any], place: Place, partial: Partial) -> None:
    """Writes a warpgroup's `Partial` to the `outputs`."""
    staged = refs["partials_smem"].at[place.warpgroup]
    for field, value in partial._asdict().items():
        if value is not None:
            staged[...] = value.astype(jnp.float32)  # a column number is exact in float32
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, refs[_OUTPUT + field].at[place.slot, pl.ds(place.row, staged.shape[0])])
            plgpu.wait_smem_to_gmem(0)


def read(
    found: dict[str, jax.Array],
    fields: tuple[str, ...],
    rows: int,
    join: Callable[[Partial, Partial], Partial] = merge,
) -> Partial:
    """Joins the windows of a kernel's outputs into one `Partial` of `[rows]`.

    One reduction of XLA's, a few instructions long however many windows there are; `join` is associative and
    commutative, so that it may take them in any order (always the same one).
    """
    windows = Partial(**{field: found[_OUTPUT + field] for field in fields})
    neutral = Partial(**{field: jnp.float32(FIELDS[field].neutral) for field in fields})
    joined = jax.tree.map(lambda x: x[:rows], jax.lax.reduce(windows, neutral, join, (0,)))
    return joined if joined.argmax is None else joined._replace(argmax=joined.argmax.astype(jnp.int32))
