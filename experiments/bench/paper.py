"""Table 2 of the paper, and the same ratios measured here: tables and a plot from `paper_table.json`.

The paper is "From Projection to Prediction: Beyond Logits for Scalable Language Models". Its numbers stand here as they
were published; all others come from the result file, and what that lacks is named.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench.report import machine_line, table
from experiments.bench.results import DRY, read
from experiments.command_line import save_figure, write_atomically

NAME = "paper_table"
H = 4096

# Programs of a point; of those whose name begins with "forward" only the loss is computed.
FLOAT32, BFLOAT16, PROPOSED = "canonical float32", "canonical bfloat16", "proposed"
FORWARD, BOTH = "forward ", ""
_KINDS = {FORWARD: "Forward", BOTH: "Forward and backward, which the paper leaves out"}
_CANONICAL = {FLOAT32: "float32 logits", BFLOAT16: "bfloat16 logits"}

_ABSENT = "–"


class Cost(NamedTuple):
    """Of one program at one point: milliseconds, and MiB with its operands and results."""

    ms: float
    mib: float


class Row(NamedTuple):
    """A row of the paper's table."""

    canonical: Cost
    proposed: Cost


# By N (batch times sequence) and V. That the table's megabytes are 2**20 bytes the numbers tell: without the bfloat16
# operands 16 to 38 of them are left of each proposed program, and of each canonical one 16 without those, a float32
# copy of them and two float32 arrays of logits. The paper's text has 96.42 for the last canonical latency.
TABLE = {
    (1024, 32768): Row(Cost(0.73, 1064), Cost(0.69, 280)),
    (1024, 65536): Row(Cost(1.40, 2088), Cost(0.97, 536)),
    (1024, 131072): Row(Cost(2.76, 4136), Cost(1.27, 1048)),
    (1024, 262144): Row(Cost(5.46, 8232), Cost(1.83, 2072)),
    (4096, 32768): Row(Cost(1.66, 1904), Cost(1.16, 304)),
    (4096, 65536): Row(Cost(3.34, 3696), Cost(1.69, 561)),
    (4096, 131072): Row(Cost(6.78, 7280), Cost(2.86, 1073)),
    (4096, 262144): Row(Cost(13.70, 14448), Cost(5.22, 2099)),
    (8192, 32768): Row(Cost(2.93, 3024), Cost(1.70, 337)),
    (8192, 65536): Row(Cost(6.08, 5840), Cost(2.90, 593)),
    (8192, 131072): Row(Cost(13.25, 11472), Cost(5.58, 1107)),
    (8192, 262144): Row(Cost(27.77, 22736), Cost(10.79, 2133)),
    (16384, 32768): Row(Cost(5.62, 5264), Cost(3.43, 401)),
    (16384, 65536): Row(Cost(12.41, 10128), Cost(6.61, 659)),
    (16384, 131072): Row(Cost(26.67, 19856), Cost(13.20, 1173)),
    (16384, 262144): Row(Cost(50.15, 39312), Cost(25.43, 2203)),
    (32768, 32768): Row(Cost(11.42, 9744), Cost(7.00, 531)),
    (32768, 65536): Row(Cost(25.64, 18704), Cost(13.80, 790)),
    (32768, 131072): Row(Cost(50.24, 36624), Cost(27.06, 1307)),
    (32768, 262144): Row(Cost(96.52, 72464), Cost(53.61, 2342)),
}

_NOTES = """\
Like for like is the canonical program with float32 logits, forward. Each ratio is canonical / proposed, both of one GPU
and one process; how large it can be depends on how a GPU's rate of products compares with its bandwidth.

* **The paper**: NVIDIA GB200, H 4096, bfloat16, PyTorch 2.9.0; the forward only. Its canonical memory is, at every
  point, 16 MiB more than that of the operands in bfloat16 and again in float32, and of two float32 arrays of logits.
* **Measured here**: *float32 logits* are what one product of the bfloat16 operands writes, *bfloat16 logits* are
  rounded to that, and the loss of either is plain JAX's. *Proposed* is `linear_cross_entropy` with its defaults. Memory
  is what XLA planned beside operands and results, with these: bfloat16 hidden states and weight, and after a backward
  their gradients."""


def name_of(n: int, v: int) -> str:
    """The point's name in the result file."""
    return f"{n}x{v}"


def cost(point: Mapping[str, Any], kind: str, program: str) -> Cost | None:
    """Of a measured point; None where the program has no results."""
    found = point.get("results", {}).get(kind + program)
    if found is None:
        return None
    operands = 2 * (point["n"] + point["v"]) * point["h"] / 2**20
    return Cost(found["ms"], found["temporary_mib"] + operands * (1 if kind == FORWARD else 2))


def ratios(points: Mapping[str, Any], kind: str, canonical: str) -> dict[tuple[int, int], Cost]:
    """Canonical / proposed, in time and memory, at each point where both are measured."""
    found = {}
    for size in TABLE:
        above, below = (cost(points.get(name_of(*size), {}), kind, program) for program in (canonical, PROPOSED))
        if above is not None and below is not None:
            found[size] = Cost(above.ms / below.ms, above.mib / below.mib)
    return found


def published(sizes: Iterable[tuple[int, int]] = TABLE) -> dict[tuple[int, int], Cost]:
    """The paper's canonical / proposed at these points."""
    rows = {size: TABLE[size] for size in sizes}
    return {size: Cost(a.ms / b.ms, a.mib / b.mib) for size, (a, b) in rows.items()}


def mean(found: Mapping[Any, Cost]) -> Cost | None:
    """Geometric means."""
    return Cost(*map(statistics.geometric_mean, zip(*found.values(), strict=True))) if found else None


def markdown(document: Mapping[str, Any] | None) -> str:
    """The report of a result file; of none, with the paper's numbers alone."""
    points = {} if document is None else document["points"]
    parts = ["# The paper's Table 2", "Made from the result file by `python -m experiments.paper_table --report`."]
    if document is not None:
        if document["machine"].get(DRY):
            parts.append("**DRY RUN: the sizes were shrunk. No number measured here is of the sizes in these tables.**")
        parts.append(machine_line(document))
        parts += [f"Proposed: {how}." for how in dict.fromkeys(point["proposed"] for point in points.values())]
    missing = [name_of(*size) for size in TABLE if name_of(*size) not in points]
    if missing:
        which = "any of the 20 points" if len(missing) == len(TABLE) else ", ".join(missing)
        parts.append(f"Not measured: {which}. `python -m experiments.{NAME}` goes on.")
    for name, point in points.items():
        parts += [f"Left out at {name}: {program}, {why}." for program, why in point.get("left_out", {}).items()]
    parts += [_NOTES, "## Geometric means of canonical / proposed", _means(points)]
    for (kind, title), (quantity, unit) in itertools.product(_KINDS.items(), (("ms", "ms"), ("mib", "MiB"))):
        parts += [f"## {title}: {unit}", _costs(points, kind, quantity)]
    return "\n\n".join(parts) + "\n"


def _means(points: Mapping[str, Any]) -> str:
    """A row for the paper and for each pair of programs; like for like beside the paper's mean at the same points."""

    def row(what: str, found: Mapping[Any, Cost], beside: Mapping[Any, Cost] | None = None) -> list[str]:
        here, there = mean(found), mean(beside or {})
        columns = [f"{number:.2f}" for number in here] if here else [_ABSENT] * 2
        columns += [f"{number:.2f}" for number in there] if there else [_ABSENT] * 2
        return [what, f"{len(found)}", *columns]

    rows = [row("the paper, forward, float32 logits", published())]
    for kind, canonical in itertools.product(_KINDS, _CANONICAL):
        found = ratios(points, kind, canonical)
        beside = published(found) if (kind, canonical) == (FORWARD, FLOAT32) else None
        what = "forward" if kind == FORWARD else "forward and backward"
        rows.append(row(f"here, {what}, {_CANONICAL[canonical]}", found, beside))
    header = ["canonical / proposed", "points", "latency", "memory"]
    return table([*header, "the paper's latency at these points", "the paper's memory"], rows)


def _costs(points: Mapping[str, Any], kind: str, quantity: str) -> str:
    """A row a point: the paper's numbers and ratio, of the forward, and ours."""
    digits = ".2f" if quantity == "ms" else ".0f"
    forward = kind == FORWARD
    by_canonical = {canonical: ratios(points, kind, canonical) for canonical in _CANONICAL}
    rows = []
    for size, row in TABLE.items():
        there = [f"{getattr(one, quantity):{digits}}" for one in row]
        there.append(f"{getattr(row.canonical, quantity) / getattr(row.proposed, quantity):.2f}")
        costs = [cost(points.get(name_of(*size), {}), kind, program) for program in (*_CANONICAL, PROPOSED)]
        here = [_ABSENT if one is None else f"{getattr(one, quantity):{digits}}" for one in costs]
        here += [
            f"{getattr(found[size], quantity):.2f}" if size in found else _ABSENT for found in by_canonical.values()
        ]
        rows.append([*map(str, size), *(there if forward else []), *here])
    header = ["N", "V", *(("paper: canonical", "paper: proposed", "paper: ratio") if forward else ())]
    ours = [*_CANONICAL.values(), "proposed", *(f"ratio, {logits}" for logits in _CANONICAL.values())]
    return table([*header, *ours], rows)


def plot(document: Mapping[str, Any] | None, path: Path) -> Path:
    """The ratios over the points, a panel for time and one for memory."""
    from matplotlib.figure import Figure

    points = {} if document is None else document["points"]
    lines = {"the paper (GB200), forward": published()}
    for kind, canonical in itertools.product(_KINDS, _CANONICAL):
        what = "forward" if kind == FORWARD else "forward and backward"
        lines[f"{what}, {_CANONICAL[canonical]}"] = ratios(points, kind, canonical)
    machine = {} if document is None else document["machine"]
    device = f"{machine.get('device', 'nothing measured')}{', DRY RUN' if machine.get(DRY) else ''}"
    places = {size: place for place, size in enumerate(TABLE)}
    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, quantity, title in zip(figure.subplots(1, 2), Cost._fields, ("latency", "memory"), strict=True):
        for number, (label, found) in enumerate(lines.items()):
            values = [getattr(one, quantity) for one in found.values()]
            axes.plot([places[size] for size in found], values, "o--" if number == 0 else "o-", label=label)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(list(places.values()), [name_of(*size) for size in places], rotation=60, ha="right")
        axes.set(title=f"{title}: canonical / proposed")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    figure.suptitle(f"Table 2's points, {device}", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return save_figure(figure, path)


def write(folder: Path) -> list[Path]:
    """Makes `paper_table.md` and `.png` from the folder's result file, or without one; the files written.

    Raises:
        ResultError: the result file cannot be read.
    """
    path = folder / f"{NAME}.json"
    document = read(path) if path.exists() else None
    report = path.with_suffix(".md")
    write_atomically(report, markdown(document))
    return [report, plot(document, path.with_suffix(".png"))]
