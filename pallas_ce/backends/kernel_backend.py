"""What the backends with GPU kernels share: their limits, and how both modes use the kernels of a block."""

import abc
import dataclasses
from typing import ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import entries
from pallas_ce.backends.exponentials import Block, Stash
from pallas_ce.backends.protocol import Backend, Gradient, Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.row import Partial, spread
from pallas_ce.streaming.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns, pad

# The columns of XLA's tiles, on one device, that take as long as to gather one entry. By `gpu_losses support` on an
# H200, with V 131072 and H 4096, 160 in a forward and 117 with gradients.
_COLUMNS_PER_ENTRY = 140


class KernelBlock(Block):
    """A block's kernels: beside in_forward's also recompute's, for parts of the vocabulary.

    They read a part of the weight where it lies, add to hidden's sum, and write the part of the weight's gradient where
    it belongs. Nothing of size `[columns, H]` is copied.
    """

    leaves_columns: ClassVar[bool] = False  # whether dlogits behind the vocabulary's end are undefined; else they are 0

    @abc.abstractmethod
    def add_for_hidden(self, dlogits: jax.Array, total: jax.Array, part: Columns, block: RowBlock) -> jax.Array:
        """`total [N, H]`, by place, with `dlogits [n, c]·weight` of the part added in the block's rows."""

    def step(self, gradient: Gradient, exact: entries.Entries, plan: Plan, block: RowBlock) -> TileStep:
        """`Backend.recompute` of this block; the `gradient` has no coefficients of the single entries `exact`."""
        head, size, spec, needs = self.head, plan.columns, self.head.spec, gradient.needs

        def in_place(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            """The last part runs over the end."""
            first = jnp.int32(index) * size
            count = jnp.minimum(size, spec.vocab_size - first)
            part = Columns(first, size, count=count)
            dz = self.dlogits(gradient, part)
            if head.up is not None:
                undefined = self.leaves_columns and spec.vocab_size % size
                dz = entries.zeroed(dz, self.valid_rows, count if undefined else None)
            dz = entries.put_among(dz, exact, first, first, count)
            for_hidden = for_weight = for_bias = up = None
            if hidden_sum is not None:
                for_hidden = self.add_for_hidden(dz, hidden_sum, part, block)
            if weight_sum is not None:
                for_weight = self.for_weight(dz, self.batch.hidden, weight_sum, part).array
            # Products by column are a tile's, which begins earlier where the part reaches beyond the vocabulary's end.
            shift = first - jnp.minimum(first, spec.vocab_size - size)

            def own_columns(share: jax.Array) -> jax.Array:
                return jnp.roll(jnp.where(spread(jnp.arange(size) < count, share), share, 0), shift, axis=0)

            if needs.bias:
                counted = dz if block.filled is None else block.select(dz, 0)
                for_bias = own_columns(counted.sum(axis=0, dtype=spec.accumulator))
            if head.up is not None:
                # Padding of the vocabulary may hold anything, and dlogits of 0 do not take away a nan.
                padded = pad(head.up[: spec.vocab_size], (-(-spec.vocab_size // size) * size, spec.rank))
                up = jax.lax.dynamic_slice_in_dim(padded, first, size)
            found = head.term_products(self.batch, dz, up, needs)
            for_up = None if found.up is None else own_columns(found.up)
            return found._replace(hidden=for_hidden, weight=for_weight, bias=for_bias, up=for_up)

        return in_place


class KernelBackend(Backend):
    """A backend whose modes are a block's kernels."""

    # Pallas has no rule for kernels that write in place inside checked regions.
    checked_regions = False

    def slower(self, spec: HeadSpec, targets: int = 0, tokens: int = 1) -> str | None:
        """Many targets a row: `entries` gathers them, and XLA reads them in tiles of all logits."""
        if min(_COLUMNS_PER_ENTRY, tokens) * targets <= spec.vocab_size:
            return None
        return f"gathering {targets} rows of the weight for each row takes longer than XLA's product with all of them"

    def copy_bytes(self, spec: HeadSpec, dtype: np.dtype) -> int:
        """Of a weight in another dtype than the operands'."""
        return 0 if dtype == spec.dtype else spec.weight_rows * spec.hidden_size * spec.dtype.itemsize

    @abc.abstractmethod
    def block(
        self, head: Head, batch: Batch, block: RowBlock, plan: Plan, gradient: Gradient | None = None
    ) -> KernelBlock:
        """The kernels of one block; with a `gradient` for in_forward's products."""

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """Part by part."""
        kernels = self.block(head, batch, block, plan)
        exact, gradient = entries.exact(kernels.head, batch, gradient)
        batch = batch._replace(hidden=batch.hidden.astype(head.spec.dtype))
        return dataclasses.replace(kernels, batch=batch, valid_rows=block.filled).step(gradient, exact, plan, block)

    @override
    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, Stash]:
        return self.block(head, batch, block, plan).make(names)

    @override
    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: Stash, sums: Arrays, plan: Plan, block: RowBlock
    ) -> tuple[Arrays, jax.Array | None]:
        return self.block(head, batch, block, plan, gradient).products(gradient, stash, sums)
