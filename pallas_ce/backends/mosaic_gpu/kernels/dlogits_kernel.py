"""dlogits of a slice of the vocabulary, recomputed: the formula of `statistics.gradient` on a tile in registers.

    dz_j = p_j·(A + B·log p_j + C·p_j + G·(log p_j + H)²) + D·1[j = t] + E·u_j + F·1[j = argmax],

times 1 - (z_j/c)² under a soft cap.

An absent term costs nothing. Each present term adds one vector by row to a warpgroup's registers. The terms of single
entries, D and F, are made here only for materialized logits, whose kernels wait for memory anyway. XLA makes them for a
head (`entries`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue, Place, Thread
from pallas_ce.backends.mosaic_gpu.kernels import epilogues
from pallas_ce.statistics.gradient import Coefficients


def vectors_by_row(coefficients: Coefficients, reference: jax.Array | None) -> dict[str, jax.Array]:
    """The given coefficients and "reference", as the epilogue reads them."""
    found = {name: x.astype(jnp.float32) for name, x in coefficients._asdict().items() if x is not None}
    return found if reference is None else found | {"reference": reference}


# The fields of `Coefficients` that the epilogue's formula has.
_TRANSLATED = frozenset(
    ("prob", "prob_log_prob", "prob_sq", "prob_deviation_sq", "entropy", "target", "argmax", "logit_weights")
)


@dataclasses.dataclass(frozen=True)
class DlogitsEpilogue(Epilogue):
    """Stores a tile's dlogits."""

    logits: epilogues.LogitSpec
    target = "dlogits"

    def __call__(self, refs: dict[str, Any], place: Place, thread: Thread) -> None:
        """Writes 0 in columns that are not valid, and in rows that do not count."""
        names = (*sorted(Coefficients._fields), "reference", "labels", "argmax_column", "counts")
        carry = {name: layouts.rows_of(refs[name], place.row, place.config.rows) for name in names if name in refs}
        if "reference" in carry:
            # A row of only -inf has no distribution: measured from +inf, its probabilities and its gradient are 0.
            carry["reference"] = jnp.where(carry["reference"] == -jnp.inf, jnp.inf, carry["reference"])
        if "first_column" in refs:
            carry["first_column"] = refs["first_column"][0]

        def tile(at: Place, values: jax.Array, carry: dict[str, jax.Array]) -> dict[str, jax.Array]:
            if "counts" in carry:
                # Rows that do not count have coefficients of 0. Their logits become 0: a nan or inf must not matter.
                values = jnp.where(layouts.along_columns(carry["counts"], values.shape) > 0, values, 0.0)
            for first, piece in epilogues.pieces(values, at.config.piece):
                column = carry.get("first_column", 0) + at.column + first
                gradient = self._gradient(refs, column, self.logits.logits(refs, column, piece), carry)
                self.store(refs, at, first, self.logits.mask(refs, column, gradient, 0.0))
            return carry

        thread.each(tile, carry)

    def _gradient(self, refs: dict[str, Any], column: jax.Array, z: jax.Array, by_row: dict[str, jax.Array]) -> Any:
        shape = z.shape

        def row(name: str) -> jax.Array:
            return layouts.along_columns(by_row[name], shape)

        if missing := sorted((by_row.keys() & Coefficients._fields) - _TRANSLATED):
            raise NotImplementedError(f"implementation='mosaic_gpu' has no term for {missing} in dlogits: use 'xla'")
        terms = []
        if "prob" in by_row:
            inner = row("prob")
            log_p = z - row("reference")
            if by_row.keys() & {"prob_log_prob", "prob_deviation_sq"}:
                log_p = jnp.maximum(log_p, epilogues.FARTHEST)
            p = jnp.exp2(log_p * epilogues.LOG2E)
            if "prob_log_prob" in by_row:
                inner = inner + row("prob_log_prob") * log_p
            if "prob_sq" in by_row:
                inner = inner + row("prob_sq") * p
            if "prob_deviation_sq" in by_row:
                deviation = log_p + row("entropy")
                inner = inner + row("prob_deviation_sq") * (deviation * deviation)
            terms.append(p * inner)
        ids = layouts.column_ids(shape)
        for name, where in (("target", "labels"), ("argmax", "argmax_column")):
            if name in by_row:
                hit = ids == layouts.along_columns(by_row[where] - column, shape)
                terms.append(jnp.where(hit, row(name), 0.0))
        if "logit_weights" in by_row:
            if "u" in refs:
                terms.append(row("logit_weights") * layouts.columns_of(refs["u"], column, shape))
            else:
                terms.append(layouts.along_columns(by_row["logit_weights"] * self.logits.uniform_weight, shape))
        if not terms:  # single entries only
            return jnp.where(ids < 0, z, 0.0)
        total = sum(terms[1:], terms[0])
        if self.logits.softcap is not None:
            ratio = z * (1.0 / self.logits.softcap)
            total = total * (1.0 - ratio * ratio)
        return total
