"""Row-wise arithmetic on a tile of logits in registers, for the kernels' epilogues.

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
