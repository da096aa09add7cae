"""The Hopper backend: which kernel serves which part of a call, with which tiles and blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import entries
from pallas_ce.backends.exponentials import Stash, always_recomputed
from pallas_ce.backends.mosaic_gpu import in_forward, recomputation
from pallas_ce.backends.mosaic_gpu.kernels import (
    forward_kernel,
    materialized_kernel,
    operands,
    partials,
    product_kernel,
)
from pallas_ce.backends.mosaic_gpu.schedule import plans
from pallas_ce.backends.mosaic_gpu.schedule.config import (
    PARTIALS_BYTES,
    Config,
    GradientConfigs,
    Kernel,
    device_refusal,
    schedule,
)
from pallas_ce.backends.mosaic_gpu.top_k import StoredBlocks
from pallas_ce.backends.mosaic_gpu.tuning import tuning
from pallas_ce.backends.protocol import Backend, Capabilities, Description, Gradient, Launch, Mode, Plan
from pallas_ce.gradient_products import Products, TileStep
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.row import Partial, merge
from pallas_ce.streaming.rows import RowBlock

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

# Column numbers pass through float32.
_LARGEST_VOCABULARY = 2**24

# Releases from this one on have kernels assembled as code that may be linked with other code. There warpgroups cannot
# hand registers to each other, and accumulators of these tiles do not fit the registers that each begins with.
_LINKED_SINCE = (0, 12)

# What each pass makes logits with, and the vectors by row and bytes that a window leaves, of plain cross entropy.
_KERNELS: dict[Mode | None, tuple[Kernel, int, int]] = {
    None: ("forward", 1, 8),
    "in_forward": ("stash", 2, 8),
    "recompute": ("dlogits", 1, 0),
}


@dataclasses.dataclass(frozen=True)
class MosaicGpuBackend(Backend):
    """See `protocol.Backend`.

    Attributes:
        config: tiles of every kernel, for tests; None to have `tuning` choose.
    """

    name = "mosaic_gpu"
    # Pallas has no rule for kernels that write in place inside checked regions.
    capabilities = Capabilities(checked_regions=False, large_blocks=True, cuda_only=True, casts_whole=True)
    materialized = materialized_kernel
    config: Config | None = None

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Temperatures by row, operands and precisions that the kernels do not know, and other devices."""
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
        if padded_share and operands.covered(spec) != spec.vocab_size:
            return f"its kernels need shards of a padded vocabulary in multiples of 8 entries, not {spec.weight_rows}"
        return None if padded_share else device_refusal()  # asked for the call, where its arrays are known

    def slower(self, spec: HeadSpec) -> str | None:
        """Every head, with a jax that has kernels assembled so that they spill registers."""
        if jax.__version_info__ < _LINKED_SINCE:
            return None
        return (
            f"jax {jax.__version__} has its kernels assembled so that registers are spilled; "
            "pip install 'jax<0.12' has them at full speed"
        )

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """Bytes for one row at a time, or for one row of a small tile."""
        return plans.minimum(operands.padded_spec(spec), mode)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """As large as the budget allows; blocks of rows of nearly equal size, in full tiles."""
        spec = operands.padded_spec(spec)
        if mode == "recompute":
            return plans.recompute(spec, tokens, scratch_bytes)
        return plans.by_rows(spec, tokens, mode, scratch_bytes, spare_bytes)

    def describe(self, spec: HeadSpec, options: int, mode: Mode | None, plan: Plan) -> Description:
        """The kernel that makes logits, of plain cross entropy."""
        spec = operands.padded_spec(spec)
        kernel, vectors, bytes_per_row = _KERNELS[mode]
        config, source = self._choice(kernel, spec, plan.rows, plan.columns, vectors, options)
        found = schedule(config, plan.rows, plan.columns, bytes_per_row, min(PARTIALS_BYTES, plan.scratch_bytes))
        launch = Launch(
            f"pallas_ce_{kernel}", config.tile_rows, config.columns, config.cluster_size, found.windows, source
        )
        return Description((launch,), operands.weight_copy_bytes(spec))

    def top_k(self, spec: HeadSpec, k: int, scratch_bytes: int | None) -> StoredBlocks:
        """Of stored logits, a block of rows at a time."""
        return StoredBlocks(spec, k, scratch_bytes)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """One kernel; the tail and the targets by XLA."""
        head = operands.padded_head(head)
        partial_bytes = min(PARTIALS_BYTES, plan.scratch_bytes)
        config = self._config("forward", head, batch.hidden.shape[0], partials.vectors(names))
        partial = forward_kernel.statistics(head, batch.hidden, names, config, partial_bytes, filled)
        if (rest := operands.tail(head, batch.hidden)) is not None:
            partial = merge(partial, rest.partial(names))
        return entries.with_targets(partial, head, batch, names)

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """See `recomputation`."""
        head = operands.padded_head(head)
        hidden = product_kernel.hidden_sum_config(batch.hidden.shape[0], head.spec.hidden_size)
        configs = self._gradient_configs(head, batch, gradient, hidden, plan)
        return recomputation.step(head, batch, gradient, plan, block, configs)

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, Stash]:
        """See `exponentials`."""
        head = operands.padded_head(head)
        rows = batch.hidden.shape[0]
        config = self._config("stash", head, rows, 1 + partials.vectors(names))
        skipped = in_forward.skipped_from(head.spec, block)
        return in_forward.Kernels(head, batch, skipped, config).make(names)

    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: Stash, sums: Products, plan: Plan, block: RowBlock
    ) -> Products:
        """See `exponentials`."""
        head = operands.padded_head(head)
        rows, spec = batch.hidden.shape[0], head.spec
        hidden = product_kernel.hidden_config(rows, spec.hidden_size, spec.vocab_size, splits=plan.splits)
        configs = self._gradient_configs(head, batch, gradient, hidden, plan)
        config = configs.dlogits
        if not always_recomputed(spec, entries.without(gradient.coefficients)):
            config = self._config("stash", head, rows, 1 + partials.vectors(stash.names))
        skipped = in_forward.skipped_from(spec, block)
        return in_forward.Products(head, batch, skipped, config, configs.hidden, configs.weight).products(
            gradient, stash, sums, gradient.adds or block.number != 0
        )

    def _gradient_configs(
        self, head: Head, batch: Batch, gradient: Gradient, hidden: Config, plan: Plan
    ) -> GradientConfigs:
        vectors = sum(c is not None for c in entries.without(gradient.coefficients))
        return GradientConfigs(
            self._config("dlogits", head, batch.hidden.shape[0], vectors, plan.columns),
            self.config or hidden,
            self.config or product_kernel.weight_config(plan.columns, head.spec.hidden_size, head.spec.vocab_axis),
        )

    def _config(self, kernel: Kernel, head: Head, rows: int, vectors: int, columns: int | None = None) -> Config:
        """Tiles for `rows` and the whole vocabulary, or `columns` of it."""
        if head.valid_columns is not None and operands.covered(head.spec) != head.spec.vocab_size:
            raise NotImplementedError(
                f"implementation='mosaic_gpu' works on shards of a padded vocabulary in multiples of 8 entries, not "
                f"{head.spec.weight_rows}: pad the vocabulary further, or use 'xla'"
            )
        given = (head.bias, head.logit_scale, head.logit_weights, head.spec.softcap)
        options = sum(option is not None for option in given)
        return self._choice(kernel, head.spec, rows, columns or head.spec.vocab_size, vectors, options).config

    def _choice(
        self, kernel: Kernel, spec: HeadSpec, rows: int, columns: int, vectors: int, options: int
    ) -> tuning.Choice:
        if self.config is not None:
            return tuning.Choice(self.config, "given")
        return tuning.tiles_for(kernel, spec, rows, columns, vectors, options)
