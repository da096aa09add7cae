"""The Triton backend: logits by one kernel, gradient products by XLA or another; see `protocol.Backend`."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import device, entries
from pallas_ce.backends.kernel_backend import KernelBackend
from pallas_ce.backends.protocol import Gradient, Launch, Mode, PairDlogits, Pairs, Plan
from pallas_ce.backends.triton import binding, configs, launch
from pallas_ce.backends.triton.block import StudentBlock, TritonBlock
from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.logits import Distances
from pallas_ce.statistics.row import Partial
from pallas_ce.statistics.table import FIELDS
from pallas_ce.streaming.budget import halved, quickest, sizes
from pallas_ce.streaming.gradient_products import TileStep
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

# Where pointers load, a low-rank term is multiplied before the loop, without loads in advance: it is to be short.
_LARGEST_RANK = 256

# Column numbers are 32 bits wide, and so are those behind the last.
_LARGEST_VOCABULARY = 2**30

# Statistics that a tile may leave of each row.
_PARTIAL_FIELDS = len(FIELDS) - 2  # no target's logit, and no sum of u

# The most columns of a tile in the recompute mode, and the fewest if all rows are to be one block; and the bytes of its
# dlogits, where that leaves `_LEAST_COLUMNS`. Larger ones would save a few per cent.
_RECOMPUTE_COLUMNS = 16384
_LEAST_COLUMNS = 2048
_RECOMPUTE_BYTES = 160 * 2**20

# The cost of a part beside its tiles, in rounds of tiles.
_ROUNDS_OF_A_PART = 2

# The bytes of a block in the plain forward, if they leave `_ROWS_OF_FORWARD`; larger ones would not be faster.
_FORWARD_BYTES, _ROWS_OF_FORWARD = 2**25, 2048

# In_forward: a stash that takes no memory of its own is preferred to one of more rows, if it has this share of them.
_SPARED = 0.7

# If V is no multiple of this, products of stored 16-bit rows take up to 2.5 times as long: of GPT-2's head in_forward
# took 7.8 ms on an H200, and recompute, whose parts are aligned, 4.2 (`gpu_head_heads.json`).
_ALIGNED = 8

# Rows of a block and columns of a tile are a multiple of this where there are that many, so that tiles are full.
_STEP = 256


# What each pass makes logits for.
_USES: dict[Mode | None, configs.Use] = {None: "forward", "in_forward": "stash", "recompute": "dlogits"}


Heads = tuple[HeadSpec, HeadSpec]


class TritonPairs(Pairs):
    """See `protocol.Pairs`. A tile's largest logits and the distances from them are stored; XLA reads both heads'."""

    def minimum_scratch(self, heads: Heads) -> int:
        """A row with all columns, or in the backward with the fewest."""
        columns = heads[0].vocab_size
        return max(
            _scratch_of_pair(heads, None, 1, columns), _scratch_of_pair(heads, "recompute", 1, min(_STEP, columns))
        )

    def plan(self, heads: Heads, tokens: int, mode: Mode | None, scratch_bytes: int) -> Plan:
        """The fewest blocks of rows, with all columns; in the backward all rows if that leaves columns enough."""
        columns, scratch = heads[0].vocab_size, functools.partial(_scratch_of_pair, heads, mode)
        if mode is not None:
            return _recompute_plan(heads[0], tokens, scratch_bytes, scratch, min(_STEP, columns))
        choices = ((rows, columns) for rows in (*sizes(tokens, _STEP), *sizes(tokens, 1, most=_STEP)))
        best = quickest(choices, scratch, scratch_bytes, lambda rows, _: -rows)
        return Plan(*best, scratch(*best), columns, skips_rows=True)

    def logits(
        self, heads: Sequence[Head], batches: Sequence[Batch], part: Columns | None, filled: jax.Array | None
    ) -> list[Distances]:
        """A launch for each head."""
        return launch.logits([head.on_gpu() for head in heads], batches, part, filled)

    def recompute(
        self, head: Head, batch: Batch, dlogits: PairDlogits, gradient: Gradient, plan: Plan, block: RowBlock
    ) -> TileStep:
        """The products as after one head's dlogits."""
        batch = batch._replace(hidden=batch.hidden.astype(head.spec.dtype))
        return StudentBlock(head.on_gpu(), batch, block.filled, dlogits).step(gradient, [], plan, block)


class TritonBackend(KernelBackend):
    """See `protocol.Backend`."""

    name = "triton"
    pairs = TritonPairs()

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Float64, precisions that the kernel has not, and devices without an entry in the table."""
        if spec.rank > _LARGEST_RANK:
            return f"its kernel adds a LowRank's term of rank {_LARGEST_RANK} at most, not {spec.rank}; use 'xla'"
        if spec.dtype not in _DTYPES:
            return f"its kernel multiplies bfloat16, float16 and float32 operands, not {spec.dtype.name}; use 'xla'"
        if configs.precision(spec) is None:
            return f"its kernel does not multiply {spec.dtype.name} operands as precision={spec.precision}; use 'xla'"
        if spec.vocab_size > _LARGEST_VOCABULARY:
            return f"it numbers at most {_LARGEST_VOCABULARY} vocabulary entries, not {spec.vocab_size}; use 'xla'"
        return None if padded_share else device.refusal(self.name)  # asked for the call, where its arrays are known

    def slower(self, spec: HeadSpec, targets: int = 0, tokens: int = 1) -> str | None:
        """Full float32, which the kernel multiplies without tensor cores, as cuBLAS does in larger tiles."""
        exact = "XLA's products are faster in full float32" if configs.precision(spec) == "ieee" else None
        return exact or super().slower(spec, targets, tokens)

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """The scratch of one row and one column at a time."""
        return _scratch(spec, mode, 1, 1)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """The fewest blocks of rows, about equal; all columns, except in the recompute mode."""
        columns = spec.vocab_size
        if mode == "recompute":
            return _recompute_plan(spec, tokens, scratch_bytes, functools.partial(_scratch, spec, mode))
        fixed = _scratch(spec, mode, 0, columns)
        of_row, scratch_bytes = _scratch(spec, mode, 1, columns) - fixed, scratch_bytes - fixed
        most = min(tokens, max(1, scratch_bytes // of_row))
        if mode is None:  # each has two numbers of every tile and, with several blocks, its hidden states once more
            tile = configs.config_for(spec, binding.capability(), "forward")
            numbers = 2 * spec.accumulator.itemsize * -(-columns // tile.columns)
            if tokens * numbers > _FORWARD_BYTES:
                quick = _FORWARD_BYTES // (numbers + spec.dtype.itemsize * spec.hidden_size)
                most = min(most, max(_ROWS_OF_FORWARD, quick))
        stash = spec.dtype.itemsize * columns if mode == "in_forward" else 0
        if most < tokens and stash:  # several blocks, whose stash may lie where the gradient will
            spared = min(scratch_bytes // (of_row - stash), spare_bytes // stash, -(-tokens // 2))
            if spared >= _SPARED * most:
                most, of_row = spared, of_row - stash
        rows = next(sizes(tokens, _STEP if most >= _STEP else 1, most=most))
        unaligned = mode == "in_forward" and spec.dtype.itemsize == 2 and columns % _ALIGNED
        slower = f"XLA multiplies stored rows fast where V is a multiple of {_ALIGNED}" if unaligned else None
        return Plan(rows, columns, fixed + rows * of_row, spec.vocab_size, slower=slower, skips_rows=mode is None)

    def describe(self, spec: HeadSpec, options: int, mode: Mode | None, rows: int) -> Launch:
        """The kernel and its tiles, of plain cross entropy."""
        config = configs.config_for(spec, binding.capability(), _USES[mode], options)
        return Launch("head_kernel", config.rows, config.columns)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """One launch; the targets by XLA."""
        return entries.with_targets(launch.statistics(head, batch, names, filled), head, batch, names)

    def block(
        self, head: Head, batch: Batch, block: RowBlock, plan: Plan, gradient: Gradient | None = None
    ) -> TritonBlock:
        """In_forward works on all rows."""
        return TritonBlock(head.on_gpu(), batch, None)


def _recompute_plan(
    spec: HeadSpec, tokens: int, scratch_bytes: int, scratch: Callable[..., int], least_columns: int = 1
) -> Plan:
    """All rows if that leaves columns enough, in parts of nearly equal size."""
    v, rows, tile = spec.vocab_size, tokens, configs.config_for(spec, binding.capability(), "dlogits")
    most = min(v, _RECOMPUTE_COLUMNS, max(_LEAST_COLUMNS, _RECOMPUTE_BYTES // (spec.dtype.itemsize * tokens)))
    if scratch(tokens, min(v, _LEAST_COLUMNS), several=False) > scratch_bytes:
        rows, most = halved(tokens, min(v, _RECOMPUTE_COLUMNS), scratch, scratch_bytes, least_columns)
    scratch, at_once = functools.partial(scratch, several=rows < tokens), device.multiprocessors()

    def rounds(rows: int, columns: int) -> int:
        """The multiprocessors work on a part's tiles round by round, and the last of each part may be nearly empty."""
        tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
        return -(-v // columns) * (-(-tiles // at_once) + _ROUNDS_OF_A_PART)

    choices = ((rows, columns) for columns in sizes(v, min(_STEP, most), most=most))
    best = quickest(choices, scratch, scratch_bytes, rounds)
    return Plan(*best, scratch(*best), v)


def _scratch(spec: HeadSpec, mode: Mode | None, rows: int, columns: int, *, several: bool = True) -> int:
    """Bytes that a block takes beside inputs, outputs and accumulators.

    The operands of a low-rank term; partial statistics; in_forward: the exponentials, and a block of hidden states as
    scaled operand and as product; recompute: dlogits of a tile, its part of the weight and of its gradient, and with
    `several` blocks a block of hidden states as product, and the sum of the tile's gradients.
    """
    narrow, wide, size, v = spec.dtype.itemsize, spec.accumulator.itemsize, spec.hidden_size, spec.vocab_size
    term = narrow * launch.padded_rank(spec.rank) * (rows + v)
    if mode == "recompute":
        beside = (narrow + wide * (1 + several)) * columns * size + (narrow + wide) * several * rows * size
        return term + narrow * rows * columns + beside
    blocks = -(-v // min(choice.config.columns for choice in configs.choices(spec, binding.capability())))
    total = term + narrow * rows * size + _PARTIAL_FIELDS * wide * blocks * rows
    return total if mode is None else total + narrow * rows * v + (narrow + wide) * rows * size


def _scratch_of_pair(heads: Heads, mode: Mode | None, rows: int, columns: int, *, several: bool = True) -> int:
    """Likewise of two heads: the logits of both, in whole tiles, and where there are `several` blocks their rows."""
    total = 0 if mode is None else _scratch(heads[0], mode, rows, columns, several=several)
    for spec in heads:
        tile = min(choice.config.columns for choice in configs.choices(spec, binding.capability()))
        stored = spec.dtype.itemsize * (-(-columns // _STEP) * _STEP + several * spec.hidden_size)
        of_tiles = spec.accumulator.itemsize * -(-columns // tile)
        term = spec.dtype.itemsize * launch.padded_rank(spec.rank) * (rows + spec.vocab_size)
        total += rows * (stored + of_tiles) + term
    return total
