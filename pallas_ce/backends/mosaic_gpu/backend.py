"""The Hopper backend: which kernel serves which part of a call, with which tiles and blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import device, entries
from pallas_ce.backends.kernel_backend import KernelBackend, KernelBlock
from pallas_ce.backends.mosaic_gpu import plans, schedule
from pallas_ce.backends.mosaic_gpu.gemm.launch import Operands
from pallas_ce.backends.mosaic_gpu.kernels import forward_kernel, materialized_kernel, operands, product_kernel
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import DlogitsEpilogue, vectors_by_row
from pallas_ce.backends.mosaic_gpu.kernels.logits_kernel import StoredBlocks
from pallas_ce.backends.mosaic_gpu.kernels.product_kernel import NarrowSumEpilogue, ProductEpilogue
from pallas_ce.backends.protocol import Gradient, Launch, Mode, Plan
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.row import Partial, add, fields_of
from pallas_ce.streaming.gradient_products import WeightGradient
from pallas_ce.streaming.loops import apart
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

# Column numbers pass through float32.
_LARGEST_VOCABULARY = 2**24

# Below this many rows of an only block in_forward has little to skip, and hidden's product takes the tiles of a shorter
# sum.
_LEAST_ROWS = 2048

# Each pass's kernel that makes logits, and how many vectors by row it keeps for plain cross entropy.
_KERNELS: dict[Mode | None, tuple[schedule.Kernel, int]] = {
    None: ("forward", 1),
    "in_forward": ("stash", 2),
    "recompute": ("dlogits", 1),
}


class MosaicGpuBackend(KernelBackend):
    """Kernels for Hopper GPUs, written in Pallas."""

    name = "mosaic_gpu"
    materialized = materialized_kernel
    top_k = StoredBlocks

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Temperatures by row, operands that the kernels do not know or cannot read as they lie, and other devices."""
        if rows.row_temperature:
            return (
                "its kernels know no temperature for each row; pass temperature as a Python number, which is folded "
                "into the head, or use 'xla'"
            )
        if spec.dtype not in _DTYPES:
            return (
                f"its kernels multiply bfloat16 and float16 operands, and the compute dtype is {spec.dtype.name}; "
                "implementation='xla' keeps that accuracy (or give it bfloat16 operands)"
            )
        if spec.precision != jax.lax.Precision.DEFAULT:
            return (
                f"its kernels multiply {spec.dtype.name} operands as they are, and precision={spec.precision} asks for "
                "another algorithm; implementation='xla' has it (or leave precision=None)"
            )
        if spec.vocab_size > _LARGEST_VOCABULARY:
            return f"it numbers at most {_LARGEST_VOCABULARY} vocabulary entries, not {spec.vocab_size}; use 'xla'"
        if spec.hidden_size % operands.LENGTH_MULTIPLE:
            return (
                f"its kernels read a weight whose H is a multiple of {operands.LENGTH_MULTIPLE}, not "
                f"{spec.hidden_size}; use 'triton' or 'xla'"
            )
        weight = ("[V, H]", operands.ROW_MULTIPLE), ("[H, V]", operands.LENGTH_MULTIPLE)
        shape, multiple = weight[spec.vocab_axis]
        if spec.weight_rows % multiple:
            return (
                f"its kernels read a {shape} weight whose V is a multiple of {multiple}, not {spec.weight_rows}; pad "
                f"it to {operands.round_up(spec.weight_rows, multiple)} and pass vocab_size={spec.vocab_size}, or use "
                "'triton' or 'xla'"
            )
        return None if padded_share else device.refusal(self.name)  # asked for the call, where its arrays are known

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """Bytes for one row at a time, or for one row of a small tile."""
        return plans.minimum(operands.padded_spec(spec), mode)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """Blocks of rows as large as the budget allows, of nearly equal size, in full tiles."""
        spec = operands.padded_spec(spec)
        if mode == "recompute":
            return plans.recompute(spec, tokens, scratch_bytes, device.multiprocessors())
        return plans.by_rows(spec, tokens, mode, scratch_bytes, spare_bytes)

    @override
    def weight_bits(self, spec: HeadSpec) -> tuple[int, int] | None:
        shape = spec.weight_rows, spec.hidden_size
        shape = shape if spec.vocab_axis == 0 else shape[::-1]
        return product_kernel.lower_shape(*shape) if spec.dtype == jnp.bfloat16 else None

    def describe(self, spec: HeadSpec, options: int, mode: Mode | None, rows: int) -> Launch:
        """The kernel that makes logits for plain cross entropy."""
        spec = operands.padded_spec(spec)
        kernel, vectors = _KERNELS[mode]
        config = schedule.rule(kernel, spec, rows, vectors, options)
        return Launch(f"pallas_ce_{kernel}", config.tile_rows, config.columns)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """Statistics by one kernel; the targets' logits by XLA."""
        head, partial_bytes = operands.padded_head(head), min(schedule.PARTIALS_BYTES, plan.scratch_bytes)
        partial = forward_kernel.statistics(head, batch.hidden, names, partial_bytes, filled)
        return entries.with_targets(partial, head, batch, names)

    def block(
        self, head: Head, batch: Batch, block: RowBlock, plan: Plan, gradient: Gradient | None = None
    ) -> "MosaicBlock":
        """With padding for vocabulary."""
        head, number = operands.padded_head(head), block.number
        skipped = None if isinstance(number, int) and block.tile.size < _LEAST_ROWS else block.filled
        total = None if gradient is None else gradient.weight_sum
        return MosaicBlock(head, batch, skipped, plan.splits, block.last if total and total.bits is not None else None)


@dataclasses.dataclass(frozen=True)
class MosaicBlock(KernelBlock):
    """A launch of one kernel for each, which may have no row to compute."""

    splits: bool = True  # whether there is memory for hidden's product in parts
    last: jax.Array | None = None  # `[]` bool: whether the block is the last one; None without `weight_bits`
    leaves_columns = True

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """E has the shape `operands.stored_shape`, and is 0 in padding's columns as far as tiles reach.

        Skipped are whole tiles of rows, which keep what an earlier E has there.
        """
        head, spec, (rows, _) = self.head, self.head.spec, self.batch.hidden.shape
        valid, into = again or (self.valid_rows, None)
        # The sums of u are the same for all rows.
        fields = tuple(field for field in fields_of(names | {"lse"}, targets=False) if field != "sum_weights")
        vectors = "reference", *fields_of(names, targets=False)
        logits, given = operands.operands("stash", head, self.batch.hidden, vectors)
        # One kernel serves a program that learns at run time whether rows are skipped, or E is to be made again: the
        # kernel always reads how many rows are valid, and always writes into an array.
        numbers = {"valid_rows": jnp.int32(rows) if valid is None else valid}
        outputs: dict[str, Any] = forward_kernel.outputs(fields, given.product)
        shape = operands.stored_shape(rows, spec.vocab_size)
        outputs["stash"] = jax.lax.empty(shape, spec.dtype) if into is None else into
        inputs = {"reference": given.by_row(reference)}
        found = given.run("pallas_ce_stash", forward_kernel.StashEpilogue(logits, fields), outputs, inputs, numbers)

        def partial() -> Partial:
            whole = jax.tree.map(lambda x: x[:rows], forward_kernel.read(found, fields, add))
            if whole.weighted_sum is None:
                return whole
            return whole._replace(sum_weights=jnp.full(rows, entries.weights_that_count(head).sum()))

        return partial, found["stash"]

    def dlogits(self, gradient: Gradient, part: Columns | None = None, into: jax.Array | None = None) -> jax.Array:
        """A part begins at a multiple of `STEP`. Undefined are whole tiles of skipped rows, and columns behind one."""
        (start, width, count), hidden, vectors = self._of(part), self.batch.hidden, vectors_by_row(gradient)
        logits, given = operands.operands("dlogits", self.head, hidden, vectors.keys() - {"reference"}, width)
        inputs = {name: given.by_row(x) for name, x in vectors.items()}
        numbers = {"first_column": start, "valid_columns": count, "valid_rows": self.valid_rows}
        shape = operands.stored_shape(len(hidden), width)
        out = jax.ShapeDtypeStruct(shape, self.head.spec.dtype) if into is None else into
        found = given.run("pallas_ce_dlogits", DlogitsEpilogue(logits), {"dlogits": out}, inputs, numbers)["dlogits"]
        return found if part is None else found[: len(hidden), : part.size]

    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """In parts of the vocabulary, where there is memory for partial products."""
        given = self._hidden_operands(operand, self.splits)
        shape = given.product.parts, given.matrices[0].shape[0], self.head.spec.hidden_size
        outputs = {"product": jax.ShapeDtypeStruct(shape, dtype if shape[0] == 1 else jnp.float32)}
        numbers = {"valid_rows": self.valid_rows, "finite_length": self.head.valid_columns}
        inputs = {"row_scale": given.by_row(scale)}
        found = given.run("pallas_ce_for_hidden", ProductEpilogue(), outputs, inputs, numbers)
        return found["product"].sum(axis=0, dtype=jnp.float32)[: len(operand)].astype(dtype)

    def add_for_hidden(self, dlogits: jax.Array, total: jax.Array, part: Columns, block: RowBlock) -> jax.Array:
        """In place, from a multiple of 8 rows on."""
        rows, existing, (start, _, count) = len(dlogits), self.head.valid_columns, self._of(part)
        to_row = None if rows >= total.shape[0] else jnp.int32(block.number) * rows
        given = self._hidden_operands(dlogits)
        if start is not None and existing is not None:
            existing = existing - start
        numbers = {"valid_length": count, "first_length": start}
        numbers |= {"valid_rows": self.valid_rows, "to_row": to_row, "finite_length": existing}
        epilogue = ProductEpilogue(adds=True)
        return given.run("pallas_ce_add_for_hidden", epilogue, {"product": total}, numbers=numbers)["product"]

    def _hidden_operands(self, stored: jax.Array, splits: bool = False) -> Operands:
        """The weight counts as 0 from its entry `valid_columns` on, whatever it is; `stored` is 0 there."""
        spec, rows, weight = self.head.spec, len(stored), apart(self.head.weight.astype(self.head.spec.dtype))
        config, stored = product_kernel.hidden_config(rows, spec.hidden_size), operands.padded(stored)
        parts = product_kernel.parts(config, rows, spec.hidden_size, stored.shape[1]) if splits else 1
        blocks = config.row_blocks(rows), config.column_blocks(spec.hidden_size)
        right_axis = 1 - spec.vocab_axis
        product = schedule.Product(config, *blocks, stored.shape[1], right_axis=right_axis, parts=parts)
        return Operands(product, (stored, weight))

    def for_weight(
        self, operand: jax.Array, rows: jax.Array, total: WeightGradient, part: Columns | None = None
    ) -> WeightGradient:
        """In place, without rows from `valid_rows` on."""
        (whole, adds, late, tile, bits), axis, size = total, self.head.spec.vocab_axis, self.head.spec.vocab_size
        starts, valid = size if axis and part is not None else 0, self.valid_rows
        epilogue: ProductEpilogue | NarrowSumEpilogue
        numbers: dict[str, Any]
        if part is not None:
            # A sum of the part alone: the last part starts early, and its own columns come last in it.
            alone = dataclasses.replace(part, start=part.start - jnp.minimum(part.start, size - part.size))
            part = alone if tile is None else part
        start, _, count = self._of(part)
        replaced = not adds if isinstance(adds, bool) else jnp.logical_not(adds)
        outputs, given = {"product": whole}, product_kernel.weight_operands(operand, rows, axis, held=bits is not None)
        if bits is None:
            limit: Any = operand.shape[1] if count is None else count
            if valid is not None and replaced is not True:  # nothing is added where no row is valid
                limit = jnp.where(replaced | (valid > 0), limit, 0)
            numbers = {
                "valid_length": valid,
                ("valid_rows", "valid_columns")[axis]: limit if isinstance(limit, jax.Array) else None,
                ("to_row", "to_column")[axis]: start,
                "first": None if isinstance(replaced, bool) else replaced,
            }
            name, epilogue = "pallas_ce_for_weight", ProductEpilogue(starts, adds=replaced is not True)
        else:
            assert self.last is not None
            name, epilogue, outputs["lower"] = "pallas_ce_add_for_weight", NarrowSumEpilogue(), bits
            height = given.matrices[0].shape[1]
            worked_on = None if valid is None else jnp.where(replaced | self.last | (valid > 0), height, 0)
            numbers = {"first": replaced, "last": self.last, "valid_length": valid, "valid_rows": worked_on}
        inputs = {"multiplier": None if late is None else late.astype(jnp.float32).reshape(1)}
        found = given.run(name, epilogue, outputs, inputs, numbers)
        return total._replace(array=found["product"], bits=found.get("lower"))

    def _of(self, part: Columns | None) -> tuple[jax.Array | int | None, int, jax.Array | int | None]:
        """First column, size and columns before the end of a part; None for the first and the last of all columns."""
        size = self.head.spec.vocab_size
        return (None, size, None) if part is None or part.size == size else (part.start, part.size, part.count)
