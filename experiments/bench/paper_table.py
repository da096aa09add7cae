"""The paper's experiment, its Table 2, on this GPU: `python -m experiments.bench paper_table`.

The paper is "From Projection to Prediction: Beyond Logits for Scalable Language Models". Time and memory of the loss at
all 20 points, N x V at H 4096 in bfloat16, forward as in the paper, and forward and backward, which the paper leaves
out:

    canonical float32   stored float32 logits, as the paper's canonical column has them
    canonical bfloat16  stored bfloat16 logits, the fastest of the plain ways
    proposed            `linear_cross_entropy` with its defaults, in a dry run, too

Everything is timed on the device, in one process, in turn. A program that the GPU's memory does not suffice for is left
out, with the reason. `python -m experiments.bench gpu_report` sets the paper's ratios beside these.
"""

import argparse
import itertools
import statistics
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import sections, timing
from experiments.bench.programs import Program, Shape, both, canonical, canonical_float32, ours
from experiments.bench.results import Record, ResultFile
from experiments.bench.sections import Case, Serve
from experiments.bench.tables import left_out, machine_line, table
from experiments.charts import Panel
from pallas_ce import explain

NAME = "paper_table"
H = 4096
LOSSES = {"canonical float32": canonical_float32, "canonical bfloat16": canonical, "proposed": ours(None)}
_CANONICAL = {"canonical float32": "float32 logits", "canonical bfloat16": "bfloat16 logits"}
_KINDS = {"forward ": "forward", "": "forward and backward"}  # by how the program's name begins
_QUANTITIES = {"ms": ("latency", ".2f"), "mib": ("memory", ".0f")}

_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["rows"]
TABLE: dict[tuple[int, int], tuple[float, ...]] = {(n, v): tuple(costs) for n, v, *costs in _ROWS}


def programs(_: Serve, __: Shape) -> dict[str, Program]:
    """The losses, and the losses with both gradients; ours by default, whatever serves a point."""
    with_gradients = {name: both(loss) for name, loss in LOSSES.items()}
    return {f"forward {name}": loss for name, loss in LOSSES.items()} | with_gradients


def measure(shape: Shape, *given: Any) -> Record:
    """Also by which implementation, and in which backward mode, ours was computed."""
    n, v, h = shape
    arrays = jax.ShapeDtypeStruct((n, h), jnp.bfloat16), jax.ShapeDtypeStruct((v, h), jnp.bfloat16)
    forward, whole = explain(*arrays, differentiate=()), explain(*arrays)
    how = f"forward by {forward.implementation}, forward and backward by {whole.implementation}, {whole.backward}"
    return timing.measure(shape, *given) | {"proposed": how}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """The 20 points."""
    cases = [Case(f"{n}x{v}", (n, v, H), programs, measure) for n, v in TABLE]
    return [ResultFile(NAME, sections.points(cases, options), NAME, sections.CLOCK)]


def markdown(document: Record) -> str:
    """The report of a result file, what it lacks named."""
    points = document["points"]
    rows = _rows(points)
    missing = [name for n, v in TABLE if (name := f"{n}x{v}") not in points]
    return "\n\n".join(
        [
            machine_line(document),
            *(f"Proposed: {how}." for how in dict.fromkeys(point["proposed"] for point in points.values())),
            *([f"Not measured: {', '.join(missing)}."] if missing else []),
            *left_out(document),
            "## Geometric means of canonical / proposed",
            _means(rows),
            *(part for kind in _KINDS for quantity in _QUANTITIES for part in _costs(rows, kind, quantity)),
        ]
    )


def panels(document: Record) -> list[Panel]:
    """The ratios over the points, a panel for time and one for memory."""
    rows = _rows(document["points"])
    labels = {"the paper (GB200), forward": "paper {quantity}"}
    for kind, what in _KINDS.items():
        labels |= {f"{what}, {logits}": f"{kind}{name} {{quantity}}" for name, logits in _CANONICAL.items()}
    return [
        Panel(
            {label: _line(rows, key.format(quantity=quantity)) for label, key in labels.items()},
            title=f"{title}: canonical / proposed",
            log="y",
        )
        for quantity, (title, _) in _QUANTITIES.items()
    ]


def _rows(points: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a point: of each program its cost, and of each canonical one its ratio to the proposed one's."""
    rows = []
    for (n, v), published in TABLE.items():
        row: dict[str, Any] = {"n": n, "v": v, "point": f"{n}x{v}"}
        of_paper = {"ms": published[::2], "mib": published[1::2]}
        found = points.get(row["point"], {"results": {}})["results"]
        for quantity, (there, proposed) in of_paper.items():
            row |= {f"there canonical {quantity}": there, f"there proposed {quantity}": proposed}
            row[f"paper {quantity}"] = there / proposed
        for kind in _KINDS:
            operands = 2 * (n + v) * H / 2**20 * (1 if kind else 2)
            cost = {
                name: {"ms": found[kind + name]["ms"], "mib": found[kind + name]["temporary_mib"] + operands}
                for name in LOSSES
                if kind + name in found
            }
            for name, quantity in itertools.product(cost if "proposed" in cost else (), _QUANTITIES):
                row[f"{kind}cost {name} {quantity}"] = cost[name][quantity]
                row[f"{kind}{name} {quantity}"] = cost[name][quantity] / cost["proposed"][quantity]
        rows.append(row)
    return rows


def _line(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    return {row["point"]: row[key] for row in rows if key in row}


def _means(rows: list[dict[str, Any]]) -> str:
    """A row for the paper and for each pair of programs; like for like beside the paper's mean at the same points."""

    def means(key: str, at: list[dict[str, Any]]) -> dict[str, float]:
        values = {quantity: list(_line(at, f"{key} {quantity}").values()) for quantity in _QUANTITIES}
        return {quantity: statistics.geometric_mean(found) for quantity, found in values.items() if found}

    found = [{"what": "the paper, forward, float32 logits", "points": len(rows), **means("paper", rows)}]
    for (kind, what), (name, logits) in itertools.product(_KINDS.items(), _CANONICAL.items()):
        at = [row for row in rows if f"{kind}{name} ms" in row]
        row = {"what": f"here, {what}, {logits}", "points": len(at), **means(kind + name, at)}
        if kind and name == "canonical float32":
            row |= {f"paper_{quantity}": mean for quantity, mean in means("paper", at).items()}
        found.append(row)
    columns = {"canonical / proposed": "{what}", "points": "{points}", "latency": "{ms:.2f}", "memory": "{mib:.2f}"}
    beside = {"the paper's latency at these points": "{paper_ms:.2f}", "the paper's memory": "{paper_mib:.2f}"}
    return table(found, columns | beside)


def _costs(rows: list[dict[str, Any]], kind: str, quantity: str) -> tuple[str, str]:
    """A heading, and a row a point: the paper's numbers and ratio, of the forward, and ours."""
    digits = _QUANTITIES[quantity][1]
    columns = {"N": "{n}", "V": "{v}"}
    if kind:
        columns |= {f"paper: {name}": f"{{there {name} {quantity}:{digits}}}" for name in ("canonical", "proposed")}
        columns["paper: ratio"] = f"{{paper {quantity}:.2f}}"
    columns |= {f"{_CANONICAL.get(name, name)}": f"{{{kind}cost {name} {quantity}:{digits}}}" for name in LOSSES}
    columns |= {f"ratio, {logits}": f"{{{kind}{name} {quantity}:.2f}}" for name, logits in _CANONICAL.items()}
    title = "Forward" if kind else "Forward and backward, which the paper leaves out"
    return f"## {title}: {'ms' if quantity == 'ms' else 'MiB'}", table(rows, columns)
