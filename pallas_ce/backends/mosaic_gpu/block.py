"""The kernels of a block of rows on Hopper, which read the weight where it lies and add where sums lie."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.arrays import apart
from pallas_ce.backends.kernel_backend import KernelBlock
from pallas_ce.backends.mosaic_gpu.gemm.launch import Operands
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, product_kernel
from pallas_ce.backends.mosaic_gpu.kernels.product_kernel import NarrowSumEpilogue, ProductEpilogue
from pallas_ce.backends.protocol import Gradient
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns


@dataclasses.dataclass(frozen=True)
class MosaicBlock(KernelBlock):
    """A launch of one kernel for each, which may have no row to compute."""

    splits: bool = True  # whether there is memory for hidden's product in parts
    last: jax.Array | None = None  # `[]` bool: whether the block is the last one; None without `weight_bits`
    leaves_columns = True

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """See `forward_kernel`."""
        rows, into = again or (self.valid_rows, None)
        return forward_kernel.stash(self.head, self.batch.hidden, reference, names, rows, into)

    def dlogits(self, gradient: Gradient, part: Columns | None = None, into: jax.Array | None = None) -> jax.Array:
        """See `dlogits_kernel`."""
        given = self.head, self.batch.hidden, gradient.reference, gradient.coefficients
        made = dlogits_kernel.dlogits(*given, part=self._less(part), into=into, valid_rows=self.valid_rows)
        return made if part is None else made[: len(self.batch.hidden), : part.size]

    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """In parts of the vocabulary, where there is memory for partial products."""
        given, size, (rows, _) = self._hidden_operands(operand), self.head.spec.hidden_size, operand.shape
        product = given.product
        count = product_kernel.parts(product.config, rows, size, product.length) if self.splits else 1
        given = given._replace(product=dataclasses.replace(product, parts=count))
        shape = count, given.matrices[0].shape[0], size
        outputs = {"product": jax.ShapeDtypeStruct(shape, dtype if count == 1 else jnp.float32)}
        numbers = {"valid_rows": self.valid_rows, "finite_length": self.head.valid_columns}
        found = given.run(
            "pallas_ce_for_hidden", ProductEpilogue(), outputs, {"row_scale": given.by_row(scale)}, numbers
        )
        return found["product"].sum(axis=0, dtype=jnp.float32)[:rows].astype(dtype)

    def add_for_hidden(self, dlogits: jax.Array, total: jax.Array, part: Columns, block: RowBlock) -> jax.Array:
        """In place, from a multiple of 8 rows on."""
        rows, existing, less = len(dlogits), self.head.valid_columns, self._less(part)
        to_row = None if rows >= total.shape[0] else jnp.int32(block.number) * rows
        given = self._hidden_operands(dlogits)
        numbers: dict[str, Any] = {} if less is None else {"valid_length": less.count, "first_length": less.start}
        if less is not None and existing is not None:
            existing = existing - less.start
        numbers |= {"valid_rows": self.valid_rows, "to_row": to_row, "finite_length": existing}
        epilogue = ProductEpilogue(adds=True)
        return given.run("pallas_ce_add_for_hidden", epilogue, {"product": total}, numbers=numbers)["product"]

    def _hidden_operands(self, stored: jax.Array) -> Operands:
        """The weight counts as 0 from its entry `valid_columns` on, whatever it is; `stored` is 0 there."""
        weight = apart(self.head.weight.astype(self.head.spec.dtype))
        return product_kernel.hidden_operands(stored, weight, self.head.spec.vocab_axis)

    def for_weight(
        self, operand: jax.Array, rows: jax.Array, total: WeightGradient, part: Columns | None = None
    ) -> WeightGradient:
        """In place, without rows from `valid_rows` on."""
        (whole, adds, late, tile, bits), axis, size = total, self.head.spec.vocab_axis, self.head.spec.vocab_size
        starts, valid, numbers = size if axis and part is not None else 0, self.valid_rows, {}
        if part is not None:
            # A sum of the part alone: the last part starts early, and its own columns come last in it.
            alone = dataclasses.replace(part, start=part.start - jnp.minimum(part.start, size - part.size))
            part = self._less(alone if tile is None else part)
        replaced = not adds if isinstance(adds, bool) else jnp.logical_not(adds)
        narrow, outputs, epilogue = product_kernel.NARROW_CONFIG, {"product": whole}, NarrowSumEpilogue()
        config = product_kernel.weight_config(operand.shape[1], rows.shape[1], axis) if bits is None else narrow
        given = product_kernel.weight_operands(operand, rows, axis, config, held=bits is not None)
        # Nothing is added where no row is valid.
        if bits is None:
            limit: Any = operand.shape[1] if part is None or part.count is None else part.count
            if valid is not None and replaced is not True:
                limit = jnp.where(replaced | (valid > 0), limit, 0)
            numbers = {
                "valid_length": valid,
                ("valid_rows", "valid_columns")[axis]: limit if isinstance(limit, jax.Array) else None,
                ("to_row", "to_column")[axis]: None if part is None else part.start,
                "first": None if isinstance(replaced, bool) else replaced,
            }
            name, epilogue = "pallas_ce_for_weight", ProductEpilogue(starts, adds=replaced is not True)
        else:
            assert self.last is not None
            name, outputs["lower"], numbers = "pallas_ce_add_for_weight", bits, {"first": replaced, "last": self.last}
            if valid is not None:
                needed = replaced | self.last | (valid > 0)
                numbers |= {"valid_length": valid, "valid_rows": jnp.where(needed, given.matrices[0].shape[1], 0)}
        inputs = {"multiplier": None if late is None else late.astype(jnp.float32).reshape(1)}
        found = given.run(name, epilogue, outputs, inputs, numbers)
        return total._replace(array=found["product"], bits=found.get("lower"))

    def _less(self, part: Columns | None) -> Columns | None:
        """The part; None for all columns."""
        return None if part is None or part.size == self.head.spec.vocab_size else part
