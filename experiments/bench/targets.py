"""Figures of merit from result files: each target of `targets.toml` with what was reached."""

import collections
import fnmatch
import functools
import math
import statistics
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench.programs import FORWARD, IN_FORWARD, RECOMPUTE
from experiments.bench.tables import ABSENT, table

Documents = Mapping[str, Mapping[str, Any]]
Points = Mapping[str, Mapping[str, Any]]

TARGETS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["target"]
_OURS = (FORWARD, IN_FORWARD, RECOMPUTE)
_COLUMNS = {"figure": "{what}", "target": "{bound}", "measured": "{value:.4g}"}


def targets_table(documents: Documents) -> str:
    """Each target beside what was measured."""
    return table(_all(documents), {**_COLUMNS, "half-width of means": "{half_width:.1%}", "reached": "{reached}"})


def missed_table(documents: Documents) -> str:
    """How many targets are missed, for which reasons, and of each reason's the figure furthest from its target."""
    rows = _all(documents)
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("reached") == "no":
            by_reason.setdefault(row.get("why", ABSENT), []).append(row)
    furthest = [
        {**max(missed, key=lambda row: row["missed_by"]), "missed": len(missed)}
        for missed in sorted(by_reason.values(), key=len, reverse=True)
    ]
    counted = (
        f"{sum(row['missed'] for row in furthest)} of {len(rows)} targets are missed. Of each reason's figures the "
        "furthest from its target stands here; `experiments/results/gpu_report.md` has all."
    )
    return f"{counted}\n\n{table(furthest, {'why': '{why}', 'missed': '{missed}', **_COLUMNS})}"


def _all(documents: Documents) -> list[dict[str, Any]]:
    documents = {**documents, "fastest": fastest(documents)}
    return [judged(target, documents) for target in TARGETS]


def judged(target: Mapping[str, Any], documents: Documents) -> dict[str, Any]:
    """The target with its `bound` in words and, where the file is there, its `value` and whether it is `reached`.

    It is `missed_by` a share of the bound. Of a time also the `half_width` to which
    the means of all programs at its points are known, the worst.
    """
    least = "at_least" in target
    bound = target["at_least" if least else "at_most"]
    row = {**target, "bound": f"{'≥' if least else '≤'} {bound:g}"}
    points = documents.get(target["file"], {"points": {}})["points"]
    if not (values := _values(target, points)):
        return row
    widths = select(points, f"{target['select'].partition('/')[0]}/*/half_width").values()
    if widths and not target["select"].endswith("mib"):
        row["half_width"] = max(widths)
    value = statistics.geometric_mean(values) if target.get("of") == "mean" else (min if least else max)(values)
    missed_by = (bound - value if least else value - bound) / bound
    return row | {"value": value, "missed_by": missed_by, "reached": "no" if missed_by > 0 else "yes"}


def _values(target: Mapping[str, Any], points: Points) -> list[float]:
    found = select(points, target["select"])
    for name, (least, most) in target.get("where", {}).items():
        found = {key: value for key, value in found.items() if least <= points[key[0]][name] <= most}
    for name, combined in (("plus", float.__add__), ("minus", float.__sub__), ("over", float.__truediv__)):
        if name in target:
            others = {point: value for (point, _), value in select(points, target[name]).items()}
            only = math.nan if "*" in target[name].partition("/")[0] else next(iter(others.values()), math.nan)
            found = {key: combined(value, others.get(key[0], only)) for key, value in found.items()}
    return [value for value in found.values() if not math.isnan(value)]


def select(points: Points, selector: str) -> dict[tuple[str, str], float]:
    """The numbers of a selector, by point and program; see `targets.toml`."""
    name, *program, number = selector.split("/")
    found = {}
    for key, point in points.items():
        if fnmatch.fnmatchcase(key, name):
            n, v, h = (point.get(size, 0) for size in "nvh")
            sizes = {"dH_mib": 4 * n * h / 2**20, "gradients_mib": 2 * (n + v) * h / 2**20}
            records = point.get("results", {}) if program else {"": {**point, **sizes}}
            for other, record in records.items():
                if not program or fnmatch.fnmatchcase(other, program[0]):
                    value = functools.reduce(lambda at, part: at.get(part, {}), number.split("."), record)
                    if isinstance(value, int | float):
                        found[key, other] = float(value)
    return found


def fastest(documents: Documents) -> dict[str, Any]:
    """At which share of the points our programs are faster than stored logits and every peer, as a document."""
    peers = [document["points"] for name, document in documents.items() if name.startswith("peers")]
    points: dict[str, Any] = {}
    for section in ("grid", "heads") if peers else ():
        ours = documents.get(f"gpu_head_{section}", {"points": {}})["points"]
        results = {}
        for program in (FORWARD, IN_FORWARD):
            won, counted = wins(program, ours, *peers)
            results[program] = {"share": won / counted} if counted else {}
        points[section] = {"results": results}
    return {"points": points}


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
