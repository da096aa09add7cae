"""The recompute mode's work on one part of the vocabulary: dlogits by the kernel, and their products.

*In place*, a kernel reads the weight where it lies, adds to hidden's sum, and writes the weight's gradient where it
belongs; nothing of size `[columns, H]` is copied, and rows that do not count are left out. *By slices*, XLA makes the
products: where tensor descriptors cannot stand for the arrays, or sums are not of this shape.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.entries import Entries
from pallas_ce.backends.protocol import Gradient, Plan
from pallas_ce.backends.triton import launch, part_products
from pallas_ce.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.head import Batch, Head
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns, Tile, Tiles


def step(head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
    """See `Backend.recompute`."""
    head = head.on_gpu()
    exact = entries.exact(head, batch, gradient)
    rest = gradient._replace(coefficients=entries.without(gradient.coefficients))
    # Here, and not for each part: XLA would scale all rows for each of them.
    carrying = part_products.scaled(head, batch.hidden, gradient.factor)
    return _Work(head, batch, rest, exact, plan.columns, block, carrying)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The work, with the arguments that all parts share.

    `exact` holds columns and values of single entries, which `gradient` lacks; `carrying` see `part_products.scaled`.
    """

    head: Head
    batch: Batch
    gradient: Gradient
    exact: Entries
    columns: int
    block: RowBlock
    carrying: jax.Array | None

    def __call__(self, index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
        tile = Tiles(self.head.spec.vocab_size, self.columns, self.head.valid_columns).tile(index)
        first = jnp.int32(index) * self.columns
        alone = hidden_sum is None or isinstance(self.block.number, int)
        put = weight_sum is None or not weight_sum.adds
        in_place = alone and put and part_products.served(self.head, self.columns)
        return (self._in_place if in_place else self._by_slices)(tile, first, hidden_sum, weight_sum)

    def _in_place(
        self, tile: Tile, first: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None
    ) -> Arrays:
        """The last part runs over the vocabulary's end."""
        head, batch, filled = self.head, self.batch, self.block.filled
        count = jnp.minimum(self.columns, head.spec.vocab_size - first)
        dz = launch.dlogits(head, batch, self.gradient, Columns(first, self.columns), rows=filled)
        if head.up is not None:
            dz = low_rank.zeroed(dz, filled)
        dz = entries.put_among(dz, self.exact, first, first, count)
        for_weight = for_bias = None
        if hidden_sum is not None:
            hidden_sum = part_products.add_for_hidden(head, dz, hidden_sum, first, filled)
        if weight_sum is not None:
            for_weight = part_products.put_for_weight(head, dz, batch.hidden, weight_sum, first, filled)
        if self.gradient.needs.bias:
            own = jnp.where(jnp.arange(self.columns) < count, self._bias_sum(dz), 0)
            for_bias = jnp.roll(own, first - tile.start)
        up = low_rank.up_from(head, first, self.columns)
        found = head.term_products(batch, dz, up, self.gradient.needs)
        for_up = low_rank.own_columns(found.up, count, first - tile.start)
        return found._replace(hidden=hidden_sum, weight=for_weight, bias=for_bias, up=for_up)

    def _by_slices(
        self, tile: Tile, first: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None
    ) -> Arrays:
        """The last part begins early, and what an earlier one has counts there."""
        head, batch, axis = self.head, self.batch, self.head.spec.vocab_axis
        dz = launch.dlogits(head, batch, self.gradient, tile)
        dz = entries.put_among(dz, self.exact, tile.start, first, self.columns)
        for_weight = None
        if hidden_sum is not None:
            hidden_sum = self.block.add(hidden_sum, head.matmul(dz, tile.take(head.weight, axis), (1, axis)))
        if weight_sum is not None:
            for_weight = part_products.add_for_weight(head, dz, batch.hidden, self.carrying, weight_sum)
        for_bias = self._bias_sum(dz) if self.gradient.needs.bias else None
        up = None if head.up is None else tile.take(head.up)
        found = head.term_products(batch, dz, up, self.gradient.needs)
        return found._replace(hidden=hidden_sum, weight=for_weight, bias=for_bias)

    def _bias_sum(self, dz: jax.Array) -> jax.Array:
        """`Σ_i dlogits` over the rows that count."""
        counted = dz if self.block.filled is None else self.block.select(dz, 0)
        return counted.sum(axis=0, dtype=self.head.spec.accumulator)
