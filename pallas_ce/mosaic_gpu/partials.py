"""Partial statistics on their way from a kernel's registers to XLA: which there are, writing, reading, joining."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.mosaic_gpu import gemm
from pallas_ce.mosaic_gpu.config import COMPUTE_WARPGROUPS, Config
from pallas_ce.statistics import Partial, merge


def fields_for(names: frozenset[str], *, own_maximum: bool) -> tuple[str, ...]:
    """The fields of `Partial` that the statistics in `names` need, in order.

    Args:
        names: primitive statistics.
        own_maximum: whether sums of exponentials are measured from the maximum; else from a reference given by row.
    """
    sums = bool(names & {"lse", "entropy", "sum_sq_probs"}) or not own_maximum
    needed = {
        "max": bool(names & {"max_logit", "argmax"}) or (sums and own_maximum),
        "sum_exp": sums,
        "sum_exp_shifted": "entropy" in names,
        "sum_exp_sq": "sum_sq_probs" in names,
        "target_logit": "target_logit" in names,
        "weighted_sum": "mean_logit" in names,
        "argmax": "argmax" in names,
    }
    return tuple(field for field in Partial._fields if needed[field])


def staging(config: Config) -> dict[str, Any]:
    """Shared memory that `write` passes through."""
    return {"partials_smem": plgpu.SMEM((COMPUTE_WARPGROUPS, config.rows), jnp.float32)}


def write(refs: dict[str, Any], place: gemm.Place, partial: Partial) -> None:
    """Writes a warpgroup's `Partial` to `refs["partials"] [fields, slots, padded rows]`."""
    staged = refs["partials_smem"].at[place.warpgroup]
    values = [value for value in partial if value is not None]
    for index, value in enumerate(values):
        staged[...] = value.astype(jnp.float32)  # a column number is exact in float32
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, refs["partials"].at[index, place.slot, pl.ds(place.row, staged.shape[0])])
        plgpu.wait_smem_to_gmem(0)


def read(
    partials: jax.Array, fields: tuple[str, ...], rows: int, join: Callable[[Partial, Partial], Partial] = merge
) -> Partial:
    """Joins the windows of `partials [fields, slots, padded rows]` into one `Partial` of `[rows]`.

    Neighbours are joined pairwise, so that the whole tree is one elementwise computation of XLA's.
    """
    values = dict(zip(fields, partials[:, :, :rows], strict=True))
    if "argmax" in values:
        values["argmax"] = values["argmax"].astype(jnp.int32)
    joined = Partial(**values)
    slots = partials.shape[1]
    while slots > 1:
        pairs = slots // 2
        left = jax.tree.map(lambda x, pairs=pairs: x[0 : 2 * pairs : 2], joined)
        right = jax.tree.map(lambda x, pairs=pairs: x[1 : 2 * pairs : 2], joined)
        rest = jax.tree.map(lambda x, pairs=pairs: x[2 * pairs :], joined)
        joined = jax.tree.map(lambda merged, x: jnp.concatenate([merged, x]), join(left, right), rest)
        slots -= pairs
    return jax.tree.map(lambda x: x[0], joined)


def add(a: Partial, b: Partial) -> Partial:
    """Joins two `Partial`s whose sums of exponentials are measured from one and the same reference."""
    sums = ("sum_exp", "sum_exp_shifted", "sum_exp_sq")
    without = dict.fromkeys(sums)
    added = {f: x + getattr(b, f) for f in sums if (x := getattr(a, f)) is not None}
    return merge(a._replace(**without), b._replace(**without))._replace(**added)


def from_reference(partial: Partial, reference: jax.Array) -> Partial:
    """A `Partial` as `statistics` knows it, from one measured from `reference [rows]`.

    Nothing in the rules for `Partial` needs `max` to be the maximum; so the reference takes its place, unless the
    maximum itself was asked for. Then the sums are moved to it, as `merge` would.
    """
    if partial.max is None:
        return partial._replace(max=reference)
    assert partial.sum_exp is not None
    gap = jnp.where(jnp.isneginf(partial.max), 0.0, reference - partial.max)
    scale = jnp.exp(gap)
    moved = partial._replace(sum_exp=scale * partial.sum_exp)
    if partial.sum_exp_shifted is not None:
        moved = moved._replace(sum_exp_shifted=scale * (partial.sum_exp_shifted + gap * partial.sum_exp))
    if partial.sum_exp_sq is not None:
        moved = moved._replace(sum_exp_sq=scale * scale * partial.sum_exp_sq)
    return moved
