"""Row-wise arithmetic on a tile of logits in registers: what the kernels' epilogues are made of.

A tile is `[rows, columns]` float32 in the layout of a wgmma accumulator: a row lives in four neighbouring threads, so
sums along it are mostly thread-local, and a vector by row costs four registers. Exponentials are base 2, because that
is the instruction: `e^{z-m} = 2^{z·log2e - m·log2e}` is one multiply-add and one exponential.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_ce.statistics import Partial

LOG2E = math.log2(math.e)

_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# e^{-200} is 0 in float32, so distances below need not be told apart; -inf would make 0·(-inf).
_FARTHEST = -200.0


@dataclasses.dataclass(frozen=True)
class LogitSpec:
    """From products to logits `softcap(scale·(product + bias))`; static.

    Attributes:
        columns: how many there are; those of a tile that lie beyond are not live.
        ragged: whether some tile has columns that are not live.
        bias: whether there is one, as the input "bias" `[padded V]` float32.
        scale: whether there is one, as the input "scale" `[1]` float32.
        softcap: the cap, or None.
        uniform_weight: the u of `mean_logit` where none is given.
    """

    columns: int
    ragged: bool
    bias: bool
    scale: bool
    softcap: float | None
    uniform_weight: float

    def logits(self, refs: dict[str, Any], column: jax.Array, product: jax.Array) -> jax.Array:
        """Capped logits of a tile that begins at `column`; those of columns that are not live mean nothing."""
        z = product
        if self.bias:
            z = z + along_rows(columns_of(refs["bias"], column, z.shape[1]), z.shape)
        if self.scale:
            z = z * refs["scale"][0]
        if self.softcap is not None:
            z = self.softcap * tanh(z * (1.0 / self.softcap))
        return z

    def live(self, column: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """`shape` bool: which entries belong to the vocabulary."""
        return column_ids(shape) < self.columns - column

    def mask(self, column: jax.Array, z: jax.Array) -> jax.Array:
        """Logits with -inf where not live."""
        if not self.ragged:
            return z
        return jnp.where(self.live(column, z.shape), z, -jnp.inf)


def tanh(x: jax.Array) -> jax.Array:
    """tanh x = 1 - 2/(e^{2x} + 1), to 1e-7; the hardware's own is good to 5e-4 only. Right at ±inf as well."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2E)) + 1.0)


def column_ids(shape: tuple[int, int]) -> jax.Array:
    """`shape` int32: each entry's column within the tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def along_columns(by_row: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(by_row, shape, [0])


def along_rows(by_column: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(by_column, shape, [1])


def rows_of(ref: Any, row: jax.Array, rows: int) -> jax.Array:
    """`rows` numbers of a vector by row in global memory."""
    return plgpu.load(ref.at[pl.ds(row, rows)], layout=_BY_ROW, optimized=False)


def columns_of(ref: Any, column: jax.Array, columns: int) -> jax.Array:
    """`columns` numbers of a vector by column in global memory."""
    return plgpu.load(ref.at[pl.ds(column, columns)], layout=_BY_COLUMN, optimized=False)


def constant_by_row(rows: int, value: float, dtype: Any = jnp.float32) -> jax.Array:
    return plgpu.layout_cast(jnp.full((rows,), value, dtype), _BY_ROW)


def finite_or_zero(top: jax.Array) -> jax.Array:
    """A row's reference for exponentials: a row of -inf only is measured from 0, where all its exponentials are 0."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def no_columns(rows: int, names: frozenset[str]) -> Partial:
    """The neutral `Partial`."""

    def zeros(wanted: bool) -> jax.Array | None:
        return constant_by_row(rows, 0.0) if wanted else None

    need_max = bool(names & {"lse", "entropy", "sum_sq_probs", "max_logit", "argmax"})
    return Partial(
        max=constant_by_row(rows, -jnp.inf) if need_max else None,
        sum_exp=zeros(bool(names & {"lse", "entropy", "sum_sq_probs"})),
        sum_exp_shifted=zeros("entropy" in names),
        sum_exp_sq=zeros("sum_sq_probs" in names),
        target_logit=zeros("target_logit" in names),
        weighted_sum=zeros("mean_logit" in names),
        argmax=constant_by_row(rows, 0, jnp.int32) if "argmax" in names else None,
    )


def tile_partial(
    spec: LogitSpec,
    names: frozenset[str],
    refs: dict[str, Any],
    column: jax.Array,
    z: jax.Array,
    labels: jax.Array | None,
) -> Partial:
    """`pallas_ce.statistics.partial_of_tile`, with columns that are not live masked here.

    Args:
        spec: what is live.
        names: primitive statistics to prepare.
        refs: "logit_weights" `[padded V]` float32, 0 where not live, if the mean is weighted.
        column: the tile's first vocabulary entry.
        z: logits `[rows, columns]`.
        labels: `[rows]` int32.
    """
    shape = z.shape
    top = total = shifted = squares = target = weighted = arg = None
    if "target_logit" in names:
        assert labels is not None
        hit = column_ids(shape) == along_columns(labels - column, shape)
        target = jnp.where(hit, z, 0.0).sum(axis=1)
    if "mean_logit" in names:
        if "logit_weights" in refs:
            u = along_rows(columns_of(refs["logit_weights"], column, shape[1]), shape)
            weighted = jnp.where(u != 0, u * z, 0.0).sum(axis=1)
        else:
            counted = jnp.where(spec.live(column, shape), z, 0.0) if spec.ragged else z
            weighted = counted.sum(axis=1) * spec.uniform_weight
    z = spec.mask(column, z)
    if names & {"lse", "entropy", "sum_sq_probs", "max_logit", "argmax"}:
        top = z.max(axis=1)
    if names & {"lse", "entropy", "sum_sq_probs"}:
        assert top is not None
        reference = finite_or_zero(top)
        if "entropy" in names:
            distance = jnp.maximum(z - along_columns(reference, shape), _FARTHEST)
            exp = jnp.exp2(distance * LOG2E)
            shifted = (exp * distance).sum(axis=1)
        else:
            exp = jnp.exp2(z * LOG2E - along_columns(reference * LOG2E, shape))
        total = exp.sum(axis=1)
        if "sum_sq_probs" in names:
            squares = (exp * exp).sum(axis=1)
    if "argmax" in names:
        # The lowest column that attains the maximum.
        place = jnp.where(z == along_columns(top, shape), column_ids(shape), shape[1])
        arg = column + place.min(axis=1)
    return Partial(top, total, shifted, squares, target, weighted, arg)
