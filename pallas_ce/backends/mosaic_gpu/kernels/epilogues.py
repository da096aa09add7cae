"""Row-wise arithmetic on a tile of logits in registers, and the epilogue that stores dlogits.

Exponentials are base 2, as the instruction is: `e^{z-m} = 2^{(z-m)·log2e}`. The form `2^{z·log2e - m·log2e}` would save
an instruction, and round `m·log2e` at the size of the logits.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue, Place, Thread
from pallas_ce.backends.protocol import Gradient
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.table import Partial, mean_distance

LOG2E = math.log2(math.e)

# Distances are cut off here, since -inf would make 0·(-inf); e^{-200} is 0 in float32.
FARTHEST = -200.0


@dataclasses.dataclass(frozen=True)
class LogitSpec:
    """How products become logits, `softcap(scale·(product + bias))`; static.

    The inputs "bias" `[padded V]` float32 and "scale" `[1]` float32 are there if the head has them. An input "valid"
    `[1]` int32 is the number of valid columns, where it is known at run time only; else they are `columns`. Some tile
    has others where `ragged`.
    """

    columns: int
    ragged: bool
    softcap: float | None
    uniform_weight: float

    def logits(self, refs: dict[str, Any], column: jax.Array, product: jax.Array) -> jax.Array:
        """Capped logits of a tile that begins at `column`; undefined in columns that are not valid."""
        z = product
        if "bias" in refs:
            z = z + layouts.columns_of(refs["bias"], column, z.shape)
        if "scale" in refs:
            z = z * refs["scale"][0]
        if self.softcap is not None:
            # c·tanh(z/c) = c - 2c/(e^{2z/c} + 1), to 1e-7·c, at ±inf too; the hardware's tanh is good to 5e-4 only.
            z = self.softcap - 2 * self.softcap / (jnp.exp2(z * (2 * LOG2E / self.softcap)) + 1.0)
        return z

    def rest(self, refs: dict[str, Any], column: jax.Array) -> jax.Array:
        """How many columns from `column` on belong to the vocabulary; below 0 behind its end."""
        return (refs["valid"][0] if "valid" in refs else self.columns) - column

    def mask(self, refs: dict[str, Any], column: jax.Array, x: jax.Array, value: float = -jnp.inf) -> jax.Array:
        """Logits, or numbers made of them, with `value` where not valid."""
        return jnp.where(layouts.column_ids(x.shape) < self.rest(refs, column), x, value) if self.ragged else x


def pieces(x: jax.Array, width: int | None) -> Iterator[tuple[int, jax.Array]]:
    """The parts of `x [rows, columns]` that are `width` columns wide, each with its first column; None: the whole.

    Working piece by piece keeps fewer values in registers, where many vectors must be kept beside them.
    """
    width = width or x.shape[1]
    for first in range(0, x.shape[1], width):
        yield first, x[:, first : first + width]


def piece_partial(
    spec: LogitSpec,
    fields: tuple[str, ...],
    refs: dict[str, Any],
    column: jax.Array,
    z: jax.Array,
    reference: jax.Array | None,
) -> tuple[Partial, jax.Array | None]:
    """The `fields` of a piece that begins at `column`, as in `table.FIELDS`, and `e^{z - reference}`.

    `z` is -inf where not valid. "u" `[padded V]` float32, 0 there, is in `refs` if the mean is weighted. The targets'
    logits come from `entries`.
    """
    shape = z.shape
    found: dict[str, jax.Array] = {}
    if "weighted_sum" in fields:
        measured = z - layouts.along_columns(present(reference), shape)
        if "u" in refs:
            u = layouts.columns_of(refs["u"], column, shape)
            found["weighted_sum"] = layouts.sum_of_rows(jnp.where((u != 0) & (measured != 0), u * measured, 0.0))
        else:
            found["weighted_sum"] = layouts.sum_of_rows(spec.mask(refs, column, measured, 0.0)) * spec.uniform_weight
    if "sum_weights" in fields:
        if "u" in refs:
            found["sum_weights"] = layouts.sum_of_rows(layouts.columns_of(refs["u"], column, shape))
        else:
            count: Any = float(shape[1])
            if spec.ragged:
                count = jnp.clip(spec.rest(refs, column), 0, shape[1]).astype(jnp.float32)
            found["sum_weights"] = layouts.constant_by_row(shape[0], spec.uniform_weight * count)
    if "max" in fields:
        found["max"] = z.max(axis=1)
    if "argmax" in fields:
        # The lowest column that attains the maximum; a NaN attains it.
        largest = (z == layouts.along_columns(found["max"], shape)) | (z != z)
        place = jnp.where(largest, layouts.column_ids(shape), shape[1])
        found["argmax"] = column + place.min(axis=1)
    exp = None
    if "sum_exp" in fields:
        distance = z - layouts.along_columns(present(reference), shape)
        if "sum_exp_shifted" in fields:
            distance = jnp.maximum(distance, FARTHEST)
        exp = jnp.exp2(distance * LOG2E)
        if "sum_exp_shifted" in fields:
            found["sum_exp_shifted"] = layouts.sum_of_rows(exp * distance)
        found["sum_exp"] = layouts.sum_of_rows(exp)
        if "sum_exp_sq" in fields:
            found["sum_exp_sq"] = layouts.sum_of_rows(exp * exp)
        if "sum_exp_deviation_sq" in fields:
            deviation = distance - layouts.along_columns(mean_distance(Partial(**found)), shape)
            found["sum_exp_deviation_sq"] = layouts.sum_of_rows(exp * (deviation * deviation))
    if missing := sorted(set(fields) - set(found)):
        raise NotImplementedError(f"implementation='mosaic_gpu' does not compute {missing} of a Partial: use 'xla'")
    return Partial(**found), exp


def vectors_by_row(gradient: Gradient) -> dict[str, jax.Array]:
    """The given coefficients and "reference", as the epilogue reads them."""
    found = {name: x.astype(jnp.float32) for name, x in gradient.coefficients._asdict().items() if x is not None}
    return found if gradient.reference is None else found | {"reference": gradient.reference}


# The fields of `Coefficients` that the epilogue's formula has.
_TRANSLATED = frozenset(
    ("prob", "prob_log_prob", "prob_sq", "prob_deviation_sq", "entropy", "target", "argmax", "logit_weights")
)


@dataclasses.dataclass(frozen=True)
class DlogitsEpilogue(Epilogue):
    """Stores a tile's dlogits, by the formula of `statistics.gradient`.

        dz_j = p_j·(A + B·log p_j + C·p_j + G·(log p_j + H)²) + D·1[j = t] + E·u_j + F·1[j = argmax],

    times 1 - (z_j/c)² under a soft cap. An absent term costs nothing; each present one adds a vector by row to a
    warpgroup's registers. The terms of single entries, D and F, are made here only for materialized logits, whose
    kernels wait for memory anyway. XLA makes them for a head (`entries`).
    """

    logits: LogitSpec
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
            for first, piece in pieces(values, at.config.piece):
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
                log_p = jnp.maximum(log_p, FARTHEST)
            p = jnp.exp2(log_p * LOG2E)
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
