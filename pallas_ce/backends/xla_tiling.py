"""How large blocks of rows and tiles of the vocabulary are, on each platform.

On a CPU a tile's logits are to stay in the caches from their product to their statistics, so tiles are small. On an
accelerator products must be large to fill the chip, and sums over blocks and tiles are read and written again for each
of them. So blocks and tiles are as large as the scratch allows, in the proportions of least traffic.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_ce.backends.protocol import Mode, Plan
from pallas_ce.head import HeadSpec
from pallas_ce.streaming.budget import halved, quickest, sizes


class Tiling(NamedTuple):
    """The block and tile sizes that a platform prefers."""

    rows: int  # of a block, at most
    elements: int  # of a tile, at most
    cached: bool  # whether a tile's logits are in a cache when they are read again
    # Whether XLA writes products into parts of larger arrays, and keeps scratch where an output will lie.
    in_place: bool
    # Rows of a block below which in_forward of 16-bit operands is the slower mode: a fourth product then takes less
    # time than adding another share to the weight's whole gradient. With F operations and B bytes a second that is
    # where `2·rows / F < 20 / B`: for each entry XLA writes the share, reads it and the sum, writes that, and copies
    # slices of the weight.
    worth_adding: int


# 8 MiB of float32: on a CPU larger tiles gain nothing, and smaller ones make the products inefficient.
_CPU = Tiling(rows=1024, elements=2**21, cached=True, in_place=False, worth_adding=0)

# Larger blocks of rows gain nothing, and only whole blocks of ignored rows are skipped.
_GPU = Tiling(rows=8192, elements=2**27, cached=False, in_place=True, worth_adding=1792)
_TPU = _GPU._replace(in_place=False, worth_adding=1024)

# Blocks and tiles of an accelerator are a multiple of this, which its matrix units' own tiles divide.
_STEP = 128

# How many times longer than the three products one pass over sums, as `tiled_plan` counts them, would take if each
# logit had one: 8·H bytes to 6·H operations, and accelerators do 150 to 250 operations in the time of a byte.
_PASSES = 200

# Elements of a product that half of the chip could have made while the last parts of it were.
_IDLE = 2**21

# How many widths of tiles are compared.
_TRIED = 8


def preferred(platform: str) -> Tiling:
    """The tiling for a platform, by JAX's name."""
    return {"cpu": _CPU, "tpu": _TPU}.get(platform, _GPU)


def tiled_plan(
    tiling: Tiling,
    vocab_size: int,
    tokens: int,
    scratch: Callable[[int, int], int],
    limit: int,
    least_columns: int = 1,
) -> Plan:
    """Block sizes for `tokens` rows that fit: `scratch(rows, columns) <= limit`, which is about linear in either.

    The limit must hold one row of `least_columns`. On an accelerator they take the least time beside the products.
    """
    most_rows = min(tokens, tiling.rows)
    most_columns = min(vocab_size, max(least_columns, tiling.elements // most_rows))

    # Over all of the vocabulary V the sum for N rows is read and written V/columns times, and the weight's once for
    # each of N/rows blocks, if there are several: in units of N·V numbers, `1/columns + 1/rows`. The last block and
    # tile do again a part of what the ones before did, and at the end of each product a part of the chip idles.
    def time(rows: int, columns: int) -> float:
        blocks, tiles, idle = -(-tokens // rows), -(-vocab_size // columns), _IDLE / (rows * columns)
        again = (blocks * rows / tokens) * (tiles * columns / vocab_size) - 1
        return 1 / columns + (1 / rows if blocks > 1 else 0) + (again + idle) / _PASSES

    def widths(rows: int) -> list[int]:
        """Of the fewest tiles that fit, and of a few more."""
        fixed = scratch(rows, 0)
        most = max(1, min(most_columns, (limit - fixed) // (scratch(rows, 1) - fixed)))
        counts = range(-(-vocab_size // most), -(-vocab_size // most) + _TRIED)
        return [max(least_columns, min(vocab_size, -(-vocab_size // tiles // _STEP) * _STEP)) for tiles in counts]

    # Where there is no room for a whole step: halved along their longer side.
    best = halved(most_rows, most_columns, scratch, limit, least_columns)
    if not tiling.cached:
        choices = ((rows, columns) for rows in sizes(tokens, _STEP, most=most_rows) for columns in widths(rows))
        best = quickest(choices, scratch, limit, time, best)
    return Plan(*best, scratch(*best), vocab_size, last_apart=tiling.in_place)


def tiles_bytes(specs: Sequence[HeadSpec], entry_bytes: int, mode: Mode | None, rows: int, columns: int) -> int:
    """Bytes of blocks of `rows` and tiles of `columns`, of heads that are streamed together.

    An entry of a tile takes `entry_bytes`; blocks of hidden states and of the weight live as operands and, in a
    backward, as products and as sums.
    """
    sums = 2 * max(spec.accumulator.itemsize for spec in specs) if mode else 0
    operands = sum((spec.dtype.itemsize + sums) * spec.width for spec in specs)
    return entry_bytes * rows * columns + operands * (rows + columns)


def scratch(spec: HeadSpec, mode: Mode | None, tiling: Tiling, tokens: int, spare: int, rows: int, columns: int) -> int:
    """Bytes of a block of `rows` among `tokens` and of tiles of `columns`; `spare` as in `Backend.plan`.

    A tile lives as logits, as their exponentials or dlogits, and as the products' operand. In_forward keeps the logits
    of a block, in whole tiles.
    """
    wide, narrow, alone = spec.accumulator.itemsize, spec.dtype.itemsize, rows >= tokens
    tiled = -(-spec.vocab_size // columns) * columns if columns else spec.vocab_size
    kept = wide * rows * tiled if mode == "in_forward" else 0
    if tiling.in_place and not alone and kept <= spare:
        kept = 0
    if tiling.cached:
        return kept + tiles_bytes((spec,), 2 * wide + narrow, mode, rows, columns)
    # Elementwise work is fused with its readers. In_forward's logits are the stash's.
    entry = {None: wide, "recompute": wide + narrow, "in_forward": narrow + (0 if tiling.in_place else wide)}[mode]
    # A block's hidden states and their gradient, and a tile of the weight. The weight's gradient is added up in place,
    # except where a share is rounded first, or `vocab_scale`'s gradient is made of it.
    of_rows = narrow + (wide if mode == "in_forward" else 0)
    apart = mode == "recompute" or (mode == "in_forward" and (alone or spec.scaled_entries))
    of_columns = narrow + (wide if apart else 0)
    return kept + entry * rows * columns + (of_rows * rows + of_columns * columns) * spec.width
