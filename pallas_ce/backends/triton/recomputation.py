"""The recompute mode's work on one part of the vocabulary: dlogits by the kernel, and their products.

*In place*, a kernel reads the weight where it lies, adds to hidden's sum, and writes the weight's gradient where it
belongs; nothing of size `[columns, H]` is copied, and rows that do not count are left out. *By slices*, XLA makes the
products: where tensor descriptors cannot stand for the arrays, or sums are not of this shape.
"""

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.backends.triton import binding, configs, launch, part_products
from pallas_ce.head import Batch, Head
from pallas_ce.streaming.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns, Tiles


def step(head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
    """See `Backend.recompute`."""
    head = head.on_gpu()
    spec, size, filled = head.spec, plan.columns, block.filled
    exact = entries.exact(head, batch, gradient)
    rest = gradient._replace(coefficients=entries.without(gradient.coefficients))
    served = configs.product_for(spec, binding.capability(), size) is not None
    # As operands hidden states carry the scale of the weight's gradient, if that is a power of two, which costs no
    # accuracy, and operands have its exponents. Here, and not for each part: XLA would scale all rows for each of them.
    carrying = None
    if head.logit_scale is None and spec.dtype != jnp.float16:
        carrying = batch.hidden.astype(spec.dtype) * jnp.asarray(gradient.factor, spec.dtype)

    def in_place(first: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        # The last part runs over the vocabulary's end.
        count = jnp.minimum(size, spec.vocab_size - first)
        dz = launch.dlogits(head, batch, rest, Columns(first, size), rows=filled)
        dz = dz if head.up is None else low_rank.zeroed(dz, filled)
        dz = entries.put_among(dz, exact, first, first, count)
        for_hidden = for_weight = None
        if hidden_sum is not None:
            for_hidden = part_products.add_for_hidden(head, dz, hidden_sum, first, filled)
        if weight_sum is not None:
            for_weight = part_products.put_for_weight(head, dz, batch.hidden, weight_sum, first, filled)
        found = low_rank.products_of_part(head, batch, dz, block, gradient.needs, first, count)
        return found._replace(hidden=for_hidden, weight=for_weight)

    def part_step(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        first = jnp.int32(index) * size
        alone = hidden_sum is None or isinstance(block.number, int)
        if alone and (weight_sum is None or not weight_sum.adds) and served:
            return in_place(first, hidden_sum, weight_sum)
        # The last tile begins early, and an earlier one counts there.
        tile = Tiles(spec.vocab_size, size, head.valid_columns).tile(index)
        dz = entries.put_among(launch.dlogits(head, batch, rest, tile), exact, tile.start, first, size)
        found = head.tile_products(batch, dz, tile, gradient.needs._replace(weight=False))
        if weight_sum is None:
            for_weight = None
        elif carrying is None or weight_sum.adds:
            for_weight = weight_sum.with_share(head.for_weight(dz, batch.hidden), spec.vocab_axis)
        else:  # the whole gradient: rounded as it is made, and no sum in float32 is written
            rounded = head.for_weight(dz, carrying, weight_sum.array.dtype)
            for_weight = weight_sum._replace(scale=None).with_share(rounded, spec.vocab_axis)
        return found._replace(hidden=block.add(hidden_sum, found.hidden), weight=for_weight)

    return part_step
