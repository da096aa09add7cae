"""The ladder: versions of the kernels that were tried, in order, each with what was measured of it.

A step is added by `python -m experiments.gpu_report --step "what changed"` from the result files of that version, so it
holds nothing that was not measured.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.bench.programs import FORWARD, IN_FORWARD, RECOMPUTE
from experiments.bench.results import ResultError
from experiments.bench.summary import ratios
from experiments.command_line import write_record

FILE = "ladder.json"
_PROGRAMS = (FORWARD, IN_FORWARD, RECOMPUTE)
_FIELDS = ("what", "date", "device", "points", *_PROGRAMS)

Step = dict[str, Any]


def step_from(grid: dict[str, Any], what: str) -> Step:
    """The step of a grid's result document: geometric means of the ratios to the bare product, or to three products.

    Raises:
        ResultError: it holds no points.
    """
    points, machine = grid["points"], grid["machine"]
    if not points:
        raise ResultError("the grid's result file holds no points: run `python -m experiments.gpu_head grid` first")
    means = {program: round(statistics.geometric_mean(ratios(points, program).values()), 4) for program in _PROGRAMS}
    return {"what": what, "date": machine["date"], "device": machine["device"], "points": len(points), **means}


def load(path: Path) -> list[Step]:
    """The steps in the file; none where there is no file.

    Raises:
        ResultError: it cannot be read.
    """
    if not path.exists():
        return []
    try:
        return [{field: step[field] for field in _FIELDS} for step in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ResultError(f"{path} is not a ladder: {error}; repair it by hand") from error


def add(path: Path, step: Step) -> None:
    """Adds a step at the end."""
    write_record(path, [*load(path), step])


def table(steps: list[Step]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    rows = [
        [s["what"], f"{s['date']}, {s['device']}", f"{s['points']}", *(f"{s[program]:.3f}" for program in _PROGRAMS)]
        for s in steps
    ]
    return ["version", "measured", "points", *_PROGRAMS], rows
