"""Where our programs are faster than stored logits and every peer, from result files of several processes."""

import collections
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.bench.programs import FORWARD, IN_FORWARD, RECOMPUTE

Points = Mapping[str, Mapping[str, Any]]

# The share of points at which each is to be faster than stored logits and every peer.
FASTEST = {IN_FORWARD: 0.9, FORWARD: 0.8}

_OURS = (FORWARD, IN_FORWARD, RECOMPUTE)


def wins(ours: str, section: Points, *peers: Points) -> tuple[int, int]:
    """At how many points our program is faster than every other of its kind, and at how many all processes timed it.

    Another is compared with ours of the same process. Where several processes timed both, the geometric mean counts,
    since a GPU's clocks move the comparison of a single one by several per cent.
    """
    won = counted = 0
    for name in section:
        processes = [points.get(name, {}).get("results", {}) for points in (section, *peers)]
        if not all(ours in results for results in processes):
            continue
        relative: dict[str, list[float]] = collections.defaultdict(list)
        for results in processes:
            for other, found in results.items():
                alike = other.startswith(FORWARD) == ours.startswith(FORWARD) and other not in _OURS
                if alike and "ratio" in found:  # bare products have none
                    relative[other].append(results[ours]["ratio"] / found["ratio"])
        counted += 1
        won += all(statistics.geometric_mean(several) < 1 for several in relative.values())
    return won, counted
