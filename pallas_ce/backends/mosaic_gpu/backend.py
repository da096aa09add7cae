"""The Hopper backend: which kernel serves which part of a call, with which tiles and blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import device as targets
from pallas_ce.backends import entries
from pallas_ce.backends.kernel_backend import KernelBackend
from pallas_ce.backends.mosaic_gpu import plans, schedule
from pallas_ce.backends.mosaic_gpu.block import MosaicBlock
from pallas_ce.backends.mosaic_gpu.kernels import (
    forward_kernel,
    logits_kernel,
    materialized_kernel,
    operands,
    product_kernel,
)
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES, Kernel, device_refusal
from pallas_ce.backends.protocol import Gradient, Launch, Mode, Plan
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.rows import RowBlock

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

# Column numbers pass through float32.
_LARGEST_VOCABULARY = 2**24

# Below this many rows of an only block in_forward has little to skip, and hidden's product takes the tiles of a shorter
# sum.
_LEAST_ROWS = 2048

# Each pass's kernel that makes logits, and how many vectors by row it keeps for plain cross entropy.
_KERNELS: dict[Mode | None, tuple[Kernel, int]] = {
    None: ("forward", 1),
    "in_forward": ("stash", 2),
    "recompute": ("dlogits", 1),
}


class MosaicGpuBackend(KernelBackend):
    """See `protocol.Backend`."""

    name = "mosaic_gpu"
    materialized = materialized_kernel
    top_k = logits_kernel.StoredBlocks

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Refuses temperatures by row, operands and precisions that the kernels do not know, and other devices."""
        if rows.row_temperature:
            return (
                "its kernels know no temperature for each row; pass temperature as a Python number, which is folded "
                "into the head, or use 'xla'"
            )
        if spec.dtype not in _DTYPES:
            return (
                f"its kernels multiply bfloat16 and float16 operands, and the compute dtype is {spec.dtype.name}; "
                "implementation='xla' keeps that accuracy (or pass dtype=jnp.bfloat16)"
            )
        if spec.precision != jax.lax.Precision.DEFAULT:
            return (
                f"its kernels multiply {spec.dtype.name} operands as they are, and precision={spec.precision} asks for "
                "another algorithm; implementation='xla' has it (or leave precision=None)"
            )
        if spec.vocab_size > _LARGEST_VOCABULARY:
            return f"it numbers at most {_LARGEST_VOCABULARY} vocabulary entries, not {spec.vocab_size}; use 'xla'"
        if reason := operands.refusal(spec):
            return reason
        return None if padded_share else device_refusal()  # asked for the call, where its arrays are known

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """Bytes for one row at a time, or for one row of a small tile."""
        return plans.minimum(operands.padded_spec(spec), mode)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """Blocks of rows as large as the budget allows, of nearly equal size, in full tiles."""
        spec = operands.padded_spec(spec)
        if mode == "recompute":
            return plans.recompute(spec, tokens, scratch_bytes, targets.multiprocessors())
        return plans.by_rows(spec, tokens, mode, scratch_bytes, spare_bytes)

    def weight_bits(self, spec: HeadSpec, rows: int) -> tuple[int, int] | None:
        """See `product_kernel`."""
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
        head, partial_bytes = operands.padded_head(head), min(PARTIALS_BYTES, plan.scratch_bytes)
        partial = forward_kernel.statistics(head, batch.hidden, names, partial_bytes, filled)
        return entries.with_targets(partial, head, batch, names)

    def block(
        self, head: Head, batch: Batch, block: RowBlock, plan: Plan, gradient: Gradient | None = None
    ) -> MosaicBlock:
        """With padding for vocabulary."""
        head, number = operands.padded_head(head), block.number
        skipped = None if isinstance(number, int) and block.tile.size < _LEAST_ROWS else block.filled
        total = None if gradient is None else gradient.weight_sum
        return MosaicBlock(head, batch, skipped, plan.splits, block.last if total and total.bits is not None else None)
