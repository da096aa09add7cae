"""The largest batch that fits a device's memory, found in a few trials along the line of what batches need."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

# Trials of a search, which ends early when the batch is known to one in so many of its rows.
MOST_TRIALS = 7
FINE = 16

# A line through two small batches is not trusted further than this.
_MOST_GROWTH = 16


def search(needs: Callable[[Sequence[int]], Mapping[int, float]], limit: float, first: int) -> dict[int, float]:
    """Tries `first` and its double, then batches about the one that a line through two of them says is full.

    Args:
        needs: the bytes that batches need, infinity for one that failed; in ascending order, and those behind one that
            is too large may be left out.
        limit: bytes there are.
        first: rows of the first batch.

    Returns:
        Bytes by batch, of all that were tried.
    """
    found: dict[int, float] = {}
    wanted = [first, 2 * first]
    while wanted:
        found |= needs(wanted)
        wanted = _next(found, limit)[: MOST_TRIALS - len(found)]
    return dict(sorted(found.items()))


def bracket(found: Mapping[int, float], limit: float) -> tuple[int, float]:
    """The largest batch that fits, 0 for none, and the smallest that does not, infinity where all do."""
    over = min((batch for batch, need in found.items() if need > limit), default=math.inf)
    return max((batch for batch in found if batch < over), default=0), over


def mib_by_batch(found: Mapping[int, float]) -> dict[str, float | None]:
    """For a record: MiB, None for a batch that failed."""
    return {str(batch): need / 2**20 if math.isfinite(need) else None for batch, need in found.items()}


def _next(found: Mapping[int, float], limit: float) -> list[int]:
    fits, over = bracket(found, limit)
    if over - fits <= max(1, fits // FINE):
        return []
    full = _full(found, limit)
    # The line is right, or what lies well below it narrows the search.
    wanted = full - full // 4, full, full + max(1, full // (2 * FINE))
    between = [batch for batch in wanted if fits < batch < over]
    return between or [2 * fits if math.isinf(over) else int(fits + over) // 2]


def _full(found: Mapping[int, float], limit: float) -> int:
    """Where the limit is met by the line through the batches about it, else through the largest two; 0 without one."""
    known = sorted(batch for batch, need in found.items() if math.isfinite(need))
    fits, over = bracket(found, limit)
    about = [batch for batch in known if batch in (fits, over)]
    for low, high in itertools.pairwise(about if len(about) == 2 else known[-2:]):
        slope = (found[high] - found[low]) / (high - low)
        if slope > 0:
            return max(0, min(int(low + (limit - found[low]) / slope), _MOST_GROWTH * high))
    return 0
