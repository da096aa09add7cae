"""`gpu_scaling_<GPUs>.json` as a table and a plot; every number in them comes from these files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench.report import table
from experiments.command_line import save_figure, write_atomically

Record = dict[str, Any]


def file_name(gpus: int | str) -> str:
    """The result file of that number of GPUs."""
    return f"gpu_scaling_{gpus}.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """The folder's result files, fewest GPUs first."""
    found = [json.loads(path.read_text()) for path in folder.glob(file_name("*"))]
    return sorted(found, key=lambda document: int(document["records"][0]["gpus"]))


class Target(NamedTuple):
    """A figure of one layout, and its bound.

    Attributes:
        layout: as in `gpu_scaling`.
        figure: of a contender's results.
        bounds: by the number of GPUs.
        least: whether the bound is the least that will do, not the most.
    """

    layout: str
    figure: str
    bounds: dict[int, float]
    least: bool


TARGETS = (
    Target("tensor", "efficiency", {2: 0.97, 4: 0.93}, True),
    Target("data", "efficiency", {2: 0.94, 4: 0.94}, True),
    Target("sequence", "to_tensor", {2: 1.04, 4: 1.04}, False),
)
_MODES = ("in_forward", "recompute")
_COLUMNS = ("ms", "efficiency", "to_tensor", "to_canonical", "inputs_mib", "temporary_mib")


def markdown(documents: list[dict[str, Any]]) -> str:
    """Targets, and all that was measured."""
    records = _records(documents)
    made = [
        f"`{document['command']}`: "
        + ", ".join(f"{name} {document[name]}" for name in ("device", "python", "jax", "date", "n", "v", "h"))
        + "."
        for document in documents
    ]
    parts = ["# The head on several GPUs", *made, "## Targets", _targets(records)]
    rows = [
        [record["layout"], f"{record['gpus']}", name, *(_number(result.get(column)) for column in _COLUMNS)]
        for record in records
        for name, result in record["results"].items()
    ]
    parts += ["## Times and memory of one GPU", table(["layout", "GPUs", "loss", *_COLUMNS], rows)]
    return "\n\n".join(parts) + "\n"


def _records(documents: list[dict[str, Any]]) -> list[Record]:
    return [record for document in documents for record in document["records"]]


def _targets(records: list[Record]) -> str:
    rows = []
    for target in TARGETS:
        for record in records:
            bound = target.bounds.get(record["gpus"])
            if record["layout"] != target.layout or bound is None:
                continue
            for mode in _MODES:
                value = record["results"][mode][target.figure]
                reached = value >= bound if target.least else value <= bound
                what = f"{target.layout} on {record['gpus']}, {mode}: {target.figure}"
                sign = "≥" if target.least else "≤"
                rows.append([what, f"{sign} {bound:g}", f"{value:.3f}", "yes" if reached else "no"])
    return table(["figure", "target", "measured", "reached"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def plot(documents: list[dict[str, Any]], path: Path) -> Path:
    """Efficiency by the number of GPUs, a panel a layout."""
    from matplotlib.figure import Figure

    every = _records(documents)
    layouts = list(dict.fromkeys(record["layout"] for record in every if record["layout"] != "one"))
    figure = Figure(figsize=(4 * len(layouts), 4), layout="constrained")
    for axes, layout in zip(figure.subplots(1, len(layouts), sharey=True, squeeze=False)[0], layouts, strict=True):
        records = [record for record in every if record["layout"] == layout]
        counts = [1, *(record["gpus"] for record in records)]
        for name in records[0]["results"]:
            axes.plot(counts, [1.0, *(record["results"][name]["efficiency"] for record in records)], "o-", label=name)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=layout, xlabel="GPUs", xticks=counts, ylabel="of linear scaling")
        axes.legend()
    return save_figure(figure, path)


def write(folder: Path) -> list[Path]:
    """Makes `gpu_scaling.md` and a plot from the result files in the folder; the files written, none without any."""
    if not (documents := read(folder)):
        return []
    text = folder / "gpu_scaling.md"
    write_atomically(text, markdown(documents))
    return [text, plot(documents, text.with_suffix(".png"))]
