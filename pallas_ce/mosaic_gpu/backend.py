"""The Hopper backend: which kernel serves which part of a call, with which tiles and blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import Accumulators, Launch, Mode, Plan, Residual
from pallas_ce.blocks import RowBlock, Tiles
from pallas_ce.coefficients import Coefficients
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec, Products, Wanted
from pallas_ce.mosaic_gpu import dlogits_kernel, forward_kernel, operands, product_kernel, products, tuning
from pallas_ce.mosaic_gpu.config import PARTIALS_BYTES, Config, Kernel, device_refusal, schedule
from pallas_ce.statistics import Partial, merge

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

# Column numbers pass through float32.
_LARGEST_VOCABULARY = 2**24

# The recompute mode's block of dlogits may take this much; larger ones save passes over the float32 sums.
_RECOMPUTE_BYTES = 160 * 2**20

# What each pass launches, and the vectors by row of the plain cross entropy: two statistics, or two coefficients.
_KERNELS: dict[Mode | None, Kernel] = {None: "forward", "in_forward": "stash", "recompute": "dlogits"}
_PLAIN_VECTORS = 2

# Statistics that a window may leave of each row.
_PARTIAL_FIELDS = 7

# Blocks of rows and of columns are multiples of these where the problem is large enough, so that tiles are full.
_ROW_STEP = 128
_COLUMN_STEP = 256


@dataclasses.dataclass(frozen=True)
class MosaicGpuBackend:
    """See `pallas_ce.backends.Backend`.

    Attributes:
        config: tiles of every kernel, for tests; None to have `tuning` choose.
    """

    name = "mosaic_gpu"
    in_checked_regions = False  # Pallas has no rule for kernels that write in place there
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

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """Bytes for one row at a time, or for one row of a small tile."""
        columns = spec.vocab_size if mode == "in_forward" else min(spec.vocab_size, operands.LENGTH_MULTIPLE)
        return _scratch(spec, mode, 1, columns, 2)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int) -> Plan:
        """As large as the budget allows; blocks of rows of nearly equal size, in full tiles."""
        if mode == "recompute":
            return _plan_recompute(spec, tokens, scratch_bytes)
        blocks = 1
        while True:
            rows = _even_rows(tokens, blocks)
            bytes_needed = _scratch(spec, mode, rows, spec.vocab_size, blocks)
            if bytes_needed <= scratch_bytes or rows == 1:
                if mode is None:
                    bytes_needed += self._partial_bytes(spec, rows)
                return Plan(rows, spec.vocab_size, min(bytes_needed, scratch_bytes))
            blocks = max(blocks + 1, -(-tokens // max(1, rows - 1)) if rows <= 2 * _ROW_STEP else 0)

    def launches(self, spec: HeadSpec, options: int, mode: Mode | None, plan: Plan) -> tuple[Launch, ...]:
        """One; those that only run where exponentials do not fit 16 bits are left out."""
        kernel = _KERNELS[mode]
        config, source = self._choice(kernel, spec, plan.rows, plan.columns, _PLAIN_VECTORS, options)
        bytes_per_row = 0 if kernel == "dlogits" else 4 * _PLAIN_VECTORS
        found = schedule(config, plan.rows, plan.columns, bytes_per_row, min(PARTIALS_BYTES, plan.scratch_bytes))
        return (
            Launch(f"pallas_ce_{kernel}", config.tile_rows, config.columns, config.cluster_size, found.windows, source),
        )

    def weight_copy_bytes(self, spec: HeadSpec) -> int:
        """All of the weight where TMA cannot read it; see `operands`."""
        return _copied(spec)

    def statistics(self, head: Head, batch: Batch, names: frozenset[str], plan: Plan) -> Partial:
        """One kernel; the tail by XLA."""
        partial_bytes = min(PARTIALS_BYTES, plan.scratch_bytes)
        config = self._config("forward", head, batch.hidden.shape[0], len(names))
        partial = forward_kernel.statistics(head, batch.hidden, batch.labels, names, config, partial_bytes)
        if (rest := operands.tail(head)) is not None:
            last = products.tail_logits_and_partial(head, rest, batch.hidden, batch.labels, names)[1]
            partial = merge(partial, last)
        return partial

    def dlogits_products(
        self,
        head: Head,
        batch: Batch,
        residual: Residual,
        coefficients: Coefficients,
        tile_index: jax.Array,
        wanted: Wanted,
        plan: Plan,
        block: RowBlock,
        hidden_sum: jax.Array | None,
    ) -> Products:
        """dlogits of the tile by a kernel; its products, too, where there is one block of rows, else by XLA."""
        spec, columns = head.spec, plan.columns
        by_kernels = block.live_rows is not None and product_kernel.serves_tile(spec, plan.rows, columns)
        live_rows = block.live_rows if by_kernels else None
        tile = Tiles(spec.vocab_size, columns).tile(tile_index)
        aligned = operands.round_up(columns, operands.LENGTH_MULTIPLE)
        weight = tile.take(head.weight, spec.vocab_axis)
        shape = (aligned, spec.hidden_size) if spec.vocab_axis == 0 else (spec.hidden_size, aligned)
        slice_of_head = dataclasses.replace(
            head,
            weight=operands.pad(weight, shape),
            bias=None if head.bias is None else operands.pad(tile.take(head.bias), (aligned,)),
            logit_weights=head.tile_logit_weights(tile.start, columns)
            if coefficients.logit_weights is not None
            else None,
            spec=dataclasses.replace(spec, weight_rows=aligned, vocab_size=columns),
        )
        gradient = dlogits_kernel.dlogits(
            slice_of_head,
            batch.hidden,
            _from(batch.labels, tile.start, columns),
            Residual(residual.lse, _from(residual.argmax, tile.start, columns)),
            coefficients,
            self._config("dlogits", head, batch.hidden.shape[0], sum(c is not None for c in coefficients), columns),
            first=None if tile.live is None else jnp.int32(tile_index) * columns - tile.start,
            live_rows=live_rows,
        )
        assert gradient is not None
        gradient = gradient[: batch.hidden.shape[0], :columns]
        for_weight = for_bias = None
        if hidden_sum is not None and by_kernels:
            config = self.config or product_kernel.HIDDEN_SUM
            hidden_sum = product_kernel.add_for_hidden(
                gradient, weight.astype(spec.dtype), spec.vocab_axis, config, hidden_sum, live_rows
            )
        elif hidden_sum is not None:
            hidden_sum = block.add(hidden_sum, head.matmul(gradient, weight, (1, spec.vocab_axis)))
        if wanted.weight and by_kernels:
            config = self.config or product_kernel.WEIGHT
            rows = batch.hidden.astype(spec.dtype)
            for_weight = product_kernel.for_weight(gradient, rows, spec.vocab_axis, config, live_rows=live_rows)
        elif wanted.weight:
            a, b = (gradient, batch.hidden) if spec.vocab_axis == 0 else (batch.hidden, gradient)
            for_weight = head.matmul(a, b, (0, 0))
        if wanted.bias_sum:
            counted = gradient if live_rows is None else block.select(gradient, 0)
            for_bias = counted.sum(axis=0, dtype=spec.accumulator)
        return hidden_sum, for_weight, for_bias

    def skips_rows(self, spec: HeadSpec, plan: Plan) -> bool:
        """Where every product is a kernel's."""
        return product_kernel.serves(spec, plan.rows)

    def gathers_in_vain(self, spec: HeadSpec, plan: Plan) -> bool:
        """Where blocks are large: without skipped rows, XLA's products are a few per cent faster than the kernels'."""
        return self.skips_rows(spec, plan) and plan.rows >= product_kernel.LEAST_ROWS

    def accumulators(self, head: Head, wanted: Wanted, dtype: np.dtype, *, replaced: bool) -> Accumulators:
        """Undefined where they may be, else zeros."""
        spec = head.spec
        start = product_kernel.undefined if replaced else jnp.zeros
        return Accumulators(
            start(head.weight.shape, dtype) if wanted.weight else None,
            jnp.zeros(spec.weight_rows, spec.accumulator) if wanted.bias_sum else None,
        )

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, products.Stash]:
        """See `products.make`."""
        config, fallback = (self._config(k, head, batch.hidden.shape[0], len(names)) for k in ("stash", "forward"))
        return products.make(head, batch.hidden, batch.labels, names, config, fallback, block)

    def stash_products(
        self,
        head: Head,
        batch: Batch,
        residual: Residual,
        coefficients: Coefficients,
        factor: jax.Array,
        stash: products.Stash,
        accumulators: Accumulators,
        wanted: Wanted,
        plan: Plan,
        block: RowBlock,
    ) -> tuple[jax.Array | None, Accumulators]:
        """See `products.products`."""
        configs = products.Configs(
            self._config("dlogits", head, batch.hidden.shape[0], sum(c is not None for c in coefficients)),
            self.config or product_kernel.HIDDEN,
            self.config or product_kernel.WEIGHT,
        )
        return products.products(
            head,
            batch.hidden,
            batch.labels,
            residual,
            coefficients,
            factor,
            stash,
            accumulators,
            wanted,
            configs,
            block,
        )

    def _partial_bytes(self, spec: HeadSpec, rows: int) -> int:
        """What the forward leaves when every statistic is asked for and memory does not limit its windows."""
        config = self._choice("forward", spec, rows, spec.vocab_size, _PLAIN_VECTORS, 0).config
        found = schedule(config, rows, spec.vocab_size, 4)
        return min(PARTIALS_BYTES, _PARTIAL_FIELDS * 4 * found.windows * found.row_blocks * config.block_rows)

    def _config(self, kernel: Kernel, head: Head, rows: int, vectors: int, columns: int | None = None) -> Config:
        """Tiles for `rows` and the whole vocabulary, or `columns` of it."""
        if head.live_columns is not None:
            raise NotImplementedError(
                "implementation='mosaic_gpu' does not serve shards of a padded vocabulary: use 'xla', or a vocabulary "
                "that divides evenly over the devices"
            )
        given = (head.bias, head.logit_scale, head.logit_weights, head.spec.softcap)
        options = sum(option is not None for option in given)
        return self._choice(kernel, head.spec, rows, columns or head.spec.vocab_size, vectors, options).config

    def _choice(
        self, kernel: Kernel, spec: HeadSpec, rows: int, columns: int, vectors: int, options: int
    ) -> tuning.Choice:
        if self.config is not None:
            return tuning.Choice(self.config, "given")
        return tuning.choose(kernel, spec, rows, columns, vectors, options)


def _from(columns: jax.Array | None, start: jax.Array, count: int) -> jax.Array | None:
    """Vocabulary entries as columns of a slice; -1 for those outside."""
    if columns is None:
        return None
    inside = (columns >= start) & (columns < start + count)
    return jnp.where(inside, columns - start, -1)


def _even_rows(tokens: int, blocks: int) -> int:
    """Rows of `blocks` nearly equal blocks, in full tiles where there are that many rows."""
    rows = -(-tokens // blocks)
    return min(tokens, operands.round_up(rows, _ROW_STEP)) if rows > _ROW_STEP else rows


def _plan_recompute(spec: HeadSpec, tokens: int, scratch_bytes: int) -> Plan:
    """The blocks with the fewest passes over float32 sums within the budget.

    Every tile of the vocabulary adds to the sum for hidden `[N, H]`, and every block of rows but the first to the
    tile's sum for the weight `[columns, H]`; reading and writing those is what the products themselves do not need.
    """
    budget = min(scratch_bytes, _RECOMPUTE_BYTES)
    choices = []
    for blocks in range(1, 1 + min(tokens, 4096)):
        rows = _even_rows(tokens, blocks)
        columns = _most_columns(spec, rows, blocks, budget)
        if columns:
            passes = tokens * -(-spec.vocab_size // columns) + spec.vocab_size * (blocks - 1)
            choices.append((passes, blocks, rows, columns))
        if blocks > 1 and (rows <= 128 or len(choices) > 8):
            break
    if choices:
        _, blocks, rows, columns = min(choices)
    else:
        columns = min(spec.vocab_size, operands.LENGTH_MULTIPLE)
        rows = next(
            r
            for r in (128, 64, 32, 16, 8, 4, 2, 1)
            if r == 1 or _scratch(spec, "recompute", r, columns, 2) <= scratch_bytes
        )
        rows, blocks = min(rows, tokens), 2
    return Plan(rows, columns, _scratch(spec, "recompute", rows, columns, blocks))


def _most_columns(spec: HeadSpec, rows: int, blocks: int, budget: int) -> int:
    """The widest tile within the budget, 0 if none is; in full tiles, and evenly where several are needed."""
    if _scratch(spec, "recompute", rows, spec.vocab_size, blocks) <= budget:
        return spec.vocab_size
    base, more = (_scratch(spec, "recompute", rows, c, blocks) for c in (0, _COLUMN_STEP))
    most = (budget - base) // (more - base) * _COLUMN_STEP
    if most <= 0:
        return 0
    tiles = -(-spec.vocab_size // most)
    return min(most, operands.round_up(-(-spec.vocab_size // tiles), _COLUMN_STEP), spec.vocab_size)


def _copied(spec: HeadSpec) -> int:
    return spec.dtype.itemsize * spec.weight_rows * spec.hidden_size if operands.weight_copied(spec) else 0


def _scratch(spec: HeadSpec, mode: Mode | None, rows: int, columns: int, blocks: int) -> int:
    """Bytes that a call takes beside inputs, outputs and accumulators, with so many blocks of rows.

    The forward: partial statistics, at least those of one window. In-forward: the stash, a block of hidden states as
    scaled operand and as product. Recompute: dlogits of a tile, its slice of the weight, and its products.
    """
    narrow, wide = spec.dtype.itemsize, spec.accumulator.itemsize
    stored_rows = operands.round_up(rows, operands.ROW_MULTIPLE)
    stored_columns = operands.round_up(columns, operands.LENGTH_MULTIPLE)
    copied = _copied(spec)
    partial = _PARTIAL_FIELDS * wide * 2 * stored_rows
    if mode is None:
        return copied + partial + (narrow * rows * spec.hidden_size if blocks > 1 else 0)
    # Rows of the stash are padded where V is not a multiple; the products then read a copy without the padding.
    stored = narrow * stored_rows * (stored_columns + (columns if columns % operands.LENGTH_MULTIPLE else 0))
    if mode == "in_forward":
        windows = 1
        if product_kernel.serves(spec, rows):
            windows = product_kernel.hidden_schedule(product_kernel.HIDDEN, rows, spec.hidden_size, columns).windows
        return copied + partial + stored + (2 * narrow + windows * wide) * rows * spec.hidden_size
    sums = (narrow + wide * (2 if blocks > 1 else 1)) * columns * spec.hidden_size
    gathered = (narrow + wide) * rows * spec.hidden_size if blocks > 1 else 0
    return stored + sums + gathered
