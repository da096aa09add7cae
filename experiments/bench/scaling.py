"""`gpu_scaling_<GPUs>.json` as a table and a plot; every number in them comes from these files."""

import json
from pathlib import Path
from typing import Any

from experiments.bench.report import table, targets_table
from experiments.bench.summary import Target
from experiments.command_line import save_figure, write_atomically


def file_name(gpus: int | str) -> str:
    """The result file of that number of GPUs."""
    return f"gpu_scaling_{gpus}.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """The folder's result files, fewest GPUs first."""
    found = [json.loads(path.read_text()) for path in folder.glob(file_name("*"))]
    return sorted(found, key=lambda document: int(document["records"][0]["gpus"]))


# By layout, the least efficiency that will do on each number of GPUs.
_ASKED = {"tensor": {2: 0.98, 4: 0.96}, "data": {2: 0.96, 4: 0.96}, "sequence": {2: 0.96, 4: 0.96}}
_MODES = ("in_forward", "recompute")
_COLUMNS = ("ms", "efficiency", "to_tensor", "to_canonical", "inputs_mib", "temporary_mib")


def markdown(documents: list[dict[str, Any]]) -> str:
    """Targets, and all that was measured."""
    records = [record for document in documents for record in document["records"]]
    facts = ("device", "python", "jax", "date", "n", "v", "h")
    made = [f"`{d['command']}`: {', '.join(f'{name} {d[name]}' for name in facts)}." for d in documents]
    targets = targets_table(_targets(records), ".3f")
    parts = ["# The head on several GPUs", *made, "## Targets", targets, "## Times and memory of one GPU"]
    rows = [
        [record["layout"], f"{record['gpus']}", loss, *(f"{found[k]:.4g}" if k in found else "" for k in _COLUMNS)]
        for record in records
        for loss, found in record["results"].items()
    ]
    return "\n\n".join([*parts, table(["layout", "GPUs", "loss", *_COLUMNS], rows)]) + "\n"


def _targets(records: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            f"{layout} on {record['gpus']}, {mode}: efficiency",
            bounds[record["gpus"]],
            record["results"][mode]["efficiency"],
            at_least=True,
        )
        for layout, bounds in _ASKED.items()
        for record in records
        if record["layout"] == layout and record["gpus"] in bounds
        for mode in _MODES
    ]


def plot(documents: list[dict[str, Any]], path: Path) -> Path:
    """Efficiency by the number of GPUs, a panel a layout."""
    from matplotlib.figure import Figure

    every = [record for document in documents for record in document["records"]]
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
