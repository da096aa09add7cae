"""The projection head and the rows it is applied to, as data: arrays, and the static facts that shape a kernel."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.streaming.gradient_products import BY_COLUMN, NO_ARRAYS, Arrays, PerInput
from pallas_ce.streaming.rows import present
from pallas_ce.streaming.tiles import Tile


def common_dtype(a: Any, b: Any) -> np.dtype:
    """What two dtypes promote to by JAX's standard rule, whichever one is set for the program around."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(a, b))


def tempered(logits: jax.Array, inverse_temperature: jax.Array | None) -> jax.Array:
    """`logits [n, c]` times `inverse_temperature [n]`, after the cap and in the accumulator dtype."""
    return logits if inverse_temperature is None else logits * inverse_temperature[:, None]


# In place of a head's weight: the hidden states are the logits already, which the caller holds.
NO_WEIGHT: Any = None


# JAX's names for products of float32 operands that a GPU makes in TF32.
_TF32 = (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.TF32_TF32_F32)


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Static facts of a head; hashable, so that they key compilation caches."""

    hidden_size: int  # H
    weight_rows: int  # vocabulary entries the weight holds, padding included
    vocab_size: int  # V, the entries that exist; those from V on are padding
    vocab_axis: int  # the weight's vocabulary axis: 0 for `[V, H]`, 1 for `[H, V]`
    dtype: np.dtype  # compute dtype, which the operands of every product have
    softcap: float | None  # the cap c of `c·tanh(x/c)`, or None
    whole_vocab_size: int | None = None  # the V of `mean_logit`, where the weight is part of a larger one
    # How every product multiplies its operands. Only float32 operands have several levels; DEFAULT is the platform's
    # quickest.
    precision: jax.lax.Precision | jax.lax.DotAlgorithmPreset = jax.lax.Precision.DEFAULT
    rank: int = 0  # r of a low-rank term, or 0
    scaled_entries: bool = False  # whether there is a `vocab_scale`

    @property
    def width(self) -> int:
        """Numbers that a logit's products read of a row, and of a column."""
        return self.hidden_size + self.rank

    @property
    def uniform_weight(self) -> float:
        """1/V, the u of `mean_logit` where none is given."""
        return 1.0 / (self.whole_vocab_size or self.vocab_size)

    @property
    def tf32(self) -> bool:
        """Whether a GPU multiplies the operands in TF32."""
        return self.dtype == np.float32 and self.precision in _TF32

    def needed_products(self, needs_grad: PerInput[bool]) -> PerInput[bool]:
        """The products that gradients are made of; other inputs have none, and neither buffers nor collectives.

        The scale's gradient comes from hidden's and the bias's products, see `scale_gradient`.
        """
        hidden, bias = needs_grad.hidden or needs_grad.logit_scale, needs_grad.bias or needs_grad.logit_scale
        down = bool(self.rank) and (hidden or needs_grad.down)
        return needs_grad._replace(hidden=hidden, bias=bias, logit_scale=False, down=down)

    def with_padding(self, columns: int) -> "HeadSpec":
        """The same facts, with padding for vocabulary, which then has `columns` entries."""
        whole = self.whole_vocab_size or self.vocab_size
        return dataclasses.replace(self, vocab_size=columns, whole_vocab_size=whole)

    @property
    def accumulator(self) -> np.dtype:
        """The dtype of products, statistics and losses: float32, or float64 for float64."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Batch(NamedTuple):
    """The rows a head is applied to, or a block of them: a pytree whose leaves begin with the same dimensions."""

    hidden: jax.Array  # `[..., H]`; in a block `[n, H]`
    labels: jax.Array | None = None  # `[...]`, or `[..., K]` for K targets of each row: int32, -1 for no target
    # `[...]` in the accumulator dtype, or None for 1: what the capped logits are multiplied by. A constant.
    inverse_temperature: jax.Array | None = None
    low: jax.Array | None = None  # `[..., r]` in the compute dtype: what `up` is multiplied by, see `Head.with_low`

    @property
    def leading(self) -> tuple[int, ...]:
        """The rows' shape."""
        return self.hidden.shape[:-1]

    @property
    def targets(self) -> tuple[int, ...]:
        """The labels' axes beside the rows': `()` or `(K,)`."""
        return () if self.labels is None else self.labels.shape[self.hidden.ndim - 1 :]


class BatchSpec(NamedTuple):
    """Static facts of a `Batch` that a backend may have to refuse."""

    targets: int | None = None  # K where each row has K targets
    row_temperature: bool = False  # whether each row has a temperature


PLAIN = BatchSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """A head's arrays, a pytree.

    Logits are `softcap(logit_scale · (vocab_scale·(hidden·weight) + bias))`, over a row's temperature.

    With a low-rank term the weight W is in effect `W + up·down`, which is never formed: `hidden·weight` is then
    `hidden·Wᵀ + (hidden·downᵀ)·upᵀ`.
    """

    weight: jax.Array  # `[V', H]` or `[H, V']` with `V' = spec.weight_rows`, any floating dtype; or `NO_WEIGHT`
    bias: jax.Array | None  # `[V']`
    logit_scale: jax.Array | None  # `[]` in the accumulator dtype; None: 1
    logit_weights: jax.Array | None  # `[V]` in the accumulator dtype, the u of `mean_logit`; None: 1/V. A constant
    spec: HeadSpec = dataclasses.field(metadata={"static": True})
    # `[]` int32, how many of the V columns exist, where that is known only at run time: a shard of a padded vocabulary
    # may hold padding. None: all.
    valid_columns: jax.Array | None = None
    up: jax.Array | None = None  # `[V', r]`, whichever way the weight lies, any floating dtype
    down: jax.Array | None = None  # `[r, H]` in the accumulator dtype
    vocab_scale: jax.Array | None = None  # `[V']`; None: 1

    def matmul(self, a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: np.dtype | None = None) -> jax.Array:
        """Contracts axis `contract[0]` of `a [n, m]` with `contract[1]` of `b`: compute-dtype operands.

        The result has the accumulator's dtype, or `dtype`.
        """
        spec = self.spec
        return jax.lax.dot_general(
            a.astype(spec.dtype),
            b.astype(spec.dtype),
            (((contract[0],), (contract[1],)), ((), ())),
            precision=spec.precision,
            preferred_element_type=dtype or spec.accumulator,
        )

    def with_low(self, batch: Batch) -> Batch:
        """The rows, with what a low-rank term reads of them."""
        if self.down is None or batch.low is not None:
            return batch
        return batch._replace(low=self.matmul(batch.hidden, self.down, (1, 1)).astype(self.spec.dtype))

    def columns(self, take: Callable[[jax.Array, int], jax.Array]) -> "Head":
        """The head of those columns that `take(array, axis)` takes of an array along its vocabulary axis."""
        axes = {"weight": self.spec.vocab_axis} | dict.fromkeys(BY_COLUMN, 0)
        arrays = {name: getattr(self, name) for name in axes}
        taken: dict[str, Any] = {name: None if x is None else take(x, axes[name]) for name, x in arrays.items()}
        return dataclasses.replace(self, **taken)

    def logits(self, batch: Batch) -> jax.Array:
        """Logits `[n, c]` of all the columns that the arrays have, in the accumulator dtype."""
        rows, weight, axis = batch.hidden, self.weight, self.spec.vocab_axis
        if self.up is not None:
            # One product: of two, each would be an array of the tile's size.
            up = self.up if axis == 0 else self.up.T
            rows = jnp.concatenate([x.astype(self.spec.dtype) for x in (rows, present(batch.low))], axis=1)
            weight = jnp.concatenate([x.astype(self.spec.dtype) for x in (weight, up)], axis=1 - axis)
        products = self.matmul(rows, weight, (1, 1 - axis))
        return self.cap(products, self.bias, batch.inverse_temperature)

    def cap(
        self, products: jax.Array, bias: jax.Array | None, inverse_temperature: jax.Array | None = None
    ) -> jax.Array:
        """Logits from `hidden·weight [n, c]`: the columns' scales, bias, scale, soft cap, temperature."""
        z = products
        if self.vocab_scale is not None:
            z = z * jnp.broadcast_to(self.vocab_scale.astype(z.dtype), z.shape)
        if bias is not None:
            z = z + jnp.broadcast_to(bias.astype(z.dtype), z.shape)
        if self.logit_scale is not None:
            z = z * self.logit_scale
        if (cap := self.spec.softcap) is not None:
            z = cap * jnp.tanh(z / cap)
        return tempered(z, inverse_temperature)

    def bound(self, inverse_temperature: jax.Array | None) -> jax.Array | float | None:
        """What the soft cap keeps the logits' size below: `c`, `c/T [n, 1]` under row temperatures, or None."""
        if self.spec.softcap is None or inverse_temperature is None:
            return self.spec.softcap
        # 0 in a row that is not there: the cap's slope divides by the bound.
        return self.spec.softcap * jnp.where(inverse_temperature == 0, 1, inverse_temperature)[:, None]

    def tile_logits(self, batch: Batch, tile: Tile) -> jax.Array:
        """Logits `[n, c]` for one tile, columns that are not valid included."""
        return self.columns(tile.take).logits(batch)

    def tile_products(self, batch: Batch, dlogits: jax.Array, tile: Tile, needs: PerInput[bool]) -> Arrays:
        """The products of a tile's dlogits `[n, c]`, which are rounded to the compute dtype first.

        Left in float32 they would pull both products into float32: the commonest performance bug of this field.
        """
        if self.vocab_scale is not None:
            return self._scaled_products(batch, dlogits, tile, needs)
        axis, hidden = self.spec.vocab_axis, batch.hidden
        rounded = dlogits.astype(self.spec.dtype)
        for_hidden = self.matmul(rounded, self.existing_weight(tile), (1, axis)) if needs.hidden else None
        for_weight = self.for_weight(rounded, hidden) if needs.weight else None
        for_bias = dlogits.sum(axis=0, dtype=self.spec.accumulator) if needs.bias else None
        up = None if self.up is None else tile.take(self.up)
        found = self.term_products(batch, rounded, up, needs)
        return found._replace(hidden=for_hidden, weight=for_weight, bias=for_bias)

    def _scaled_products(self, batch: Batch, dlogits: jax.Array, tile: Tile, needs: PerInput[bool]) -> Arrays:
        """The same with a `vocab_scale`, whose gradient is made of the weight's and up's before it multiplies these."""
        axis, narrow, wide = self.spec.vocab_axis, self.spec.dtype, self.spec.accumulator
        weight, up = self.existing_weight(tile), None if self.up is None else tile.take(self.up)
        scale = tile.take(present(self.vocab_scale)).astype(wide)
        of_up = scale[:, None]
        of_weight = of_up if axis == 0 else scale[None, :]
        scaled = of_weight * weight.astype(wide), None if up is None else of_up * up.astype(wide)
        whole = dataclasses.replace(self, weight=scaled[0], up=scaled[1], vocab_scale=None)
        asked = needs._replace(weight=needs.weight or needs.vocab_scale, up=needs.up or needs.vocab_scale)
        found = whole.tile_products(batch, dlogits, tile, asked)
        if needs.vocab_scale:
            own = jnp.sum(present(found.weight) * weight.astype(narrow).astype(wide), axis=1 - axis)
            if up is not None:
                own += jnp.sum(present(found.up) * up.astype(narrow).astype(wide), axis=1)
            found = found._replace(vocab_scale=own)
        return found.where(needs).of(("weight",), lambda x: of_weight * x).of(("up",), lambda x: of_up * x)

    def for_weight(self, dlogits: jax.Array, rows: jax.Array, dtype: np.dtype | None = None) -> jax.Array:
        """`dlogits [n, c]ᵀ·rows [n, H]` in the weight's layout."""
        a, b = (dlogits, rows) if self.spec.vocab_axis == 0 else (rows, dlogits)
        return self.matmul(a, b, (0, 0), dtype)

    def existing_weight(self, tile: Tile) -> jax.Array:
        """The tile's part of the weight, 0 in a shard's padding: dlogits are 0 there, but 0·NaN is not."""
        axis = self.spec.vocab_axis
        part = tile.take(self.weight, axis)
        if self.valid_columns is None or tile.valid is None:
            return part
        return jnp.where(tile.valid[:, None] if axis == 0 else tile.valid, part, jnp.zeros((), part.dtype))

    def term_products(self, batch: Batch, dlogits: jax.Array, up: jax.Array | None, needs: PerInput[bool]) -> Arrays:
        """The low-rank term's products of `dlogits [n, c]` and `up [c, r]`: short, and XLA's whatever made dlogits."""
        if up is None:
            return NO_ARRAYS
        for_down = self.matmul(dlogits, up, (1, 0)) if needs.down else None
        for_up = self.matmul(dlogits, present(batch.low), (0, 0)) if needs.up else None
        return NO_ARRAYS._replace(down=for_down, up=for_up)

    def with_row_sums(self, sums: Arrays, batch: Batch, needs: PerInput[bool]) -> Arrays:
        """`sums` with zeros for the products by row that are needed."""
        wide = self.spec.accumulator
        hidden = jnp.zeros(batch.hidden.shape, wide) if needs.hidden else None
        down = jnp.zeros((*batch.leading, self.spec.rank), wide) if needs.down else None
        return sums._replace(hidden=hidden, down=down)

    def with_column_sums(self, sums: Arrays, needs: PerInput[bool], columns: int) -> Arrays:
        """`sums` with zeros for the products by column that are needed."""
        wide = self.spec.accumulator
        arrays = {name: getattr(self, name) for name in BY_COLUMN}
        shapes = {name: (columns,) if x is None else (columns, *x.shape[1:]) for name, x in arrays.items()}
        return sums._replace(**{n: jnp.zeros(shapes[n], wide) if getattr(needs, n) else None for n in BY_COLUMN})

    def without_padding(self, columns: int, sums: Arrays, *, weight: bool = True) -> Arrays:
        """The head's sums, the `weight`'s too, with 0 in the padding among the first `columns`, which tiles cover.

        Its dlogits are 0, but a NaN in hidden states makes a NaN of 0·NaN.
        """
        spec = self.spec

        def cleared(x: jax.Array | None, axis: int = 0) -> jax.Array | None:
            if x is None or columns == spec.vocab_size:
                return x
            zeros = jnp.zeros([columns - spec.vocab_size if i == axis else n for i, n in enumerate(x.shape)], x.dtype)
            # From an index that XLA does not know: else it would make one operation of this and a kernel's, and fail.
            start = jax.lax.optimization_barrier(jnp.int32(spec.vocab_size))
            return jax.lax.dynamic_update_slice_in_dim(x, zeros, start, axis)

        own = cleared(sums.weight, spec.vocab_axis) if weight else sums.weight
        return sums._replace(weight=own).of(BY_COLUMN, cleared)

    def tile_logit_weights(self, start: jax.Array | int, size: int) -> jax.Array:
        """u of `size` columns from `start` on, `[size]`."""
        if self.logit_weights is None:
            return jnp.full((size,), self.spec.uniform_weight, self.spec.accumulator)
        return jax.lax.dynamic_slice_in_dim(self.logit_weights, start, size)

    def on_gpu(self) -> "Head":
        """The same head, TF32 asked for by the name that all of XLA's kernels for GPUs know.

        At HIGH cuBLAS takes it, but not XLA's own kernels, which make a product that is added in place.
        """
        if self.spec.precision != jax.lax.Precision.HIGH:
            return self
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, precision=jax.lax.Precision.DEFAULT))

    def with_padding(self, columns: int) -> "Head":
        """The same head with padding as vocabulary, of whose `columns` entries `valid_columns` exist."""
        spec, u = self.spec, self.logit_weights
        return dataclasses.replace(
            self,
            logit_weights=None if u is None else jnp.pad(u, (0, columns - spec.vocab_size)),
            spec=spec.with_padding(columns),
            valid_columns=jnp.int32(spec.vocab_size),
        )

    @property
    def largest_logit_weight(self) -> jax.Array | float:
        """max |u|."""
        return self.spec.uniform_weight if self.logit_weights is None else jnp.max(jnp.abs(self.logit_weights))
