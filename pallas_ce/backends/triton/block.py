"""A block of rows by Triton's kernel: logits and, where that is faster, the products of parts; other products by XLA.

In recompute an in-place kernel also leaves out rows that do not count. XLA makes the products *by slices* where tensor
descriptors cannot stand for the arrays, or sums are not of their shape.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import entries
from pallas_ce.backends.kernel_backend import KernelBlock
from pallas_ce.backends.protocol import Gradient, PairDlogits, Plan
from pallas_ce.backends.triton import binding, configs, launch
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import Arrays, TileStep, WeightGradient
from pallas_ce.streaming.loops import chosen_by_device
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns, Tiles, pad


class TritonBlock(KernelBlock):
    """One launch makes a block's exponentials, or a part's dlogits."""

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """Launches the kernel. Given `again`, it recomputes about that number of rows, and exits early if it is 0."""
        # It always writes where something lies: so a program that may make them again has one such kernel, not two.
        shape = self.batch.hidden.shape[0], self.head.spec.vocab_size
        rows, into = again or (None, jax.lax.empty(shape, self.head.spec.dtype))
        given = {"reference": reference, binding.BEFORE: into}
        partial, found = launch.made(self.head, self.batch, names | {"lse"}, rows, given)
        return partial, found[binding.STORED]

    def dlogits(self, gradient: Gradient, part: Columns | None = None, into: jax.Array | None = None) -> jax.Array:
        """One launch."""
        return launch.dlogits(self.head, self.batch, gradient, part, into=into, rows=self.valid_rows)

    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """One product, whose scaling and rounding XLA joins with what comes after."""
        head = self.head
        tile = Tiles(head.spec.vocab_size, head.spec.vocab_size, head.valid_columns).tile(0)
        return scale[:, None] * head.matmul(operand, head.existing_weight(tile), (1, head.spec.vocab_axis))

    def add_for_hidden(self, dlogits: jax.Array, total: jax.Array, part: Columns, block: RowBlock) -> jax.Array:
        """One launch."""
        return launch.product(self.head, dlogits, total, part.start, self.valid_rows)

    def for_weight(
        self, operand: jax.Array, rows: jax.Array, total: WeightGradient, part: Columns | None = None
    ) -> WeightGradient:
        """One launch for a part. Else a product of XLA's, which adds to the total in place.

        So the first block, which has nothing to add to, has a program of its own.
        """
        whole, adds, late, *_ = total
        if part is not None:
            found = launch.product(self.head, operand, whole, part.start, self.valid_rows, rows, late)
            return total._replace(array=found)

        def product(dtype: np.dtype | None = None) -> jax.Array:
            found = self.head.for_weight(operand, rows, None if late is not None else dtype)
            return pad(found if late is None else late * found, whole.shape)

        if isinstance(adds, bool):
            found = whole + product() if adds else product(whole.dtype)
            return total._replace(array=found.astype(whole.dtype))
        found = jax.lax.cond(  # XLA lets both branches write where the total lies
            chosen_by_device(adds),
            lambda: (whole + product()).astype(whole.dtype),
            lambda: product().astype(whole.dtype),
        )
        return total._replace(array=found)

    def step(self, gradient: Gradient, exact: entries.Entries, plan: Plan, block: RowBlock) -> TileStep:
        """In place where a kernel can, else by slices."""
        head, batch, spec, size = self.head, self.batch, self.head.spec, plan.columns
        served = configs.product_for(spec, binding.capability(), size) is not None
        in_place = super().step(gradient, exact, plan, block)
        # As operands hidden states carry the scale of the weight's gradient, if that is a power of two, which costs no
        # accuracy, and operands have its exponents. Here, and not for each part: XLA would scale all rows for each.
        carrying = None
        if head.logit_scale is None and spec.dtype != jnp.float16:
            carrying = batch.hidden.astype(spec.dtype) * jnp.asarray(gradient.factor, spec.dtype)

        def part_step(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None) -> Arrays:
            alone = hidden_sum is None or isinstance(block.number, int)
            if alone and (weight_sum is None or not weight_sum.adds) and served:
                return in_place(index, hidden_sum, weight_sum)
            # The last tile begins early, and an earlier one counts there.
            first, tile = jnp.int32(index) * size, Tiles(spec.vocab_size, size, head.valid_columns).tile(index)
            dz = dataclasses.replace(self, valid_rows=None).dlogits(gradient, tile)  # products read all rows
            dz = entries.put_among(dz, exact, tile.start, first, size)
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


@dataclasses.dataclass(frozen=True)
class StudentBlock(TritonBlock):
    """The student's of two heads, whose dlogits XLA makes of both heads' logits."""

    made: PairDlogits

    def dlogits(self, gradient: Gradient, part: Columns | None = None, into: jax.Array | None = None) -> jax.Array:
        """A part's."""
        assert part is not None
        return self.made(part, self.valid_rows).astype(self.head.spec.dtype)
