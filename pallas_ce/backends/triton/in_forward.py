"""What `exponentials` leaves to a backend: kernels for in-forward mode, with products by XLA."""

from collections.abc import Callable

import jax
import numpy as np

from pallas_ce.backends.exponentials import Block
from pallas_ce.backends.protocol import Gradient
from pallas_ce.backends.triton import launch
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import WeightGradient
from pallas_ce.streaming.loops import device_cond
from pallas_ce.streaming.tiles import Tiles, pad


class Kernels(Block):
    """See `Block`."""

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """One launch, which may have nothing to do."""
        return launch.exponentials(self.head, self.batch, reference, names, again)

    def recomputed(self, gradient: Gradient, operand: jax.Array) -> jax.Array:
        """One launch."""
        return launch.dlogits(self.head, self.batch, gradient, into=operand)

    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """One product, whose scaling and rounding XLA joins with what comes after."""
        head = self.head
        tile = Tiles(head.spec.vocab_size, head.spec.vocab_size, head.valid_columns).tile(0)
        return scale[:, None] * head.matmul(operand, head.existing_weight(tile), (1, head.spec.vocab_axis))

    def for_weight(self, operand: jax.Array, rows: jax.Array, total: WeightGradient) -> WeightGradient:
        """One product, which XLA has add to the total in place: so the first block has a program of its own."""
        whole, adds, late, *_ = total

        def product(dtype: np.dtype | None = None) -> jax.Array:
            found = self.head.for_weight(operand, rows, None if late is not None else dtype)
            return pad(found if late is None else late * found, whole.shape)

        def added() -> jax.Array:
            return (whole + product()).astype(whole.dtype)

        if isinstance(adds, bool):
            return total._replace(array=added() if adds else product(whole.dtype).astype(whole.dtype))
        # XLA lets both branches write where the total lies.
        return total._replace(array=device_cond(adds, added, lambda: product().astype(whole.dtype)))
