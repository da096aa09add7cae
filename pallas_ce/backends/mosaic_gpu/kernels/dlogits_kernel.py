"""dlogits of a slice of the vocabulary, recomputed: the formula of `statistics.gradient` on a tile in registers.

    dz_j = p_j·(A + B·log p_j + C·p_j + G·(log p_j + H)²) + D·1[j = t] + E·u_j + F·1[j = argmax],

times 1 - (z_j/c)² under a soft cap.

Terms that are absent cost nothing. Each term that is present adds one vector by row to what a warpgroup carries. The
terms of single entries, D and F, are made here only for materialized logits, whose kernels wait for memory anyway.
Those of a head are left to XLA (`entries`).
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import gemm, layouts
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Carry, Place
from pallas_ce.backends.mosaic_gpu.kernels import epilogues, operands
from pallas_ce.backends.mosaic_gpu.schedule.config import Config
from pallas_ce.head import Head
from pallas_ce.statistics.gradient import Coefficients


def dlogits(
    head: Head,
    hidden: jax.Array,
    lse: jax.Array | None,
    coefficients: Coefficients,
    config: Config,
    *,
    part: operands.Part | None = None,
    first: jax.Array | None = None,
    into: Any | None = None,
    valid_rows: jax.Array | None = None,
) -> jax.Array | None:
    """dlogits in the compute dtype, of the shape `operands.stored_shape`, without single entries (see `entries`).

    What is undefined is as in `stash_kernel.stash`, and so are columns behind those of `part`, from the next tile on.

    Args:
        head: the head.
        hidden: `[N, H]`.
        lse: `[N]` where terms need it.
        coefficients: `[N]` each; neither target nor argmax.
        config: of the kernel.
        part: the vocabulary entries; None: all that are `operands.covered`.
        first: `[]` int32: columns before it get 0.
        into: a `jax.Ref` to write to; then nothing is returned.
        valid_rows: `[]` int32: only about as many rows are worked on, the others left undefined; None: all.
    """
    spec = head.spec
    given = operands.operands(
        head,
        hidden,
        config,
        weighted_mean=coefficients.logit_weights is not None,
        bytes_per_row=0,
        width=None if part is None else part.width,
    )
    inputs, numbers = dict(given.inputs), gemm.Numbers()
    for name, values in coefficients._asdict().items():
        if values is not None:
            inputs[name] = given.by_row(values.astype(jnp.float32))
    if lse is not None:
        # A row of -inf only has no distribution; measured from +inf its probabilities are 0 and so is its gradient.
        inputs["lse"] = given.by_row(jnp.where(jnp.isneginf(lse), jnp.inf, lse))
    if part is not None:
        numbers |= {"first_column": part.first, "valid_columns": part.valid}
    if first is not None:
        numbers["zeros_before"] = first
    if valid_rows is not None:
        numbers["valid_rows"] = valid_rows
    shape = operands.stored_shape(given.rows, spec.vocab_size if part is None else part.width)
    outputs: dict[str, Any] = {}
    if into is not None:
        inputs["dlogits"] = into
    else:
        outputs["dlogits"] = jax.ShapeDtypeStruct(shape, spec.dtype)
    present = frozenset(name for name, values in coefficients._asdict().items() if values is not None)
    epilogue = DlogitsEpilogue(given.logits, present, shape[1], spec.dtype, config.rows, config.width)
    return gemm.run(
        "pallas_ce_dlogits", given.launch, given.hidden, given.weight, epilogue, inputs, outputs, numbers
    ).get("dlogits")


# The fields of `Coefficients` that the epilogue's formula has.
_TRANSLATED = frozenset(
    ("prob", "prob_log_prob", "prob_sq", "prob_deviation_sq", "entropy", "target", "argmax", "logit_weights")
)


@dataclasses.dataclass(frozen=True)
class DlogitsEpilogue:
    """Stores a tile's dlogits."""

    logits: epilogues.LogitSpec
    present: frozenset[str]
    columns: int
    dtype: Any
    rows: int
    width: int

    def scratch(self, config: Config) -> dict[str, Any]:
        """Staging for what is written."""
        return {"dlogits_smem": layouts.tile_staging(config.staged, self.columns, self.dtype)}

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Vectors by row that the whole window needs, and numbers."""
        names = (*sorted(self.present), "lse", "labels", "argmax_column")
        carry = {name: layouts.rows_of(refs[name], place.row, self.rows) for name in names if name in refs}
        return carry | {name: refs[name][0] for name in ("first_column", "zeros_before") if name in refs}

    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Stores the gradient, 0 in columns that are not valid."""
        for first, piece in epilogues.pieces(product, self.width):
            column = carry.get("first_column", 0) + place.column + first
            z = self.logits.logits(refs, column, piece)
            gradient = self._gradient(refs, column, z, carry)
            if self.logits.ragged:
                gradient = jnp.where(self.logits.valid(refs, column, z.shape), gradient, 0.0)
            if "zeros_before" in carry:
                before = layouts.column_ids(z.shape) < carry["zeros_before"] - column
                gradient = jnp.where(before, 0.0, gradient)
            layouts.store_piece(
                refs["dlogits_smem"], place.warpgroup, refs["dlogits"], place.row, place.column, first, gradient
            )
        return carry

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Waits until the last tile has left shared memory."""
        plgpu.wait_smem_to_gmem(0)

    def _gradient(self, refs: dict[str, Any], column: jax.Array, z: jax.Array, by_row: dict[str, jax.Array]) -> Any:
        shape = z.shape

        def row(name: str) -> jax.Array:
            return layouts.along_columns(by_row[name], shape)

        if missing := sorted(self.present - _TRANSLATED):
            raise NotImplementedError(f"implementation='mosaic_gpu' has no term for {missing} in dlogits: use 'xla'")
        terms = []
        if "prob" in self.present:
            inner = row("prob")
            if self.present & {"prob_log_prob", "prob_deviation_sq"}:
                log_p = jnp.maximum(z - row("lse"), epilogues.FARTHEST)
                p = jnp.exp2(log_p * epilogues.LOG2E)
            else:
                scaled = layouts.along_columns(by_row["lse"] * epilogues.LOG2E, shape)
                p = jnp.exp2(z * epilogues.LOG2E - scaled)
            if "prob_log_prob" in self.present:
                inner = inner + row("prob_log_prob") * log_p
            if "prob_sq" in self.present:
                inner = inner + row("prob_sq") * p
            if "prob_deviation_sq" in self.present:
                deviation = log_p + row("entropy")
                inner = inner + row("prob_deviation_sq") * (deviation * deviation)
            terms.append(p * inner)
        ids = layouts.column_ids(shape)
        for name, where in (("target", "labels"), ("argmax", "argmax_column")):
            if name in self.present:
                hit = ids == layouts.along_columns(by_row[where] - column, shape)
                terms.append(jnp.where(hit, row(name), 0.0))
        if "logit_weights" in self.present:
            if "u" in refs:
                u = layouts.along_rows(layouts.columns_of(refs["u"], column, shape[1]), shape)
                terms.append(row("logit_weights") * u)
            else:
                terms.append(layouts.along_columns(by_row["logit_weights"] * self.logits.uniform_weight, shape))
        if not terms:  # single entries only
            return jnp.where(ids < 0, z, 0.0)
        total = sum(terms[1:], terms[0])
        if self.logits.softcap is not None:
            ratio = z * (1.0 / self.logits.softcap)
            total = total * (1.0 - ratio * ratio)
        return total
