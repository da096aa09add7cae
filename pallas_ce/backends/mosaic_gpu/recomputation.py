"""The recompute mode's work on one tile of the vocabulary: dlogits by a kernel, and their products.

*In place*, kernels read the tile's part of the weight where it lies, add to hidden's sum, and write the tile's part of
the weight's gradient where it belongs. Nothing of size `[columns, H]` is copied. *By slices* serves heads whose arrays
the product kernels cannot read or write where they are: the kernel gets a slice of the weight, and XLA makes the
products.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.entries import Entries
from pallas_ce.backends.mosaic_gpu.gemm import loop
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, operands, product_kernel
from pallas_ce.backends.mosaic_gpu.kernels.operands import Part
from pallas_ce.backends.mosaic_gpu.schedule import Config
from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tile, Tiles


class GradientConfigs(NamedTuple):
    """Tiles of the kernels that make gradients: dlogits, and the products for hidden states and weight."""

    dlogits: Config
    hidden: Config
    weight: Config


def in_place(spec: HeadSpec, rows: int, columns: int) -> bool:
    """Whether kernels work in place on blocks of `rows` rows and `columns` columns."""
    fits = columns == spec.vocab_size or (
        columns % product_kernel.COLUMN_STEP == 0 and spec.vocab_size % loop.STEP == 0
    )
    return fits and product_kernel.serves(spec, rows) and operands.stored_shape(rows, columns) == (rows, columns)


def step(
    head: Head,
    batch: Batch,
    gradient: Gradient,
    plan: Plan,
    block: RowBlock,
    configs: GradientConfigs,
) -> TileStep:
    """See `Backend.recompute`."""
    exact = entries.exact(head, batch, gradient)
    gradient = gradient._replace(coefficients=entries.without(gradient.coefficients))
    work = _InPlace if in_place(head.spec, plan.rows, plan.columns) else _BySlices
    return work(head, batch, gradient, exact, plan, block, configs)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The facts that all tiles share; `exact` holds columns and values of single entries, which `gradient` lacks."""

    head: Head
    batch: Batch
    gradient: Gradient
    exact: Entries
    plan: Plan
    block: RowBlock
    configs: GradientConfigs

    def dlogits(self, head: Head, **part: Any) -> jax.Array:
        """The kernel's dlogits, of a part of the head or a slice of it."""
        coefficients, reference = self.gradient[:2]
        stored = dlogits_kernel.dlogits(head, self.batch.hidden, reference, coefficients, self.configs.dlogits, **part)
        assert stored is not None
        return stored

    def bias_sum(self, stored: jax.Array) -> jax.Array:
        """`Σ_i dlogits` over valid rows."""
        counted = stored if self.block.filled is None else self.block.select(stored, 0)
        return counted.sum(axis=0, dtype=self.head.spec.accumulator)


class _InPlace(_Work):
    def __call__(self, index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        head, spec, configs = self.head, self.head.spec, self.configs
        width, axis, valid_rows = self.plan.columns, spec.vocab_axis, self.block.filled
        first = jnp.int32(index) * width
        count = jnp.minimum(width, spec.vocab_size - first)
        part = None if width == spec.vocab_size else Part(width, first, count)
        stored = self.dlogits(head, part=part, valid_rows=valid_rows)
        if head.up is not None:
            stored = low_rank.zeroed(stored, valid_rows, count if spec.vocab_size % width else None)
        stored = entries.put_among(stored, self.exact, first, first, count)
        if hidden_sum is not None:
            alone = self.plan.rows >= hidden_sum.shape[0]
            to_row = None if alone else jnp.int32(self.block.number) * self.plan.rows
            weight = operands.weight_of(head)
            hidden_sum = product_kernel.add_for_hidden(
                stored, weight, axis, configs.hidden, hidden_sum, to_row=to_row, valid_rows=valid_rows, part=part
            )
        # The sweep's last tile starts early, and its own columns come last in it.
        shift = first - Tiles(spec.vocab_size, width).tile(index).start
        for_weight = for_bias = None
        if weight_sum is not None:
            place = part if part is None or weight_sum.tile is not None else part._replace(first=shift)
            for_weight = product_kernel.for_weight(
                stored,
                self.batch.hidden.astype(spec.dtype),
                axis,
                configs.weight,
                weight_sum.array,
                replaced=not weight_sum.adds,
                valid_rows=valid_rows,
                multiplier=weight_sum.scale,
                part=place,
            )
        if self.gradient.needs.bias:
            own = jnp.where(jnp.arange(width) < count, self.bias_sum(stored), 0)
            for_bias = jnp.roll(own, shift)
        up = low_rank.up_from(head, first, width)
        found = head.term_products(self.batch, stored, up, self.gradient.needs)
        for_up = low_rank.own_columns(found.up, count, shift)
        return found._replace(hidden=hidden_sum, weight=for_weight, bias=for_bias, up=for_up)


class _BySlices(_Work):
    def __call__(self, index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        head, spec, columns = self.head, self.head.spec, self.plan.columns
        tile = Tiles(spec.vocab_size, columns).tile(index)
        weight = tile.take(operands.apart(head.weight), spec.vocab_axis)
        own = None if tile.valid is None else jnp.int32(index) * columns - tile.start
        stored = self.dlogits(self._slice(tile, weight), first=own)
        stored = entries.put_among(stored, self.exact, tile.start, jnp.int32(index) * columns, columns)
        hidden = self.batch.hidden
        stored = stored[: hidden.shape[0], :columns]
        for_weight = for_bias = None
        if hidden_sum is not None:
            hidden_sum = self.block.add(hidden_sum, head.matmul(stored, weight, (1, spec.vocab_axis)))
        if weight_sum is not None:
            a, b = (stored, hidden) if spec.vocab_axis == 0 else (hidden, stored)
            for_weight = weight_sum.with_share(head.matmul(a, b, (0, 0)), spec.vocab_axis)
        if self.gradient.needs.bias:
            for_bias = self.bias_sum(stored)
        up = None if head.up is None else tile.take(head.up)
        found = head.term_products(self.batch, stored, up, self.gradient.needs)
        return found._replace(hidden=hidden_sum, weight=for_weight, bias=for_bias)

    def _slice(self, tile: Tile, weight: jax.Array) -> Head:
        """The head of the tile's columns, to the kernel a whole vocabulary."""
        head, spec = self.head, self.head.spec
        aligned = operands.round_up(tile.size, operands.LENGTH_MULTIPLE)
        shape = (aligned, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, aligned)
        u = None if self.gradient.coefficients.logit_weights is None else head.tile_logit_weights(tile.start, tile.size)
        valid = head.valid_columns
        return dataclasses.replace(
            head,
            weight=operands.pad(weight, shape),
            bias=None if head.bias is None else operands.pad(tile.take(head.bias), (aligned,)),
            up=None if head.up is None else operands.pad(tile.take(head.up), (aligned, spec.rank)),
            logit_weights=u,
            spec=dataclasses.replace(spec, weight_rows=aligned, vocab_size=tile.size),
            valid_columns=None if valid is None else jnp.clip(valid - tile.start, 0, tile.size),
        )
