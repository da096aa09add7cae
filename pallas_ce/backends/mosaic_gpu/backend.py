"""The Hopper backend: which kernel serves which part of a call, with which tiles and blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import entries
from pallas_ce.backends.exponentials import Stash, always_recomputed
from pallas_ce.backends.mosaic_gpu import in_forward, plans, recomputation
from pallas_ce.backends.mosaic_gpu.kernels import (
    forward_kernel,
    materialized_kernel,
    narrow_sum,
    operands,
    partials,
    product_kernel,
)
from pallas_ce.backends.mosaic_gpu.recomputation import GradientConfigs
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES, Config, Kernel, device_refusal, rule
from pallas_ce.backends.mosaic_gpu.top_k import StoredBlocks
from pallas_ce.backends.protocol import Backend, Capabilities, Description, Gradient, Launch, Mode, Plan
from pallas_ce.gradient_products import Arrays, TileStep
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.rows import RowBlock

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

# Column numbers pass through float32.
_LARGEST_VOCABULARY = 2**24

# Each pass's kernel that makes logits, and how many vectors by row it keeps for plain cross entropy.
_KERNELS: dict[Mode | None, tuple[Kernel, int]] = {
    None: ("forward", 1),
    "in_forward": ("stash", 2),
    "recompute": ("dlogits", 1),
}


@dataclasses.dataclass(frozen=True)
class MosaicGpuBackend(Backend):
    """See `protocol.Backend`.

    Attributes:
        config: tiles of every kernel, for tests; None: by the rules.
    """

    name = "mosaic_gpu"
    # Pallas has no rule for kernels that write in place inside checked regions.
    capabilities = Capabilities(checked_regions=False, large_blocks=True, cuda_only=True, casts_whole=True)
    materialized = materialized_kernel
    config: Config | None = None

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
            return plans.recompute(spec, tokens, scratch_bytes)
        return plans.by_rows(spec, tokens, mode, scratch_bytes, spare_bytes)

    def weight_bits(self, spec: HeadSpec, rows: int) -> tuple[int, int] | None:
        """See `narrow_sum`."""
        if spec.dtype != jnp.bfloat16 or not recomputation.in_place(operands.padded_spec(spec), rows, spec.weight_rows):
            return None
        shape = spec.weight_rows, spec.hidden_size
        return narrow_sum.lower_shape(*(shape if spec.vocab_axis == 0 else shape[::-1]))

    def describe(self, spec: HeadSpec, options: int, mode: Mode | None, plan: Plan) -> Description:
        """The kernel that makes logits for plain cross entropy."""
        spec = operands.padded_spec(spec)
        kernel, vectors = _KERNELS[mode]
        config = self.config or rule(kernel, spec, vectors, options)
        return Description(
            (Launch(f"pallas_ce_{kernel}", config.tile_rows, config.columns),), operands.weight_copy_bytes(spec)
        )

    def top_k(self, spec: HeadSpec, k: int, scratch_bytes: int | None) -> StoredBlocks:
        """Selects from stored logits, a block of rows at a time."""
        return StoredBlocks(spec, k, scratch_bytes)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """Statistics by one kernel; the targets' logits by XLA."""
        head = operands.padded_head(head)
        partial_bytes = min(PARTIALS_BYTES, plan.scratch_bytes)
        config = self._config("forward", head, partials.vectors(names))
        partial = forward_kernel.statistics(head, batch.hidden, names, config, partial_bytes, filled)
        return entries.with_targets(partial, head, batch, names)

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """See `recomputation`."""
        head = operands.padded_head(head)
        return recomputation.step(head, batch, gradient, plan, block, self._configs(head, batch, gradient, plan))

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, Stash]:
        """See `exponentials`."""
        head = operands.padded_head(head)
        config = self._config("stash", head, 1 + partials.vectors(names))
        skipped = in_forward.skipped_from(head.spec, block)
        return in_forward.Kernels(head, batch, skipped, config).make(names)

    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: Stash, sums: Arrays, plan: Plan, block: RowBlock
    ) -> tuple[Arrays, jax.Array | None]:
        """See `exponentials`."""
        head = operands.padded_head(head)
        spec, configs = head.spec, self._configs(head, batch, gradient, plan)
        config = configs.dlogits
        if not always_recomputed(spec, entries.without(gradient.coefficients)):
            config = self._config("stash", head, 1 + partials.vectors(stash.names))
        skipped = in_forward.skipped_from(spec, block)
        total = gradient.weight_sum
        last = None if total is None or total.bits is None else block.last
        return in_forward.Kernels(head, batch, skipped, config, configs, plan.splits, last).products(
            gradient, stash, sums
        )

    def _configs(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan) -> GradientConfigs:
        spec, vectors = head.spec, sum(c is not None for c in entries.without(gradient.coefficients))
        return GradientConfigs(
            self._config("dlogits", head, vectors),
            self.config or product_kernel.hidden_config(batch.hidden.shape[0], spec.hidden_size),
            self.config or product_kernel.weight_config(plan.columns, spec.hidden_size, spec.vocab_axis),
        )

    def _config(self, kernel: Kernel, head: Head, vectors: int) -> Config:
        given = (head.bias, head.logit_scale, head.logit_weights, head.spec.softcap)
        return self.config or rule(kernel, head.spec, vectors, sum(option is not None for option in given))
