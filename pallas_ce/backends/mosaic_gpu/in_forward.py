"""The in-forward mode's two halves on Hopper; `exponentials` has the part that all GPUs share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.exponentials import Block, Multiplying, Stashing, WeightTotal
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, narrow_sum, operands, product_kernel, stash_kernel
from pallas_ce.backends.protocol import Gradient
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.rows import RowBlock

# Below this many rows there is little to skip, and hidden's product takes the tiles of a shorter sum.
_LEAST_ROWS = 2048


def skipped_from(block: RowBlock) -> jax.Array | None:
    """The first row that is skipped, `[]` int32; None where all are computed, as in a small problem's only block."""
    return None if isinstance(block.number, int) and block.tile.size < _LEAST_ROWS else block.filled


class _Exponentials(Block):
    """The exponentials' kernel."""

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """Launches one kernel, which may have no row to compute."""
        head, hidden = self.head, self.batch.hidden
        rows, into = (self.valid_rows, None) if again is None else again
        return stash_kernel.stash(head, hidden, reference, names, rows, into)


class Kernels(_Exponentials, Stashing):
    """See `Stashing`."""


@dataclasses.dataclass(frozen=True)
class Multiply(_Exponentials, Multiplying):
    """See `Multiplying`.

    Attributes:
        splits: whether there is memory for hidden's product in parts.
        last: `[]` bool: whether the block is the last one; None without `weight_bits`.
    """

    splits: bool
    last: jax.Array | None

    def recomputed(self, gradient: Gradient, operand: jax.Array) -> jax.Array:
        """Recomputes dlogits by a kernel that overwrites the stash."""
        given = self.head, self.batch.hidden, gradient.reference, gradient.coefficients
        return dlogits_kernel.dlogits(*given, into=operand, valid_rows=self.valid_rows)

    def for_hidden(self, operand: jax.Array) -> jax.Array:
        """Multiplies by a kernel, which XLA does not autotune."""
        given = operand, operands.own_weight(self.head), self.head.spec.vocab_axis
        return product_kernel.for_hidden(*given, self.valid_rows, splits=self.splits)

    def for_weight(
        self, operand: jax.Array, rows: jax.Array, late: jax.Array | None, total: WeightTotal, adds: jax.Array | bool
    ) -> WeightTotal:
        """Multiplies by a kernel, which adds in place."""
        (whole, bits), axis = total, self.head.spec.vocab_axis
        shared: Any = {"valid_rows": self.valid_rows, "multiplier": late}
        if bits is not None:
            assert self.last is not None
            first = jnp.logical_not(adds)
            return narrow_sum.add_for_weight(operand, rows, axis, (whole, bits), first=first, last=self.last, **shared)
        replaced = not adds if isinstance(adds, bool) else jnp.logical_not(adds)
        found = product_kernel.for_weight(operand, rows, axis, whole, replaced=replaced, **shared)
        return found, None
