"""The forward: row statistics of hidden·weightᵀ, kept in registers across a window of the vocabulary.

Each tile of logits yields a `Partial` of its own, measured from its own maximum, which `statistics.merge` joins with
the window's. A window writes one `Partial` a row; joining the windows is left to XLA. Memory: `rows × windows` numbers
for each statistic.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.head import Head
from pallas_ce.mosaic_gpu import epilogues, gemm, operands
from pallas_ce.mosaic_gpu.config import COMPUTE_WARPGROUPS, Config
from pallas_ce.statistics import Partial, merge


@dataclasses.dataclass(frozen=True)
class StatisticsEpilogue:
    """Merges each tile's `Partial` into the window's, and writes that."""

    logits: epilogues.LogitSpec
    names: frozenset[str]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of `Partial` that are not None, in order: the leading axis of the output."""
        return partial_fields(self.names)

    def scratch(self, config: Config) -> dict[str, Any]:
        shape = (COMPUTE_WARPGROUPS, len(self.fields), config.rows)
        return {"partials_smem": plgpu.SMEM(shape, jnp.float32)}

    def start(self, refs: dict[str, Any], place: gemm.Place) -> gemm.Carry:
        rows = refs["partials_smem"].shape[2]
        labels = epilogues.rows_of(refs["labels"], place.row, rows) if "labels" in refs else None
        return labels, epilogues.no_columns(rows, self.names)

    def tile(self, refs: dict[str, Any], place: gemm.Place, product: jax.Array, carry: gemm.Carry) -> gemm.Carry:
        labels, window = carry
        z = self.logits.logits(refs, place.column, product)
        part = epilogues.tile_partial(self.logits, self.names, refs, place.column, z, labels)
        return labels, merge(window, part)

    def finish(self, refs: dict[str, Any], place: gemm.Place, carry: gemm.Carry) -> None:
        write_partial(refs, place, carry[1])


def statistics(
    head: Head, hidden: jax.Array, labels: jax.Array | None, names: frozenset[str], config: Config
) -> Partial:
    """The `Partial` of `hidden [N, H]` over the vocabulary entries that kernels cover."""
    fields = partial_fields(names)
    given = operands.operands(
        head, hidden, labels if "target_logit" in names else None, "mean_logit" in names, config, 4 * len(fields)
    )
    slots = gemm.slots(config, given.schedule)
    outputs = {"partials": jax.ShapeDtypeStruct((len(fields), slots, given.padded_rows), jnp.float32)}
    epilogue = StatisticsEpilogue(given.logits, names)
    found = gemm.run("pallas_ce_forward", given, epilogue, given.inputs, outputs)
    return read_partials(found["partials"], fields, given.rows)


def partial_fields(names: frozenset[str]) -> tuple[str, ...]:
    """The fields of `Partial` that the statistics in `names` need."""
    need_sum = bool(names & {"lse", "entropy", "sum_sq_probs"})
    wanted = {
        "max": need_sum or bool(names & {"max_logit", "argmax"}),
        "sum_exp": need_sum,
        "sum_exp_shifted": "entropy" in names,
        "sum_exp_sq": "sum_sq_probs" in names,
        "target_logit": "target_logit" in names,
        "weighted_sum": "mean_logit" in names,
        "argmax": "argmax" in names,
    }
    return tuple(field for field in Partial._fields if wanted[field])


def write_partial(refs: dict[str, Any], place: gemm.Place, partial: Partial) -> None:
    """Writes a `Partial`'s fields to `refs["partials"] [fields, slots, rows]` through shared memory."""
    staged = refs["partials_smem"].at[place.warpgroup]
    rows = staged.shape[1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    values = [value for value in partial if value is not None]
    for index, value in enumerate(values):
        staged[index] = value.astype(jnp.float32)  # a column number is exact in float32
    plgpu.commit_smem()
    for index in range(len(values)):
        plgpu.copy_smem_to_gmem(staged.at[index], refs["partials"].at[index, place.slot, pl.ds(place.row, rows)])
    plgpu.wait_smem_to_gmem(0)


def read_partials(partials: jax.Array, fields: tuple[str, ...], rows: int) -> Partial:
    """Joins the windows of `partials [fields, slots, padded rows]` into one `Partial` of `[rows]`."""

    def of_slot(slot: jax.Array) -> Partial:
        values = dict(zip(fields, slot[:, :rows], strict=True))
        if "argmax" in values:
            values["argmax"] = values["argmax"].astype(jnp.int32)
        return Partial(**values)

    slots = jnp.moveaxis(partials, 1, 0)
    return lax.fori_loop(
        1, slots.shape[0], lambda i, done: merge(done, of_slot(slots[i])), of_slot(slots[0])
    )
