"""The documentation's tables and figures, from the result files: `python -m experiments.site`.

Reads the result files in `experiments/results/`, and writes `docs/generated/performance.md` and, in
`docs/_static/`, each figure twice, for light and dark pages.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.bench import drawings, programs, report, summary
from experiments.bench.points import SECTIONS
from experiments.bench.results import FOLDER, ResultError
from experiments.command_line import parser_of, write_atomically

DOCS = Path(__file__).parents[1] / "docs"
ROWS = 8192  # of the points that the figure shows
Line = dict[int, float]  # by vocabulary
_STORED = "stored logits (JAX)"
# As the figure names them, and the program in the result files.
_RIVALS = {
    "PyTorch, bfloat16 logits": "torch, bfloat16 logits",
    "torch.compile": "torch.compile",
    "CCE": "CCE",
    "CCE, exact gradients": "CCE, exact gradients",
    "Liger": "Liger",
    "Liger, C 16": "Liger, C 16",
    "Liger CuTe, stored logits": "Liger CuTe, stored logits",
    "Liger CuTe, streamed": "Liger CuTe, streamed",
    "quack": "quack",
}
_OURS = {
    "pallas-ce, in_forward": programs.IN_FORWARD,
    "pallas-ce, recompute": programs.RECOMPUTE,
    _STORED: programs.CANONICAL,
}


def lines(documents: dict[str, dict[str, Any]]) -> tuple[dict[str, Line], dict[str, Line]]:
    """Each contender's time of loss and gradients over three bare products, and its MiB beside the inputs.

    The time is relative to products of the same process, since a GPU's clocks differ between processes. XLA counts
    memory without a program's results, PyTorch with them, so the gradients are added to XLA's.
    """
    time, memory = {}, {}
    grid = _points(documents["grid"])
    for shown, program in _OURS.items():
        time[shown] = {v: point["results"][program]["ratio"] for v, point in grid.items()}
        memory[shown] = {v: point["results"][program]["temporary_mib"] + _gradients(point) for v, point in grid.items()}
    for shown, program in _RIVALS.items():
        for points in (_points(document) for name, document in documents.items() if name.startswith("peers")):
            found = {v: point["results"][program] for v, point in points.items() if program in point["results"]}
            if found:
                time[shown] = {v: result["ratio"] for v, result in found.items()}
                memory[shown] = {v: result["peak_mib"] for v, result in found.items()}
    return time, memory


def _points(document: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Those of the grid that are shown, by vocabulary."""
    return {
        point["v"]: point
        for name, point in document["points"].items()
        if name in SECTIONS["grid"] and point["n"] == ROWS
    }


def _gradients(point: dict[str, Any]) -> float:
    return float((point["n"] + point["v"]) * point["h"] * 2 / 2**20)


def page(folder: Path) -> str:
    """The tables of the performance page, in Markdown, from the result files in the folder."""
    documents = report.load(folder)
    time, memory = lines(documents)
    points = {name: document["points"] for name, document in documents.items()}
    parts = [
        "% Made by `python -m experiments.site`.",
        "## Beside other implementations",
        f"{ROWS} rows, width 4096, bfloat16; by size of the vocabulary. Time over three bare products:",
        _table(time, "{:.2f}"),
        "MiB beside the inputs, gradients included:",
        _table(memory, "{:.0f}"),
        "## On a CPU",
        _cpu(json.loads((folder / "cpu_head.json").read_text())),
        "## Microbatches in flight",
        _pipeline(json.loads((folder / "pipeline_memory.json").read_text())),
        *_models(documents.get(report.MODELS)),
        "## Targets",
        report.targets_table(summary.targets(points)),
        report.devices_line(documents),
        "## Runs",
        report.table(
            ["command", "machine and versions"],
            [
                [
                    f"`{document['command']}`",
                    ", ".join(f"{name} {value}" for name, value in document["machine"].items()),
                ]
                for document in documents.values()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _cpu(document: dict[str, Any]) -> str:
    shape, results = document["shape"], document["results"]
    rows = [[name, f"{r['time_ratio']:.2f}", f"{r['temporary_mib']:.0f}"] for name, r in results.items()]
    return (
        f"`{document['command']}`, {document['processors']} processors, {document['date']}, float32: "
        f"{_shape(shape)}; canonical is stored logits.\n\n"
        + report.table(["loss and gradients", "time / stored logits", "temporary MiB"], rows)
    )


def _pipeline(document: dict[str, Any]) -> str:
    shape, results = document["shape"], document["measured"]
    rows = [[name, f"{r['head_bytes'] / 1e9:.1f}"] for name, r in results.items()]
    return (
        f"`{document['command']}`, {document['device']}, {document['date']}, PyTorch: a head with {shape['in_flight']} "
        f"microbatches in flight, each of {_shape(shape)}.\n\n"
        + report.table(["loss", "GB of the head, measured"], rows)
    )


def _models(document: dict[str, Any] | None) -> list[str]:
    if document is None:
        return []
    left_out = {
        f"{loss} is left out at {name}: {why}."
        for name, point in document["points"].items()
        for loss, why in point.get("left_out", {}).items()
    }
    return [
        "## Hugging Face models",
        "Training steps of Qwen3 with random weights, a vocabulary of 151936, bfloat16 and PyTorch's fused AdamW, in "
        "eager mode, by transformers' own loss (plain), with Liger's kernels and with `patch_causal_lm` (fused). "
        + report.machine_line(document),
        report.models(document["points"]),
        *sorted(left_out),
    ]


def _shape(shape: dict[str, int]) -> str:
    return f"{shape['tokens']} rows, width {shape['width']}, vocabulary {shape['vocabulary']}"


def _table(found: dict[str, Line], form: str) -> str:
    sizes = sorted({v for line in found.values() for v in line})
    rows = [[name, *(form.format(line[v]) if v in line else "–" for v in sizes)] for name, line in found.items()]
    return report.table(["", *map(str, sizes)], rows)


def write(folder: Path, docs: Path) -> list[Path]:
    """Writes tables and figures; the files written."""
    documents = report.load(folder)
    time, memory = lines(documents)
    device = documents["grid"]["machine"]["device"]
    figures: dict[str, Callable[[], Any]] = {
        "rivals": lambda: drawings.rivals(time, memory, f"{device}, {ROWS} rows of width 4096, bfloat16"),
        "statistics": drawings.statistics,
        "modes": drawings.modes,
    }
    written = [docs / "generated" / "performance.md"]
    write_atomically(written[0], page(folder))
    for name, draw in figures.items():
        for theme in drawings.THEMES:
            written.append(docs / "_static" / f"{name}-{theme}.svg")
            write_atomically(written[-1], drawings.svg(draw, theme))
    return written


def main(words: Sequence[str] | None = None) -> int:
    """Writes tables and figures; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where result files are")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the pages are")
    options = parser.parse_args(words)
    try:
        print("\n".join(map(str, write(options.folder, options.docs))))
    except (ResultError, OSError, KeyError) as error:
        print(f"{options.folder} lacks results: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
