"""The Triton backend: logits by one kernel, gradient products by XLA."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.protocol import Backend, Capabilities, Description, Gradient, HeadSums, Launch, Mode, Plan
from pallas_ce.backends.triton import binding, configs, launch
from pallas_ce.backends.triton.configs import Use
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec, Products, TileStep, WeightSum
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.loops import fori_loop
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

# Rows of a block and columns of a tile are a multiple of this where there are that many, so that tiles are full.
_STEP = 128

# In_forward: a tile's products may take one part of the scratch in so many.
_OF_TILE = 4


# What each pass makes logits for.
_USES: dict[Mode | None, Use] = {None: "forward", "in_forward": "stash", "recompute": "dlogits"}


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
        """The scratch of one row and one column at a time."""
        return _scratch(spec, mode, 1, 1)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """As many rows as fit; all columns, but for the recompute mode."""
        columns = spec.vocab_size
        if mode == "recompute":
            start = min(columns, _RECOMPUTE_COLUMNS)
            rows, columns = shrink(tokens, start, lambda r, c: _scratch(spec, mode, r, c), scratch_bytes)
            columns = columns if columns == spec.vocab_size else _down(columns)
        else:
            if mode == "in_forward":
                columns = min(columns, _down(scratch_bytes // _OF_TILE // _tile_bytes(spec, 1)))
                while _scratch(spec, mode, 1, columns) > scratch_bytes:
                    columns = max(1, columns // 2)
            fixed = _scratch(spec, mode, 0, columns)
            most = (scratch_bytes - fixed) // (_scratch(spec, mode, 1, columns) - fixed)
            rows = min(tokens, max(1, most))
            rows = -(-tokens // -(-tokens // rows))
            if rows < tokens:
                rows = _down(rows)
        needed = _scratch(spec, mode, rows, columns)
        return Plan(rows, columns, needed, spec.vocab_size, skips_rows=mode is None)

    def describe(self, spec: HeadSpec, options: int, mode: Mode | None, plan: Plan) -> Description:
        """The kernel and its tiles, of plain cross entropy."""
        use: Use = "many" if options else _USES[mode]
        config = configs.config_for(spec, binding.capability(), use)
        source = "a table of what compiles, which has not been run on a GPU yet"
        return Description((Launch("head_kernel", config.rows, config.columns, 1, 1, source),))

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
            weight = launch.apart(tile.take(head.weight, axis).astype(spec.dtype))
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
        """dlogits of the stored logits tile by tile, and their products, by XLA."""
        spec, (c, lse, argmax, needs, factor), adds = head.spec, gradient, block.number != 0
        tiles = Tiles(spec.vocab_size, plan.columns, head.valid_columns)
        bound = head.bound(batch.inverse_temperature)

        def body(i: jax.Array, carry: Products) -> Products:
            tile, (hidden, weight, bias) = tiles.tile(i), carry
            u = None if c.logit_weights is None else head.tile_logit_weights(tile.start, tile.size)
            logits = tile.take(stash, 1)
            dz = coef.dlogits(c, logits, lse, tile.columns, tile.valid, batch.labels, argmax, u, bound)
            for_hidden, for_weight, for_bias = head.tile_products(batch.hidden, dz, tile, needs)
            if hidden is not None and for_hidden is not None:
                hidden = hidden + for_hidden
            if weight is not None and for_weight is not None:
                weight = tile.add_or_replace(weight, factor * for_weight, adds, spec.vocab_axis)
            if bias is not None and for_bias is not None:
                bias = tile.add_or_replace(bias, factor * for_bias, adds)
            return hidden, weight, bias

        zeros = jnp.zeros(batch.hidden.shape, spec.accumulator) if needs.hidden_product else None
        for_hidden, *of_head = fori_loop(0, tiles.count, body, (zeros, *sums))
        return for_hidden, HeadSums(*of_head)


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


def _down(count: int) -> int:
    """At most `count`, at least 1, and a multiple of the step where there are that many."""
    return max(1, count // _STEP * _STEP or count)


def _tile_bytes(spec: HeadSpec, columns: int) -> int:
    """A tile's part of the weight, its gradient, and that added up."""
    return (spec.dtype.itemsize + 2 * spec.accumulator.itemsize) * columns * spec.hidden_size


def _scratch(spec: HeadSpec, mode: Mode | None, rows: int, columns: int) -> int:
    """Bytes that a block takes beside inputs, outputs and accumulators."""
    narrow, wide, size, v = spec.dtype.itemsize, spec.accumulator.itemsize, spec.hidden_size, spec.vocab_size
    total = narrow * rows * size
    if mode is not None:
        total += narrow * rows * columns + _tile_bytes(spec, columns) + wide * rows * size
    if mode == "in_forward":
        total += wide * rows * v
    if mode != "recompute":
        blocks = -(-v // configs.config_for(spec, binding.capability(), "many").columns)
        total += _PARTIAL_FIELDS * wide * blocks * rows
    return total
