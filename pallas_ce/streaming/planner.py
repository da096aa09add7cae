"""Block sizes: the memory that a call may take beside its inputs and outputs, and the search within it.

A backend states which sizes it works on, and the bytes and the time of a block of rows and a tile of columns.
"""

from collections.abc import Callable, Iterable, Iterator

# A call's by default.
DEFAULT_SCRATCH_BYTES = 512 * 2**20

# A small problem's, however few its logits: otherwise its blocks would shrink to nothing.
_SMALL_BYTES = 2**20


def budget(scratch_bytes: int | None, least: int, logits: int, what: str, default: int = DEFAULT_SCRATCH_BYTES) -> int:
    """The bytes that blocks and tiles may take.

    Args:
        scratch_bytes: the caller's bound, or None for the default, which is never more than the logits would take.
        least: the fewest bytes that will do.
        logits: bytes of the logits.
        what: what the fewest bytes hold.
        default: the default.
    """
    if scratch_bytes is None:
        return max(least, min(default, max(logits, _SMALL_BYTES)))
    if scratch_bytes < least:
        raise ValueError(f"scratch_bytes={scratch_bytes} cannot hold {what}: at least {least} bytes are needed")
    return scratch_bytes


def sizes(total: int, most: int, step: int, least: int = 1) -> Iterator[int]:
    """Sizes of equal parts of `total`, from the largest that is at most `most` on.

    They are whole steps, except for a single part; parts shorter than a step are multiples of `least`.
    """
    most = min(total, most)
    while most > 0:
        size = -(-total // -(-total // most))
        unit = step if size > step else least
        size = min(total, -(-size // unit) * unit)
        if size <= most:
            yield size
        most = (size - 1) // unit * unit


def widest(scratch: Callable[[int], int], limit: int, step: int = 1) -> int:
    """The largest multiple of `step` whose scratch, linear in such multiples, is at most `limit`; negative if none."""
    fixed = scratch(0)
    return (limit - fixed) // (scratch(step) - fixed) * step


def search(
    rows: Iterable[int],
    columns: Callable[[int], Iterable[int]],
    scratch: Callable[[int, int], int],
    time: Callable[[int, int], float],
    limit: int,
) -> tuple[int, int] | None:
    """Of `rows` of a block and `columns(rows)` of a tile, the first that take the least time.

    Both `scratch(rows, columns)`, at most `limit`, and `time(rows, columns)` are the backend's. None where none fit.
    """
    fitting = ((r, c) for r in rows for c in columns(r) if scratch(r, c) <= limit)
    return min(fitting, key=lambda found: time(*found), default=None)


def shrink(
    rows: int, columns: int, scratch: Callable[[int, int], int], limit: int, least_columns: int = 1
) -> tuple[int, int]:
    """Rows of a block and columns of a tile, halved along their longer side until `scratch(rows, columns) <= limit`.

    The limit must hold one row of `least_columns`.
    """
    while scratch(rows, columns) > limit:
        if rows > 1 and (rows >= columns or columns <= least_columns or 2 * scratch(rows, least_columns) > limit):
            rows = -(-rows // 2)
        else:
            columns = max(least_columns, -(-columns // 2))
    return rows, columns
