"""Where our programs are faster than stored logits and every peer, from result files of several processes."""

from collections.abc import Mapping
from typing import Any

from experiments.bench.programs import FORWARD, IN_FORWARD, RECOMPUTE, THREE

Points = Mapping[str, Mapping[str, Any]]

# The share of points at which each is to be faster than stored logits and every peer.
FASTEST = {IN_FORWARD: 0.9, FORWARD: 0.8}

# How far apart a GPU's clocks may be.
_CLOCKS = 1.25


def wins(ours: str, section: Points, *peers: Points) -> tuple[int, int]:
    """At how many points our program is faster than every other of its kind, and at how many all were measured.

    All are compared through their ratios to the bare products of their process: peers with our program where that was
    measured beside them, else with that of our own process, unless these products are not `_alike`, where the point is
    left out. So are peers that cannot run at it.
    """

    def others(results: Mapping[str, Any]) -> list[float]:
        alike = {n: r for n, r in results.items() if n.startswith(FORWARD) == ours.startswith(FORWARD)}
        return [
            r["ratio"] for name, r in alike.items() if "ratio" in r and name not in (FORWARD, IN_FORWARD, RECOMPUTE)
        ]

    won = counted = 0
    for name, point in section.items():
        own = point["results"]
        beside = [points[name]["results"] for points in peers if name in points]
        if ours not in own or len(beside) < len(peers):
            continue
        if not all(ours in results or _alike(own, results) for results in beside):
            continue
        counted += 1
        won += all(results.get(ours, own[ours])["ratio"] < r for results in (own, *beside) for r in others(results))
    return won, counted


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether bare products of two processes are the same work for the GPU, and its clock all that tells them apart.

    Of a vocabulary of odd length PyTorch's take 2.6 times as long as XLA's.
    """
    times = [sum(results[name]["ms"] for name in THREE) for results in (one, other)]
    return max(times) <= _CLOCKS * min(times)
