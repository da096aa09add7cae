"""The memory that blocks and tiles may take beside a call's inputs and outputs, and the search for their sizes.

A backend states which sizes it may choose, by its own steps, and their costs: bytes, and time in any unit.
"""

from collections.abc import Callable, Iterable, Iterator

# Rows of a block and columns of a tile.
type Sizes = tuple[int, int]

# Bytes or time, by rows and columns.
type Cost = Callable[[int, int], float]

# A call's by default, of an ordinary vocabulary.
DEFAULT_SCRATCH_BYTES = 512 * 2**20

# The default at most, and by vocabulary entry: a wider vocabulary needs more for a block of as many rows.
MOST_SCRATCH_BYTES = 2 * DEFAULT_SCRATCH_BYTES
_BYTES_PER_ENTRY = 4096

# A small problem's, however few its logits: otherwise its blocks would shrink to nothing.
_SMALL_BYTES = 2**20


def default_bytes(vocab_size: int) -> int:
    """A call's by default."""
    return min(max(DEFAULT_SCRATCH_BYTES, _BYTES_PER_ENTRY * vocab_size), MOST_SCRATCH_BYTES)


def budget(scratch_bytes: int | None, least: int, logits: int, what: str, default: int = DEFAULT_SCRATCH_BYTES) -> int:
    """The bytes that blocks and tiles may take: the caller's bound, or the default, never more than the logits.

    The fewest bytes that will do are `least`, which hold `what` the error names.
    """
    if scratch_bytes is None:
        return max(least, min(default, max(logits, _SMALL_BYTES)))
    if scratch_bytes < least:
        raise ValueError(f"scratch_bytes={scratch_bytes} cannot hold {what}: at least {least} bytes are needed")
    return scratch_bytes


def sizes(total: int, step: int, finer: int | None = None, *, most: int | None = None) -> Iterator[int]:
    """Cuts `total` into ever more equal parts, and yields their sizes, from the largest that is at most `most`.

    Several parts are multiples of `step`; where `finer` is given, parts of one step or less are multiples of that.
    """
    size = min(total, most or total)
    if size == total:
        yield total
        size -= 1
    while size >= (finer or step):
        if finer is not None and size < 2 * step:
            size, step, finer = min(size, step), finer, None
        size = -(-total // -(-total // (size // step * step)) // step) * step
        yield size
        size -= 1


def quickest(choices: Iterable[Sizes], scratch: Cost, limit: int, time: Cost, *otherwise: Sizes) -> Sizes:
    """The choice of least time, and then of fewest bytes, with `scratch(rows, columns) <= limit`.

    Where no choice fits it is among `otherwise`; a budget that was checked holds the least of the choices.
    """
    fitting = [choice for choice in choices if scratch(*choice) <= limit]
    return min(fitting or otherwise, key=lambda choice: (time(*choice), scratch(*choice)))


def halved(rows: int, columns: int, scratch: Cost, limit: int, least_columns: int = 1) -> Sizes:
    """Rows of a block and columns of a tile, halved along their longer side until `scratch(rows, columns) <= limit`.

    The limit must hold one row of `least_columns`.
    """
    while scratch(rows, columns) > limit:
        if rows > 1 and (rows >= columns or columns <= least_columns or 2 * scratch(rows, least_columns) > limit):
            rows = -(-rows // 2)
        else:
            columns = max(least_columns, -(-columns // 2))
    return rows, columns
