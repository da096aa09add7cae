"""The recompute mode's work on one tile of the vocabulary: dlogits by a kernel, and their products.

Kernels read the tile's part of the weight where it lies, add to hidden's sum, and write the tile's part of the weight's
gradient where it belongs. Nothing of size `[columns, H]` is copied.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.entries import Entries
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, operands, product_kernel
from pallas_ce.backends.mosaic_gpu.kernels.operands import Part
from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.gradient_products import Products, TileStep, WeightSum
from pallas_ce.head import Batch, Head
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tiles


def step(head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
    """See `Backend.recompute`."""
    exact = entries.exact(head, batch, gradient)
    gradient = gradient._replace(coefficients=entries.without(gradient.coefficients))
    return _Work(head, batch, gradient, exact, plan, block)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The facts that all tiles share; `exact` holds columns and values of single entries, which `gradient` lacks."""

    head: Head
    batch: Batch
    gradient: Gradient
    exact: Entries
    plan: Plan
    block: RowBlock

    def __call__(self, index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightSum | None) -> Products:
        head, spec, block = self.head, self.head.spec, self.block
        hidden, width, axis = self.batch.hidden.astype(spec.dtype), self.plan.columns, spec.vocab_axis
        first = jnp.int32(index) * width
        count = jnp.minimum(width, spec.vocab_size - first)
        part = Part(width) if width == spec.vocab_size else Part(width, first, count)
        coefficients, reference = self.gradient[:2]
        stored = dlogits_kernel.dlogits(head, hidden, reference, coefficients, part=part, valid_rows=block.filled)[
            : len(hidden), :width
        ]
        if head.up is not None:
            stored = low_rank.zeroed(stored, block.filled, count if spec.vocab_size % width else None)
        stored = entries.put_among(stored, self.exact, first, first, count)
        if hidden_sum is not None:
            alone = self.plan.rows >= hidden_sum.shape[0]
            to_row = None if alone else jnp.int32(block.number) * self.plan.rows
            given = stored, operands.own_weight(head), axis, hidden_sum
            hidden_sum = product_kernel.add_for_hidden(*given, part=part, to_row=to_row, valid_rows=block.filled)
        # The sweep's last tile starts early, and its own columns come last in it.
        shift = first - Tiles(spec.vocab_size, width).tile(index).start
        for_weight = for_bias = None
        if weight_sum is not None:
            for_weight = product_kernel.for_weight(
                stored,
                hidden,
                axis,
                weight_sum.array,
                replaced=weight_sum.whole and not weight_sum.adds,
                valid_rows=block.filled,
                multiplier=weight_sum.scale,
                part=part if part.first is None or weight_sum.whole else part._replace(first=shift),
                starts=spec.vocab_size,
            )
        if self.gradient.needs.bias_sum:
            counted = stored if block.filled is None else block.select(stored, 0)
            summed = counted.sum(axis=0, dtype=spec.accumulator)
            for_bias = jnp.roll(jnp.where(jnp.arange(width) < count, summed, 0), shift)
        up = low_rank.up_from(head, first, width)
        for_low, for_up = head.term_products(self.batch, stored, up, self.gradient.needs)
        return Products(hidden_sum, for_weight, for_bias, for_low, low_rank.own_columns(for_up, count, shift))
