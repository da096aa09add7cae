"""The ladder: versions of the kernels that were tried, in order, each with what was measured of it.

A step is added by `python -m experiments.gpu_report --step "what changed"` from the result files of that version, so it
holds nothing that was not measured.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench import summary
from experiments.bench.results import ResultError
from experiments.command_line import write_atomically

FILE = "ladder.json"


class Step(NamedTuple):
    """One version.

    Attributes:
        what: what changed, in a line.
        date: of the measurement.
        device: it was made on.
        points: points of the grid that were measured.
        forward: geometric mean of the ratio to the bare product.
        in_forward: of forward+backward, to three products.
        recompute: likewise.
    """

    what: str
    date: str
    device: str
    points: int
    forward: float
    in_forward: float
    recompute: float


def step_from(grid: dict[str, Any], what: str) -> Step:
    """The step of a grid's result document.

    Raises:
        ResultError: it holds no points.
    """
    points, machine = grid["points"], grid["machine"]
    if not points:
        raise ResultError("the grid's result file holds no points: run `python -m experiments.gpu_head grid` first")
    means = (
        summary.geometric_mean(list(summary.ratios(points, program).values()))
        for program in (summary.FORWARD, summary.IN_FORWARD, summary.RECOMPUTE)
    )
    return Step(what, machine["date"], machine["device"], len(points), *(round(mean, 4) for mean in means))


def load(path: Path) -> list[Step]:
    """The steps in the file; none where there is no file.

    Raises:
        ResultError: it cannot be read.
    """
    if not path.exists():
        return []
    try:
        return [Step(**step) for step in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise ResultError(f"{path} is not a ladder: {error}; repair it by hand") from error


def add(path: Path, step: Step) -> None:
    """Adds a step at the end."""
    steps = [*load(path), step]
    write_atomically(path, json.dumps([step._asdict() for step in steps], indent=1) + "\n")


def table(steps: list[Step]) -> str:
    """The steps as a markdown table."""
    lines = ["| version | measured | points | forward | in_forward | recompute |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {s.what} | {s.date}, {s.device} | {s.points} | {s.forward:.3f} | {s.in_forward:.3f} | {s.recompute:.3f} |"
        for s in steps
    ]
    return "\n".join(lines)
