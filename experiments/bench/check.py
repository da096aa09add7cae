"""Whether the head has become slower on a GPU, or takes more memory, than result files of its model say."""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.bench import results, sections
from experiments.bench.gpu_head import HEADS, passes
from experiments.bench.programs import THREE
from experiments.bench.sections import Case
from experiments.bench.tables import COLUMNS, table
from experiments.bench.timing import Rounds, half_width, ratios

ROUNDS = 40
TOLERANCE = 0.04
HALF_WIDTH = 0.015  # of a mean ratio, as a share of it

# By the result file that has the point, and how names of others begin that have it, too.
CASES = {
    "gpu_head_grid": Case("8192x131072", (8192, 131072, 4096), passes),
    "gpu_head_heads": Case("Qwen3 1.7B", HEADS["Qwen3 1.7B"], passes),
}


def run(folder: Path) -> int:
    """Times the forward and both backward modes at two points, beside result files of the same GPU model.

    Prints a table, and returns 1 where a ratio to the bare products is 4 % above the files' or not known to 1.5 %, or
    where temporary memory has grown by more than a MiB. On a CPU it takes a dry run's files. Files of this
    jax come first; a verdict beside another's names both versions, since XLA's products may differ.
    """
    machine = results.describe()
    device, jax = machine["device"], machine["jax"]
    options = argparse.Namespace(rounds=Rounds(ROUNDS), dry_run=device == "cpu")
    found, rows = results.load(folder), list[dict[str, Any]]()
    for name, case in CASES.items():
        known = [
            document
            for file, document in found.items()
            if file.startswith(name) and document["machine"]["device"] == device and case.name in document["points"]
        ]
        if known:
            before = max(known, key=lambda document: document["machine"]["jax"] == jax)
            theirs = before["machine"]["jax"]
            note = "" if theirs == jax else f" (with jax {jax}, before with {theirs})"
            (point,) = sections.points([case], options)
            judged = compared(case.name, point.measure(), before["points"][case.name])
            rows += ({**row, "verdict": row["verdict"] + note} for row in judged)
    if not rows:
        print(f"bench-check is skipped: {folder} has no results of what this machine computes on, {device}")
        return 0
    worse = sum(row["worse"] for row in rows)
    print(table(rows, COLUMNS["check"]))
    print(f"\n{worse} of {len(rows)} are worse than before, or cannot be judged")
    return int(worse > 0)


def compared(point: str, now: results.Record, before: results.Record) -> Iterator[dict[str, Any]]:
    """A row for each program that was measured before: what it takes now and took then, and the `verdict` in words."""
    for program in now["left_out"].keys() & before["results"].keys():
        yield {"point": point, "program": program, "verdict": now["left_out"][program], "worse": True}
    for program in (x for x in now["results"] if x in before["results"] and x not in THREE):
        found, known = (ratios(record["results"], program) for record in (now, before))
        ratio, old = statistics.fmean(found), statistics.fmean(known)
        known_to = half_width(found)
        mib, mib_before = (record["results"][program]["temporary_mib"] for record in (now, before))
        faults = {
            "too unsteady to be judged, which takes a GPU without other work": known_to >= HALF_WIDTH,
            "slower": ratio > (1 + TOLERANCE) * old,
            "more memory": mib > mib_before + 1,
        }
        verdict = ", ".join(words for words, is_so in faults.items() if is_so)
        fine = "faster" if ratio < (1 - TOLERANCE) * old else "as before"
        row = {"ratio": ratio, "half_width": known_to * ratio, "before": old, "mib": mib, "mib_before": mib_before}
        yield {"point": point, "program": program, **row, "verdict": verdict or fine, "worse": bool(verdict)}
