"""What the backends with GPU kernels share: their capabilities, and how both modes use the kernels of a block."""

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries, low_rank
from pallas_ce.backends.exponentials import Block, Stash
from pallas_ce.backends.protocol import Backend, Capabilities, Gradient, Plan
from pallas_ce.head import Batch, Head
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns


class KernelBlock(Block):
    """A block's kernels: beside in_forward's also recompute's, for parts of the vocabulary.

    They read a part of the weight where it lies, add to hidden's sum, and write the part of the weight's gradient where
    it belongs. Nothing of size `[columns, H]` is copied.

    Attributes:
        leaves_columns: whether dlogits of a part are undefined behind the vocabulary's end; else they are 0.
    """

    leaves_columns: ClassVar[bool] = False

    @abc.abstractmethod
    def add_for_hidden(self, dlogits: jax.Array, total: jax.Array, part: Columns, block: RowBlock) -> jax.Array:
        """`total [N, H]`, by place, with `dlogits [n, c]·weight` of the part added in the block's rows."""

    @abc.abstractmethod
    def step(self, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """See `Backend.recompute`."""

    def in_place(
        self,
        gradient: Gradient,
        exact: entries.Entries,
        block: RowBlock,
        first: jax.Array,
        size: int,
        hidden_sum: jax.Array | None,
        weight_sum: WeightGradient | None,
    ) -> Arrays:
        """What a `TileStep` returns for `size` columns from `first` on: dlogits by a kernel, and their products.

        The last part runs over the vocabulary's end. The `gradient` has no coefficients of single entries, which are
        `exact`.
        """
        head, whole = self.head, self.head.spec.vocab_size
        count = jnp.minimum(size, whole - first)
        part = Columns(first, size, count=count)
        dz = self.dlogits(gradient, part)
        if head.up is not None:
            dz = low_rank.zeroed(dz, self.valid_rows, count if self.leaves_columns and whole % size else None)
        dz = entries.put_among(dz, exact, first, first, count)
        for_hidden = for_weight = None
        if hidden_sum is not None:
            for_hidden = self.add_for_hidden(dz, hidden_sum, part, block)
        if weight_sum is not None:
            for_weight = self.for_weight(dz, self.batch.hidden, weight_sum, part).array
        found = low_rank.products_of_part(head, self.batch, dz, block, gradient.needs, first, count)
        return found._replace(hidden=for_hidden, weight=for_weight)


class KernelBackend(Backend):
    """A backend whose modes are a block's kernels."""

    # Pallas has no rule for kernels that write in place inside checked regions.
    capabilities = Capabilities(checked_regions=False, large_blocks=True, cuda_only=True, casts_whole=True)

    @abc.abstractmethod
    def block(
        self, head: Head, batch: Batch, block: RowBlock, plan: Plan, gradient: Gradient | None = None
    ) -> KernelBlock:
        """The kernels of one block; with a `gradient` for in_forward's products."""

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """Part by part."""
        return self.block(head, batch, block, plan).step(gradient, plan, block)

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, Stash]:
        """See `exponentials`."""
        return self.block(head, batch, block, plan).make(names)

    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: Stash, sums: Arrays, plan: Plan, block: RowBlock
    ) -> tuple[Arrays, jax.Array | None]:
        """See `exponentials`."""
        return self.block(head, batch, block, plan, gradient).products(gradient, stash, sums)
