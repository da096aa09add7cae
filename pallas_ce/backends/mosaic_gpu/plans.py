"""Block sizes: as much work at a time as the scratch budget holds, in full tiles."""

import functools
import itertools
import math
from collections.abc import Iterable

from pallas_ce.backends.mosaic_gpu.kernels import operands, product_kernel
from pallas_ce.backends.mosaic_gpu.schedule import COLUMN_STEP, PARTIALS_BYTES, STEP, TALL, cost, rule
from pallas_ce.backends.protocol import Mode, Plan
from pallas_ce.head import HeadSpec
from pallas_ce.streaming.budget import quickest, sizes

# Scratch of the recompute mode at most; with more, larger tiles save less than a per cent.
_RECOMPUTE_BYTES = 184 * 2**20

# Statistics that a tile leaves of each row at most: in the forward, and for the losses that in_forward serves.
_PARTIAL_FIELDS, _LOSS_FIELDS = 7, 3

# Blocks of rows are multiples of these where the problem is large enough: so that tiles are full, and in recompute so
# that each block's sum begins where a copy may.
_ROW_STEP, _BLOCK_ROWS = 128, 64

# In_forward: the rows of two tiles; the rows whose products take as long as adding a block's product to the sum for the
# weight; and the operations in the 80 us that a block's small kernels take. Adding moves 8 bytes an entry at 4 TB/s, a
# row's products take 6 operations an entry at 700 TFLOP/s: 233 rows, and the product hides about half of the adding.
_FULL_ROWS = 256
_ROWS_PER_SUM = 100
_OPERATIONS_PER_BLOCK = 56 * 10**9

# Recompute: the logits of a product that take as long as moving H bytes, by the same speeds, where the product hides
# about half of the moving; and the operations in the 20 us that the small kernels of a block's tile take.
_LOGITS_PER_BYTE = 44
_OPERATIONS_PER_TILE = 14 * 10**9

# How much is compared: in_forward's blocks beyond the fewest, and widths of recompute's tiles.
_MORE_BLOCKS, _WIDTHS = 3, 24


def minimum(spec: HeadSpec, mode: Mode | None) -> int:
    """Bytes for one row at a time, or for the least tile of a block that others follow."""
    scratch = functools.partial(_scratch, spec, mode, _BLOCK_ROWS + 1, 0)
    if mode == "recompute":
        columns = min(spec.vocab_size, COLUMN_STEP)
        return max(scratch(rows, columns) for rows in (_BLOCK_ROWS - 1, _BLOCK_ROWS))  # padded or not
    return scratch(1, spec.vocab_size)


def by_rows(spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int) -> Plan:
    """Plans the forward and in_forward: blocks of rows of nearly equal size, each over the whole vocabulary."""
    scratch = functools.partial(_scratch, spec, mode, tokens, spare_bytes)
    # The time of a block beside its rows' products, in rows whose products take as long.
    fixed = _ROWS_PER_SUM + _OPERATIONS_PER_BLOCK // (6 * spec.vocab_size * spec.hidden_size)

    def time(rows: int, columns: int) -> int:
        return -(-tokens // rows) * (1 if mode is None else operands.round_up(rows, _FULL_ROWS) + fixed)

    fitting = [rows for rows in sizes(tokens, _ROW_STEP, 1) if scratch(rows, spec.vocab_size) <= scratch_bytes]
    most = -(-tokens // fitting[0]) + _MORE_BLOCKS
    choices = ((rows, spec.vocab_size) for rows in fitting if -(-tokens // rows) <= most)
    rows, columns = quickest(choices, scratch, scratch_bytes, time)
    splits = scratch(rows, columns, splits=True) <= scratch_bytes
    needed = scratch(rows, columns, splits=splits)
    if mode is None:
        needed += _partial_bytes(spec, rows) - _partial_bytes(spec, 1)
    return Plan(rows, columns, min(needed, scratch_bytes), spec.vocab_size, skips_rows=True, splits=splits)


@functools.lru_cache(maxsize=1024)
def recompute(spec: HeadSpec, tokens: int, scratch_bytes: int, sms: int) -> Plan:
    """Plans recompute: blocks of rows and tiles of the vocabulary that cost the least; see `_recompute_cost`.

    Cached for each number of SMs: a call outside of `jit` would repeat these 10 ms of work.
    """
    v, limit = spec.vocab_size, min(scratch_bytes, max(_RECOMPUTE_BYTES, minimum(spec, "recompute")))
    scratch = functools.partial(_scratch, spec, "recompute", tokens, 0)

    def widths(rows: int) -> Iterable[int]:
        """All of the vocabulary, and multiples of a step: the largest that fit."""
        every = (v, *range(v // COLUMN_STEP * COLUMN_STEP, 0, -COLUMN_STEP))
        return itertools.islice((columns for columns in every if scratch(rows, columns) <= limit), _WIDTHS)

    choices = ((rows, columns) for rows in sizes(tokens, _ROW_STEP, _BLOCK_ROWS) for columns in widths(rows))
    best = quickest(choices, scratch, limit, functools.partial(_recompute_cost, spec, tokens))
    return Plan(*best, scratch(*best), v, skips_rows=True)


def _recompute_cost(spec: HeadSpec, tokens: int, rows: int, columns: int) -> float:
    """The time of recompute in logits of one product: its three products, and the memory that they move besides.

    Every tile adds to the sum for hidden `[N, H]` in float32. Where there are several blocks, each adds to a sum for
    the tile's weight `[columns, H]`, and its hidden states may be gathered again for each tile.
    """
    size, blocks, tiles = spec.hidden_size, -(-tokens // rows), -(-spec.vocab_size // columns)
    last = spec.vocab_size - (tiles - 1) * columns

    def products(width: int) -> float:
        for_hidden = cost(product_kernel.hidden_config(rows, size), rows, size) * width / size
        for_weight = cost(product_kernel.weight_config(width, size, 0), width, size) * rows / size
        return cost(rule("dlogits", spec, rows, 2, 0), rows, width) + for_hidden + for_weight

    moved = 8 * tokens * tiles
    if blocks > 1:
        moved += 8 * spec.vocab_size * blocks + 4 * tokens * tiles
    small = blocks * tiles * _OPERATIONS_PER_TILE // (2 * size)
    return blocks * ((tiles - 1) * products(columns) + products(last)) + _LOGITS_PER_BYTE * moved + small


def _scratch(
    spec: HeadSpec, mode: Mode | None, tokens: int, spare: int, rows: int, columns: int, *, splits: bool = False
) -> int:
    """Bytes that a call takes beside inputs, outputs and accumulators; `spare` as in `Backend.plan`.

    Every mode holds the operands of a low-rank term. The forward holds partial statistics of at least one row of tiles.
    In_forward holds the stash, and a block of hidden states as scaled operand and as product, in parts where it
    `splits`. Recompute holds a tile's dlogits and, with several blocks, hidden states and a sum for the tile's
    weight. Hidden states that are gathered once lie where their gradient will.
    """
    narrow, wide = spec.dtype.itemsize, spec.accumulator.itemsize
    shape = operands.stored_shape(rows, columns)
    stash = narrow * math.prod(shape)
    term = narrow * operands.round_up(spec.rank, STEP) * (shape[0] + spec.weight_rows)
    several, block, size = rows < tokens, rows * spec.hidden_size, spec.hidden_size
    if mode is None:
        return term + _partial_bytes(spec, 1) + narrow * block * several
    # Where it is padded, products read a copy with zeros for padding.
    total = term + stash * (1 if shape == (rows, columns) else 2)
    if mode == "recompute":
        return total + (narrow * block + wide * columns * size) * several
    config = product_kernel.hidden_config(rows, size)
    parts = product_kernel.parts(config, rows, size, columns) if splits else 1
    partial = _LOSS_FIELDS * 4 * TALL.column_blocks(columns) * operands.round_up(rows, TALL.tile_rows)
    total -= stash * (several and stash <= spare)
    return total + partial + (2 * narrow + parts * wide) * block


def _partial_bytes(spec: HeadSpec, rows: int) -> int:
    """Bytes of every partial statistic of the forward, for `rows` rows or as many as are computed at a time."""
    by_row = _PARTIAL_FIELDS * 4 * TALL.column_blocks(spec.vocab_size)
    return min(PARTIALS_BYTES, by_row * operands.round_up(rows, TALL.tile_rows))
