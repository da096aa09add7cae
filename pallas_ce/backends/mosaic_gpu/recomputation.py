"""The recompute mode's work on one tile of the vocabulary: dlogits by a kernel, and their products.

Kernels read the tile's part of the weight where it lies, add to hidden's sum, and write the tile's part of the weight's
gradient where it belongs. Nothing of size `[columns, H]` is copied.
"""

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, operands, product_kernel
from pallas_ce.backends.mosaic_gpu.kernels.operands import Part
from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.head import Batch, Head
from pallas_ce.streaming.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.streaming.rows import RowBlock


def step(head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
    """See `Backend.recompute`."""
    spec, width, axis = head.spec, plan.columns, head.spec.vocab_axis
    exact, hidden = entries.exact(head, batch, gradient), batch.hidden.astype(spec.dtype)
    coefficients, reference = entries.without(gradient.coefficients), gradient.reference

    def part_step(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        first = jnp.int32(index) * width
        count = jnp.minimum(width, spec.vocab_size - first)
        part = Part(width) if width == spec.vocab_size else Part(width, first, count)
        stored = dlogits_kernel.dlogits(head, hidden, reference, coefficients, part=part, valid_rows=block.filled)[
            : len(hidden), :width
        ]
        if head.up is not None:
            stored = low_rank.zeroed(stored, block.filled, count if spec.vocab_size % width else None)
        stored = entries.put_among(stored, exact, first, first, count)
        if hidden_sum is not None:
            alone = plan.rows >= hidden_sum.shape[0]
            to_row = None if alone else jnp.int32(block.number) * plan.rows
            hidden_sum = product_kernel.add_for_hidden(
                stored,
                operands.own_weight(head),
                axis,
                hidden_sum,
                part=part,
                to_row=to_row,
                valid_rows=block.filled,
                existing=head.valid_columns,
            )
        for_weight = None
        if weight_sum is not None:
            # A sum of the tile's alone: the last tile starts early, and its own columns come last in it.
            shift = first - jnp.minimum(first, spec.vocab_size - width)
            for_weight = product_kernel.for_weight(
                stored,
                hidden,
                axis,
                weight_sum.array,
                replaced=not weight_sum.adds,
                valid_rows=block.filled,
                multiplier=weight_sum.scale,
                part=part if part.first is None or weight_sum.tile is not None else part._replace(first=shift),
                starts=spec.vocab_size,
            )
        found = low_rank.products_of_part(head, batch, stored, block, gradient.needs, first, count)
        return found._replace(hidden=hidden_sum, weight=for_weight)

    return part_step
