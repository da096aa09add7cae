"""The in-forward mode's two halves on Hopper; `exponentials` has the part that all GPUs share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.exponentials import Block
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, narrow_sum, operands, product_kernel, stash_kernel
from pallas_ce.backends.protocol import Gradient
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import WeightGradient
from pallas_ce.streaming.rows import RowBlock

# Below this many rows there is little to skip, and hidden's product takes the tiles of a shorter sum.
_LEAST_ROWS = 2048


def skipped_from(block: RowBlock) -> jax.Array | None:
    """The first row that is skipped, `[]` int32; None where all are computed, as in a small problem's only block."""
    return None if isinstance(block.number, int) and block.tile.size < _LEAST_ROWS else block.filled


@dataclasses.dataclass(frozen=True)
class Kernels(Block):
    """See `Block`.

    Attributes:
        splits: whether there is memory for hidden's product in parts.
        last: `[]` bool: whether the block is the last one; None without `weight_bits`.
    """

    splits: bool = True
    last: jax.Array | None = None

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """Launches one kernel, which may have no row to compute."""
        head, hidden = self.head, self.batch.hidden
        rows, into = (self.valid_rows, None) if again is None else again
        return stash_kernel.stash(head, hidden, reference, names, rows, into)

    def recomputed(self, gradient: Gradient, operand: jax.Array) -> jax.Array:
        """Recomputes dlogits by a kernel that overwrites the stash."""
        given = self.head, self.batch.hidden, gradient.reference, gradient.coefficients
        return dlogits_kernel.dlogits(*given, into=operand, valid_rows=self.valid_rows)

    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """Multiplies by a kernel, which XLA does not autotune."""
        head = self.head
        given = operand, operands.own_weight(head), head.spec.vocab_axis, self.valid_rows, head.valid_columns
        return product_kernel.for_hidden(*given, scale=scale, dtype=dtype, splits=self.splits)

    def for_weight(self, operand: jax.Array, rows: jax.Array, total: WeightGradient) -> WeightGradient:
        """Multiplies by a kernel, which adds in place."""
        (whole, adds, late, _, bits), axis = total, self.head.spec.vocab_axis
        shared: Any = {"valid_rows": self.valid_rows, "multiplier": late}
        if bits is not None:
            assert self.last is not None
            given, first = (operand, rows, axis, (whole, bits)), jnp.logical_not(adds)
            whole, bits = narrow_sum.add_for_weight(*given, first=first, last=self.last, **shared)
            return total._replace(array=whole, bits=bits)
        replaced = not adds if isinstance(adds, bool) else jnp.logical_not(adds)
        return total._replace(array=product_kernel.for_weight(operand, rows, axis, whole, replaced=replaced, **shared))
