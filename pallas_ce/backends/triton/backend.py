"""The Triton backend: logits by one kernel, gradient products by XLA."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.backends.protocol import Backend, Capabilities, Gradient, HeadSums, Mode, Plan
from pallas_ce.backends.triton import binding, configs, launch
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec, Products, TileStep, WeightSum
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tile, Tiles, shrink

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

# The kernel looks for each target in each tile.
_MOST_TARGETS = 8

# Column numbers are 32 bits wide, and so are those behind the last.
_LARGEST_VOCABULARY = 2**30

# Statistics that a tile may leave of each row, and how large tiles of the recompute mode are at most.
_PARTIAL_FIELDS = 7
_RECOMPUTE_COLUMNS = 16384

# Rows of a block are a multiple of this where there are that many, so that tiles are full.
_ROW_STEP = 128


class TritonBackend(Backend):
    """See `protocol.Backend`."""

    name = "triton"
    capabilities = Capabilities(checked_regions=False, cuda_only=True)

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Float64, more targets than the kernel looks for, and devices without an entry in the table."""
        if spec.dtype not in _DTYPES:
            return f"its kernel multiplies bfloat16, float16 and float32 operands, not {spec.dtype.name}; use 'xla'"
        if rows.targets is not None and rows.targets > _MOST_TARGETS:
            return f"its kernel reads at most {_MOST_TARGETS} labels for each row, not K={rows.targets}; use 'xla'"
        if spec.vocab_size > _LARGEST_VOCABULARY:
            return f"it numbers at most {_LARGEST_VOCABULARY} vocabulary entries, not {spec.vocab_size}; use 'xla'"
        if importlib.util.find_spec("triton") is None:
            return "it needs the package triton: pip install 'triton>=3.6,<3.8'"
        return None if padded_share else _device_refusal()  # asked for the call, where its arrays are known

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """The scratch of one row, and of one column where tiles may be that narrow."""
        return _scratch(spec, mode, 1, 1 if mode == "recompute" else spec.vocab_size)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """As many rows as fit; all columns, but for the recompute mode."""
        columns = spec.vocab_size
        if mode == "recompute":
            start = min(columns, _RECOMPUTE_COLUMNS)
            rows, columns = shrink(tokens, start, lambda r, c: _scratch(spec, mode, r, c), scratch_bytes)
        else:
            rows = min(tokens, max(1, scratch_bytes // _scratch(spec, mode, 1, columns)))
            rows = -(-tokens // -(-tokens // rows))
            if rows < tokens and rows > _ROW_STEP:
                rows = rows // _ROW_STEP * _ROW_STEP
        needed = _scratch(spec, mode, rows, columns)
        return Plan(rows, columns, needed, spec.vocab_size, skips_rows=mode is None)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """One launch."""
        return launch.statistics(head, batch, names, filled=filled)[0]

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """dlogits of the tile's columns, as those of a vocabulary of their own, and their products."""
        spec, axis, needs = head.spec, head.spec.vocab_axis, gradient.needs

        def step(index: jax.Array, hidden_sum: jax.Array | None, weight_sum: WeightSum | None) -> Products:
            tile = Tiles(spec.vocab_size, plan.columns, head.valid_columns).tile(index)
            weight = launch.apart(tile.take(head.weight.astype(spec.dtype), axis))
            first = None if tile.own is None else jnp.int32(index) * plan.columns - tile.start
            shifted = batch if batch.labels is None else batch._replace(labels=batch.labels - tile.start)
            argmax = None if gradient.argmax is None else gradient.argmax - tile.start
            dz = launch.dlogits(_slice(head, tile, weight), shifted, gradient._replace(argmax=argmax), first)
            for_weight = for_bias = None
            if hidden_sum is not None:
                hidden_sum = block.add(hidden_sum, head.matmul(dz, weight, (1, axis)))
            if weight_sum is not None:
                a, b = (dz, batch.hidden) if axis == 0 else (batch.hidden, dz)
                for_weight = weight_sum.add(head.matmul(a, b, (0, 0)), axis)
            if needs.bias_sum:
                for_bias = dz.sum(axis=0, dtype=spec.accumulator)
            return hidden_sum, for_weight, for_bias

        return step

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, jax.Array]:
        """Statistics, and the logits `[n, V]` in float32: what they are read for is the same formula as elsewhere."""
        partial, logits = launch.statistics(head, batch, names, stored=True)
        assert logits is not None
        return partial, logits

    def stash_products(
        self,
        head: Head,
        batch: Batch,
        gradient: Gradient,
        stash: jax.Array,
        sums: HeadSums,
        plan: Plan,
        block: RowBlock,
    ) -> tuple[jax.Array | None, HeadSums]:
        """dlogits by one elementwise pass, and their products."""
        spec, (c, lse, argmax, needs, factor) = head.spec, gradient
        tile = Tiles(spec.vocab_size, spec.vocab_size, head.valid_columns).tile(0)
        u = None if c.logit_weights is None else head.tile_logit_weights(0, spec.vocab_size)
        bound = head.bound(batch.inverse_temperature)
        dz = coef.dlogits(c, stash, lse, tile.columns, tile.valid, batch.labels, argmax, u, bound)
        for_hidden, for_weight, for_bias = head.tile_products(batch.hidden, dz, tile, needs)

        def total(before: jax.Array | None, share: jax.Array | None, axis: int) -> jax.Array | None:
            if before is None or share is None:
                return None
            share = factor * share
            if not isinstance(block.number, int) or block.number:
                own = lax.slice_in_dim(before, 0, spec.vocab_size, axis=axis)
                share = share + jnp.where(block.number == 0, 0, own)
            return lax.dynamic_update_slice_in_dim(before, share.astype(before.dtype), 0, axis)

        return for_hidden, HeadSums(total(sums.weight, for_weight, spec.vocab_axis), total(sums.bias, for_bias, 0))


def _device_refusal() -> str | None:
    """Why the device lowered for cannot run the kernel; None where it can."""
    capability = binding.capability()
    if capability is None:
        return "its kernel is compiled for a CUDA device, and this process knows of none; use 'xla'"
    if configs.served(capability):
        return None
    served = ", ".join(f"{known // 10}.{known % 10}" for known in configs.NARROW)
    return (
        f"its table has tiles for compute capability {served}, and this device is of "
        f"{capability // 10}.{capability % 10}; use 'xla'"
    )


def _slice(head: Head, tile: Tile, weight: jax.Array) -> Head:
    """The head of the tile's columns."""
    spec, valid = head.spec, head.valid_columns
    of_part = dataclasses.replace(
        spec,
        weight_rows=tile.size,
        vocab_size=tile.size,
        whole_vocab_size=spec.whole_vocab_size or spec.vocab_size,
    )
    return dataclasses.replace(
        head,
        weight=weight,
        bias=None if head.bias is None else tile.take(head.bias),
        logit_weights=None if head.logit_weights is None else tile.take(head.logit_weights),
        spec=of_part,
        valid_columns=None if valid is None else jnp.clip(valid - tile.start, 0, tile.size),
    )


def _scratch(spec: HeadSpec, mode: Mode | None, rows: int, columns: int) -> int:
    """Bytes that a block takes beside inputs, outputs and accumulators."""
    narrow, wide, size = spec.dtype.itemsize, spec.accumulator.itemsize, spec.hidden_size
    gathered = narrow * rows * size
    if mode == "recompute":
        return gathered + narrow * rows * columns + (narrow + 2 * wide) * columns * size + wide * rows * size
    tiles = -(-columns // configs.config_for(spec, binding.capability(), "many").columns)
    partial = _PARTIAL_FIELDS * wide * tiles * rows
    if mode is None:
        return gathered + partial
    return gathered + partial + (wide + narrow) * rows * columns + wide * rows * size
