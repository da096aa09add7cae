"""The kernels of a block of rows on Hopper."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.arrays import apart
from pallas_ce.backends.kernel_backend import KernelBlock
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, product_kernel
from pallas_ce.backends.protocol import Gradient
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns


@dataclasses.dataclass(frozen=True)
class MosaicBlock(KernelBlock):
    """What the kernels read of a block, beside what `Block` has."""

    splits: bool = True  # whether there is memory for hidden's product in parts
    last: jax.Array | None = None  # `[]` bool: whether the block is the last one; None without `weight_bits`
    leaves_columns = True

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """Launches one kernel, which may have no row to compute."""
        rows, into = again or (self.valid_rows, None)
        return forward_kernel.stash(self.head, self.batch.hidden, reference, names, rows, into)

    def dlogits(self, gradient: Gradient, part: Columns | None = None, into: jax.Array | None = None) -> jax.Array:
        """Launches one kernel."""
        given = self.head, self.batch.hidden, gradient.reference, gradient.coefficients
        made = dlogits_kernel.dlogits(*given, part=self._less(part), into=into, valid_rows=self.valid_rows)
        return made if part is None else made[: len(self.batch.hidden), : part.size]

    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """Multiplies by a kernel, which XLA does not autotune."""
        head = self.head
        given = operand, apart(head.weight.astype(head.spec.dtype)), head.spec.vocab_axis, self.valid_rows
        shared: Any = {"scale": scale, "dtype": dtype, "splits": self.splits}
        return product_kernel.for_hidden(*given, head.valid_columns, **shared)

    def add_for_hidden(self, dlogits: jax.Array, total: jax.Array, part: Columns, block: RowBlock) -> jax.Array:
        """Multiplies by a kernel, which adds in place."""
        head, rows = self.head, len(dlogits)
        to_row = None if rows >= total.shape[0] else jnp.int32(block.number) * rows
        given = dlogits, apart(head.weight.astype(head.spec.dtype)), head.spec.vocab_axis, total, self._less(part)
        return product_kernel.add_for_hidden(*given, to_row, self.valid_rows, head.valid_columns)

    def for_weight(
        self, operand: jax.Array, rows: jax.Array, total: WeightGradient, part: Columns | None = None
    ) -> WeightGradient:
        """Multiplies by a kernel, which adds in place."""
        (whole, adds, late, tile, bits), axis, size = total, self.head.spec.vocab_axis, self.head.spec.vocab_size
        shared: Any = {"valid_rows": self.valid_rows, "multiplier": late}
        if bits is not None:
            assert self.last is not None
            given, first = (operand, rows, axis, (whole, bits)), jnp.logical_not(adds)
            whole, bits = product_kernel.add_narrow_for_weight(*given, first=first, last=self.last, **shared)
            return total._replace(array=whole, bits=bits)
        if part is not None:
            # A sum of the part alone: the last part starts early, and its own columns come last in it.
            alone = dataclasses.replace(part, start=part.start - jnp.minimum(part.start, size - part.size))
            part = alone if tile is None else part
            shared |= {"part": self._less(part), "starts": size}
        replaced = not adds if isinstance(adds, bool) else jnp.logical_not(adds)
        return total._replace(array=product_kernel.for_weight(operand, rows, axis, whole, replaced=replaced, **shared))

    def _less(self, part: Columns | None) -> Columns | None:
        """The part; None for all columns."""
        return None if part is None or part.size == self.head.spec.vocab_size else part
