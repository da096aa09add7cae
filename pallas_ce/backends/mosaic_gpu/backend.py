"""The Hopper backend: which kernel serves which part of a call, with which tiles and blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.mosaic_gpu import products, recomputation
from pallas_ce.backends.mosaic_gpu.kernels import entries, forward_kernel, operands, product_kernel
from pallas_ce.backends.mosaic_gpu.schedule import plans
from pallas_ce.backends.mosaic_gpu.schedule.config import (
    PARTIALS_BYTES,
    Config,
    GradientConfigs,
    Kernel,
    device_refusal,
    schedule,
    sm_count,
)
from pallas_ce.backends.mosaic_gpu.tuning import tuning
from pallas_ce.backends.protocol import Accumulators, Launch, Mode, Plan, Residual
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec, NeedsGrad, TileStep
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.row import Partial, merge
from pallas_ce.streaming.rows import RowBlock

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

# Column numbers pass through float32.
_LARGEST_VOCABULARY = 2**24

# 16 bytes of them.
_ALIGNED_COLUMNS = 8

# Padding is computed for nothing.
_VOCABULARY_PER_PADDING = 64

# What each pass makes logits with, and the vectors by row and bytes that a window leaves, of plain cross entropy.
_KERNELS: dict[Mode | None, tuple[Kernel, int, int]] = {
    None: ("forward", 1, 8),
    "in_forward": ("stash", 2, 8),
    "recompute": ("dlogits", 1, 0),
}


@dataclasses.dataclass(frozen=True)
class MosaicGpuBackend:
    """See `protocol.Backend`.

    Attributes:
        config: tiles of every kernel, for tests; None to have `tuning` choose.
    """

    name = "mosaic_gpu"
    in_checked_regions = False  # Pallas has no rule for kernels that write in place there
    counts_on_device = True
    few_launches = True
    narrow_stash = True
    config: Config | None = None

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN) -> str | None:
        """All but bfloat16 and float16 operands, whose accuracy is the reason to ask for wider ones."""
        if rows.targets is not None:
            return f"its kernels read one label for each row, and labels hold K={rows.targets}; use 'xla'"
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
        if spec.vocab_size > _LARGEST_VOCABULARY:
            return f"it numbers at most {_LARGEST_VOCABULARY} vocabulary entries, not {spec.vocab_size}; use 'xla'"
        return device_refusal()

    def serves_padding(self, spec: HeadSpec) -> bool:
        """Where no entries are left to XLA."""
        return operands.covered(spec) == spec.vocab_size

    def takes_padding(self, spec: HeadSpec) -> bool:
        """A little, where it makes rows of 32 bytes: products then read logits and weight where they are."""
        padding = spec.weight_rows - spec.vocab_size
        aligned = spec.weight_rows % operands.LENGTH_MULTIPLE == 0
        return aligned and 0 < padding <= spec.vocab_size // _VOCABULARY_PER_PADDING

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """Bytes for one row at a time, or for one row of a small tile."""
        return plans.minimum(spec, mode)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """As large as the budget allows; blocks of rows of nearly equal size, in full tiles."""
        if mode == "recompute":
            return plans.recompute(spec, tokens, scratch_bytes)
        return plans.by_rows(spec, tokens, mode, scratch_bytes, spare_bytes)

    def launches(self, spec: HeadSpec, options: int, mode: Mode | None, plan: Plan) -> tuple[Launch, ...]:
        """One; those that only run where exponentials do not fit 16 bits are left out."""
        kernel, vectors, bytes_per_row = _KERNELS[mode]
        config, source = self._choice(kernel, spec, plan.rows, plan.columns, vectors, options)
        found = schedule(config, plan.rows, plan.columns, bytes_per_row, min(PARTIALS_BYTES, plan.scratch_bytes))
        return (
            Launch(f"pallas_ce_{kernel}", config.tile_rows, config.columns, config.cluster_size, found.windows, source),
        )

    def weight_copy_bytes(self, spec: HeadSpec) -> int:
        """All of the weight where TMA cannot read it; see `operands`."""
        return plans.weight_copy_bytes(spec)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, valid_rows: jax.Array | None = None
    ) -> Partial:
        """One kernel; the tail and the targets by XLA."""
        partial_bytes = min(PARTIALS_BYTES, plan.scratch_bytes)
        # The target's logit is no affair of the kernel's.
        config = self._config("forward", head, batch.hidden.shape[0], len(names - {"target_logit"}))
        partial = forward_kernel.statistics(head, batch.hidden, names, config, partial_bytes, valid_rows)
        if (rest := operands.tail(head)) is not None:
            partial = merge(partial, products.tail_logits_and_partial(head, rest, batch.hidden, names)[1])
        return entries.with_targets(partial, head, batch, names)

    def recompute(
        self,
        head: Head,
        batch: Batch,
        residual: Residual,
        coefficients: Coefficients,
        needs_grad: NeedsGrad,
        plan: Plan,
        block: RowBlock,
    ) -> TileStep:
        """See `recomputation`."""
        hidden = product_kernel.hidden_sum_config(batch.hidden.shape[0], head.spec.hidden_size, sm_count())
        configs = self._gradient_configs(head, batch, coefficients, hidden, plan)
        return recomputation.step(head, batch, residual, coefficients, needs_grad, plan, block, configs)

    def replaced_weight(self, head: Head, plan: Plan, dtype: np.dtype) -> jax.Array:
        """Undefined where kernels fill all of it, else zeros."""
        start = product_kernel.undefined if self.skips_rows(head.spec, plan) else jnp.zeros
        return start(head.weight.shape, dtype)

    def skips_rows(self, spec: HeadSpec, plan: Plan) -> bool:
        """Where every product is a kernel's."""
        return recomputation.in_place(spec, plan.rows, plan.columns)

    def against_in_forward(self, spec: HeadSpec) -> str | None:
        """Rows of exponentials that XLA's products cannot read in 16 bytes; recompute's tiles are cut so that they can.

        On an H200 GPT-2's head takes 1.5 times three bare products so, and 0.7 times in recompute.
        """
        if spec.weight_rows % _ALIGNED_COLUMNS == 0:
            return None
        return (
            f"products over all of {spec.weight_rows} vocabulary entries, no multiple of {_ALIGNED_COLUMNS}, take "
            "twice as long as over tiles"
        )

    def gathers_in_vain(self, spec: HeadSpec, plan: Plan) -> bool:
        """Where blocks are large: XLA's products, which skip no rows, are a few per cent faster than the kernels'."""
        return self.skips_rows(spec, plan) and plan.rows >= product_kernel.LEAST_ROWS

    def accumulators(self, head: Head, needs_grad: NeedsGrad, dtype: np.dtype, *, replaced: bool) -> Accumulators:
        """Undefined where they may be, else zeros."""
        spec = head.spec
        start = product_kernel.undefined if replaced else jnp.zeros
        return Accumulators(
            start(head.weight.shape, dtype) if needs_grad.weight else None,
            jnp.zeros(spec.weight_rows, spec.accumulator) if needs_grad.bias_sum else None,
        )

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, products.Stash]:
        """See `products.make`."""
        rows = batch.hidden.shape[0]
        config = self._config("stash", head, rows, len(names))
        fallback = self._config("forward", head, rows, len(names), rare=True)
        return products.make(head, batch, names, config, fallback, block)

    def stash_products(
        self,
        head: Head,
        batch: Batch,
        residual: Residual,
        coefficients: Coefficients,
        factor: jax.Array,
        stash: products.Stash,
        accumulators: Accumulators,
        needs_grad: NeedsGrad,
        plan: Plan,
        block: RowBlock,
    ) -> tuple[jax.Array | None, Accumulators]:
        """See `products.products`."""
        rows, spec = batch.hidden.shape[0], head.spec
        hidden = product_kernel.hidden_config(rows, spec.hidden_size, spec.vocab_size, sm_count(), splits=plan.splits)
        configs = self._gradient_configs(head, batch, coefficients, hidden, plan, rare=True)
        return products.products(
            head,
            batch.hidden,
            batch.labels,
            residual,
            coefficients,
            factor,
            stash,
            accumulators,
            needs_grad,
            configs,
            block,
        )

    def _gradient_configs(
        self, head: Head, batch: Batch, coefficients: Coefficients, hidden: Config, plan: Plan, *, rare: bool = False
    ) -> GradientConfigs:
        """`rare`: whether dlogits are made only where exponentials do not fit 16 bits."""
        vectors = sum(c is not None for c in entries.without(coefficients))
        return GradientConfigs(
            self._config("dlogits", head, batch.hidden.shape[0], vectors, plan.columns, rare=rare),
            self.config or hidden,
            self.config
            or product_kernel.weight_config(plan.columns, head.spec.hidden_size, head.spec.vocab_axis, sm_count()),
        )

    def _config(
        self, kernel: Kernel, head: Head, rows: int, vectors: int, columns: int | None = None, *, rare: bool = False
    ) -> Config:
        """Tiles for `rows` and the whole vocabulary, or `columns` of it."""
        if head.valid_columns is not None and not self.serves_padding(head.spec):
            raise NotImplementedError(
                f"implementation='mosaic_gpu' works on shards of a padded vocabulary in multiples of 8 entries, not "
                f"{head.spec.weight_rows}: pad the vocabulary further, or use 'xla'"
            )
        given = (head.bias, head.logit_scale, head.logit_weights, head.spec.softcap)
        options = sum(option is not None for option in given)
        return self._choice(kernel, head.spec, rows, columns or head.spec.vocab_size, vectors, options, rare).config

    def _choice(
        self, kernel: Kernel, spec: HeadSpec, rows: int, columns: int, vectors: int, options: int, rare: bool = False
    ) -> tuning.Choice:
        if self.config is not None:
            return tuning.Choice(self.config, "given")
        return tuning.choose(kernel, spec, rows, columns, vectors, options, rare=rare)
