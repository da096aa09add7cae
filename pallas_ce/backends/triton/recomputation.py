"""The recompute mode's work on one part of the vocabulary: dlogits by the kernel, and their products.

*In place*, a kernel reads the weight where it lies, adds to hidden's sum, and writes the weight's gradient where it
belongs; nothing of size `[columns, H]` is copied, and rows that do not count are left out. *By slices*, XLA makes the
products: where tensor descriptors cannot stand for the arrays, or sums are not of this shape.
"""

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.backends.triton import launch, part_products
from pallas_ce.head import Batch, Head
from pallas_ce.streaming.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns, Tiles


def step(head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
    """See `Backend.recompute`."""
    head = head.on_gpu()
    axis, size, needs = head.spec.vocab_axis, plan.columns, gradient.needs
    exact = entries.exact(head, batch, gradient)
    rest = gradient._replace(coefficients=entries.without(gradient.coefficients))
    # Here, and not for each part: XLA would scale all rows for each of them.
    carrying = part_products.scaled(head, batch.hidden, gradient.factor)

    def part_step(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        tile = Tiles(head.spec.vocab_size, size, head.valid_columns).tile(index)
        first = jnp.int32(index) * size
        alone = hidden_sum is None or isinstance(block.number, int)
        put = weight_sum is None or not weight_sum.adds
        in_place = alone and put and part_products.served(head, size)
        # In place the last part runs over the vocabulary's end. Else it begins early, and an earlier one counts there.
        part: Columns = Columns(first, size) if in_place else tile
        count, filled = (jnp.minimum(size, head.spec.vocab_size - first), block.filled) if in_place else (size, None)
        dz = launch.dlogits(head, batch, rest, part, rows=filled)
        if in_place and head.up is not None:
            dz = low_rank.zeroed(dz, filled)
        dz = entries.put_among(dz, exact, part.start, first, count)
        for_weight = for_bias = None
        if hidden_sum is not None and in_place:
            hidden_sum = part_products.add_for_hidden(head, dz, hidden_sum, first, filled)
        elif hidden_sum is not None:
            hidden_sum = block.add(hidden_sum, head.matmul(dz, head.existing_weight(tile), (1, axis)))
        if weight_sum is not None and in_place:
            for_weight = part_products.put_for_weight(head, dz, batch.hidden, weight_sum, first, filled)
        elif weight_sum is not None:
            for_weight = part_products.add_for_weight(head, dz, batch.hidden, carrying, weight_sum)
        if needs.bias:
            counted = dz if block.filled is None else block.select(dz, 0)
            for_bias = counted.sum(axis=0, dtype=head.spec.accumulator)
        if not in_place:
            up = None if head.up is None else tile.take(head.up)
            found = head.term_products(batch, dz, up, needs)
            return found._replace(hidden=hidden_sum, weight=for_weight, bias=for_bias)
        shift = first - tile.start
        for_bias = low_rank.own_columns(for_bias, count, shift)
        found = head.term_products(batch, dz, low_rank.up_from(head, first, size), needs)
        for_up = low_rank.own_columns(found.up, count, shift)
        return found._replace(hidden=hidden_sum, weight=for_weight, bias=for_bias, up=for_up)

    return part_step
