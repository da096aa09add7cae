"""Block sizes: as much work at a time as the scratch budget holds, in full tiles."""

import functools

from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu import recomputation
from pallas_ce.backends.mosaic_gpu.kernels import operands, product_kernel
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES, TALL, Config, cost, rule
from pallas_ce.backends.protocol import Mode, Plan
from pallas_ce.head import HeadSpec

# Scratch of the recompute mode at most; with more, larger tiles save less than a per cent.
_RECOMPUTE_BYTES = 184 * 2**20

# 16-bit numbers of a row that XLA's products read at once.
_ALIGNED_COLUMNS = 8

# Statistics that a tile leaves of each row at most: in the forward, and for the losses that in_forward serves.
_PARTIAL_FIELDS = 7
_LOSS_FIELDS = 3

# Blocks of rows are multiples of this where the problem is large enough, so that tiles are full.
_ROW_STEP = 128

# In_forward: the rows of two tiles; the rows whose products take as long as adding a block's product to the sum for the
# weight; and the operations in the 80 us that a block's small kernels take. Adding moves 8 bytes an entry at 4 TB/s, a
# row's products take 6 operations an entry at 700 TFLOP/s: 233 rows, and the product hides about half of the adding.
_FULL_ROWS = 256
_ROWS_PER_SUM = 100
_OPERATIONS_PER_BLOCK = 56 * 10**9
_MORE_BLOCKS = 4

_MOST_BLOCKS = 64

# Numbers of a row in one step; a low-rank term's operands are padded to whole steps.
_DEPTH = Config().depth

# Recompute: how many widths of a tile are compared; the logits of a product that take as long as moving H bytes, at 700
# TFLOP/s and 4 TB/s, where the product hides about half of the moving; and the operations in the 20 us that the small
# kernels of a block's tile take.
_WIDTHS = 24
_LOGITS_PER_BYTE = 44
_OPERATIONS_PER_TILE = 14 * 10**9


def minimum(spec: HeadSpec, mode: Mode | None) -> int:
    """Bytes for one row at a time, or for one row of a small tile."""
    columns = spec.vocab_size if mode == "in_forward" else min(spec.vocab_size, operands.LENGTH_MULTIPLE)
    return _scratch(spec, mode, 1, columns, blocks=2)


def by_rows(spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int) -> Plan:
    """Plans the forward and in_forward: blocks of rows of nearly equal size, each over the whole vocabulary."""

    def bytes_beside(rows: int, blocks: int, *, splits: bool = False) -> int:
        total = _scratch(spec, mode, rows, spec.vocab_size, blocks=blocks, splits=splits)
        stash = _stash(spec, rows, spec.vocab_size)
        return total - stash if mode == "in_forward" and blocks > 1 and stash <= spare_bytes else total

    blocks = 1
    while (rows := _even_rows(tokens, blocks)) > 1:
        if bytes_beside(rows, blocks) <= scratch_bytes:
            break
        blocks = max(blocks + 1, -(-tokens // max(1, rows - 1)) if rows <= 2 * _ROW_STEP else 0)
    if mode == "in_forward" and blocks > 1:
        blocks = min(range(blocks, blocks + _MORE_BLOCKS), key=lambda count: _in_forward_cost(spec, tokens, count))
        rows = _even_rows(tokens, blocks)
    splits = bytes_beside(rows, blocks, splits=True) <= scratch_bytes
    needed = bytes_beside(rows, blocks, splits=splits)
    if mode is None:
        needed += _partial_bytes(spec, rows) - _partial_bytes(spec, 1)
    skips = mode is None or recomputation.in_place(spec, rows, spec.vocab_size)
    slower = _slower(spec) if mode == "in_forward" else None
    return Plan(rows, spec.vocab_size, min(needed, scratch_bytes), spec.vocab_size, skips, splits, slower)


def _slower(spec: HeadSpec) -> str | None:
    """Why in_forward is slow: XLA's products read recompute's tiles in 16 bytes, but not such rows of exponentials.

    On an H200 GPT-2's head takes 1.5 times as long as three bare products in in_forward, and 0.7 times in recompute.
    """
    if spec.weight_rows % _ALIGNED_COLUMNS == 0:
        return None
    return (
        f"products over all of {spec.weight_rows} vocabulary entries, no multiple of {_ALIGNED_COLUMNS}, take "
        "twice as long as over tiles"
    )


def recompute(spec: HeadSpec, tokens: int, scratch_bytes: int) -> Plan:
    """Plans recompute: blocks of rows and tiles of the vocabulary that cost the least; see `_recompute_cost`."""
    return _recompute(spec, tokens, scratch_bytes, targets.multiprocessors())


@functools.lru_cache(maxsize=1024)
def _recompute(spec: HeadSpec, tokens: int, scratch_bytes: int, sms: int) -> Plan:
    """`recompute`, cached for each number of SMs: a call outside of `jit` would repeat these 10 ms of work."""
    del sms
    budget = min(scratch_bytes, _RECOMPUTE_BYTES)
    choices = []
    for blocks in range(1, 1 + min(tokens, _MOST_BLOCKS)):
        rows = _even_rows(tokens, blocks)
        for columns in _tile_columns(spec, rows, budget, blocks):
            cost = _recompute_cost(spec, tokens, blocks, rows, columns)
            choices.append((cost, blocks, rows, columns))
    if choices:
        _, blocks, rows, columns = min(choices)
    else:
        blocks, columns = 2, min(spec.vocab_size, operands.LENGTH_MULTIPLE)
        fitting = (r for r in (128, 64, 32, 16, 8, 4, 2) if _scratch(spec, "recompute", r, columns) <= scratch_bytes)
        rows = min(next(fitting, 1), tokens)
    scratch = _scratch(spec, "recompute", rows, columns, blocks=blocks)
    return Plan(rows, columns, scratch, spec.vocab_size, recomputation.in_place(spec, rows, columns))


def _in_forward_cost(spec: HeadSpec, tokens: int, blocks: int) -> int:
    """The time of in_forward in `blocks` blocks, in rows whose products take as long."""
    fixed = _ROWS_PER_SUM + _OPERATIONS_PER_BLOCK // (6 * spec.vocab_size * spec.hidden_size)
    return blocks * (operands.round_up(_even_rows(tokens, blocks), _FULL_ROWS) + fixed)


def _even_rows(tokens: int, blocks: int) -> int:
    """Rows of `blocks` nearly equal blocks, in full tiles where there are that many rows."""
    rows = -(-tokens // blocks)
    return min(tokens, operands.round_up(rows, _ROW_STEP)) if rows > _ROW_STEP else rows


def _tile_columns(spec: HeadSpec, rows: int, budget: int, blocks: int) -> list[int]:
    """Widths to choose from: all of the vocabulary, or the largest multiples of a step within the budget."""

    def scratch(columns: int) -> int:
        return _scratch(spec, "recompute", rows, columns, blocks=blocks)

    step = product_kernel.COLUMN_STEP
    if scratch(spec.vocab_size) <= budget:
        return [spec.vocab_size]
    most = spec.vocab_size // step
    while most and scratch(most * step) > budget:
        most = min(most - 1, budget * most // scratch(most * step))
    return [step * count for count in range(max(1, most - _WIDTHS + 1), most + 1)]


def _recompute_cost(spec: HeadSpec, tokens: int, blocks: int, rows: int, columns: int) -> float:
    """The time of recompute in logits of one product: its three products, and the memory that they move besides.

    Every tile adds to the sum for hidden `[N, H]` in float32. Where there are several blocks, each adds to a sum for
    the tile's weight `[columns, H]`, and its hidden states may be gathered again for each tile.
    """
    size, tiles = spec.hidden_size, -(-spec.vocab_size // columns)
    last = spec.vocab_size - (tiles - 1) * columns

    def products(width: int) -> float:
        for_hidden = cost(product_kernel.hidden_config(rows, size), rows, size) * width / size
        for_weight = cost(product_kernel.weight_config(width, size, 0), width, size) * rows / size
        return cost(rule("dlogits", spec, 2, 0), rows, width) + for_hidden + for_weight

    moved = 8 * tokens * tiles
    if blocks > 1:
        moved += 8 * spec.vocab_size * blocks + 4 * tokens * tiles
    small = blocks * tiles * _OPERATIONS_PER_TILE // (2 * size)
    return blocks * ((tiles - 1) * products(columns) + products(last)) + _LOGITS_PER_BYTE * moved + small


def _scratch(
    spec: HeadSpec, mode: Mode | None, rows: int, columns: int, *, blocks: int = 2, splits: bool = False
) -> int:
    """Bytes that a call takes beside inputs, outputs and accumulators.

    Every mode holds the operands of a low-rank term. The forward holds partial statistics of at least one row of tiles.
    In_forward holds the stash, and a block of hidden states as scaled operand and as product, in parts where it
    `splits`. Recompute holds a tile's dlogits; with several blocks, hidden states and a sum for the tile's weight; and,
    unless it works in place, a slice of the weight and products. Hidden states that are gathered once lie where their
    gradient will.
    """
    narrow, wide = spec.dtype.itemsize, spec.accumulator.itemsize
    stored_rows = operands.round_up(rows, operands.ROW_MULTIPLE)
    term = narrow * operands.round_up(spec.rank, _DEPTH) * (stored_rows + spec.weight_rows)
    copied, several = operands.weight_copy_bytes(spec), blocks > 1
    if mode is None:
        return term + copied + _partial_bytes(spec, 1) + (narrow * rows * spec.hidden_size if several else 0)
    # Where `columns` is no multiple, rows of the stash are padded, and products read a copy without the padding.
    stored = term + _stash(spec, rows, columns)
    if columns % operands.LENGTH_MULTIPLE:
        stored += narrow * stored_rows * columns
    if mode == "in_forward":
        parts = 1
        if splits and product_kernel.serves(spec, rows):
            config = product_kernel.hidden_config(rows, spec.hidden_size)
            parts = product_kernel.parts(config, rows, spec.hidden_size, columns)
        partial = _LOSS_FIELDS * 4 * TALL.column_blocks(columns) * operands.round_up(rows, TALL.tile_rows)
        return copied + partial + stored + (2 * narrow + parts * wide) * rows * spec.hidden_size
    tile, block = columns * spec.hidden_size, rows * spec.hidden_size
    if recomputation.in_place(spec, rows, columns):
        return stored + (narrow * block + wide * tile) * several
    return stored + (narrow + wide * (1 + several)) * tile + (narrow + wide) * block * several


def _stash(spec: HeadSpec, rows: int, columns: int) -> int:
    """Bytes of the stash, a 16-bit number for each logit."""
    stored_rows, stored_columns = operands.stored_shape(rows, columns)
    return spec.dtype.itemsize * stored_rows * stored_columns


def _partial_bytes(spec: HeadSpec, rows: int) -> int:
    """Bytes of every partial statistic of the forward, for `rows` rows or as many as are computed at a time."""
    by_row = _PARTIAL_FIELDS * 4 * TALL.column_blocks(spec.vocab_size)
    return min(PARTIALS_BYTES, by_row * operands.round_up(rows, TALL.tile_rows))
