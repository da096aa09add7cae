"""The in-forward mode's two halves on Hopper; `exponentials` has the part that all GPUs share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ce.backends.exponentials import Block
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, narrow_sum, operands, product_kernel, stash_kernel
from pallas_ce.backends.mosaic_gpu.recomputation import GradientConfigs
from pallas_ce.backends.mosaic_gpu.schedule import Config
from pallas_ce.backends.protocol import Gradient
from pallas_ce.gradient_products import WeightGradient
from pallas_ce.head import HeadSpec
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.rows import RowBlock


def skipped_from(spec: HeadSpec, block: RowBlock) -> jax.Array | None:
    """The first row that is skipped, `[]` int32; None where all are computed."""
    return block.filled if product_kernel.skips(spec, block) else None


@dataclasses.dataclass(frozen=True)
class Kernels(Block):
    """See `Block`.

    Attributes:
        config: tiles of the kernel that makes the operand: exponentials or, where always recomputed, dlogits.
        configs: tiles of the products; None for the first half of the work.
        splits: whether there is memory for hidden's product in parts.
        last: `[]` bool: whether the block is the last one; None without `weight_bits`.
    """

    config: Config
    configs: GradientConfigs | None = None
    splits: bool = True
    last: jax.Array | None = None

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """Launches one kernel, which may have no row to compute."""
        head, hidden = self.head, self.batch.hidden
        rows, into = (self.valid_rows, None) if again is None else again
        return stash_kernel.stash(head, hidden, reference, names, self.config, rows, into)

    def recomputed(self, gradient: Gradient, operand: jax.Array) -> jax.Array:
        """Recomputes dlogits by a kernel that overwrites the stash."""
        head, hidden, (coefficients, reference, *_) = self.head, self.batch.hidden, gradient

        def write(stored: Any) -> None:
            config, rows = self.config, self.valid_rows
            dlogits_kernel.dlogits(head, hidden, reference, coefficients, config, into=stored, valid_rows=rows)

        return pl.run_state(write)(operand)

    def for_hidden(self, operand: jax.Array) -> jax.Array:
        """Multiplies by a kernel, which XLA does not autotune; by XLA where the kernel does not serve."""
        head, spec = self.head, self.head.spec
        if not product_kernel.serves(spec, operand.shape[0]):
            weight = lax.slice_in_dim(operands.own_weight(head), 0, spec.vocab_size, axis=spec.vocab_axis)
            return head.matmul(operand, weight, (1, spec.vocab_axis))
        weight, config = operands.weight_of(head), present(self.configs).hidden
        return product_kernel.for_hidden(operand, weight, spec.vocab_axis, config, self.valid_rows, splits=self.splits)

    def for_weight(self, operand: jax.Array, rows: jax.Array, total: WeightGradient) -> WeightGradient:
        """Multiplies by a kernel, which adds in place; by XLA where the kernel does not serve."""
        spec, (whole, adds, late, _, bits) = self.head.spec, total
        shared: Any = {"valid_rows": self.valid_rows, "multiplier": late}
        if bits is not None:
            assert self.last is not None
            given, first = (operand, rows, spec.vocab_axis, (whole, bits)), jnp.logical_not(adds)
            whole, bits = narrow_sum.add_for_weight(*given, first=first, last=self.last, **shared)
            return total._replace(array=whole, bits=bits)
        if not product_kernel.serves(spec, rows.shape[0]):
            a, b = (operand, rows) if spec.vocab_axis == 0 else (rows, operand)
            product = self.head.matmul(a, b, (0, 0), whole.dtype if adds is False and late is None else None)
            product = operands.pad(product if late is None else late * product, whole.shape)
            product = product if adds is False else jnp.where(adds, whole, 0) + product
            return total._replace(array=product.astype(whole.dtype))
        into = jax.ShapeDtypeStruct(whole.shape, whole.dtype) if adds is False else whole
        replaced = not adds if isinstance(adds, bool) else jnp.logical_not(adds)
        config = present(self.configs).weight
        found = product_kernel.for_weight(operand, rows, spec.vocab_axis, config, into, replaced=replaced, **shared)
        return total._replace(array=found)
