"""Result files as markdown tables and plots; every number in them comes from a file."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench import ladder, programs, summary
from experiments.bench.results import read
from experiments.command_line import save_figure, write_atomically

SECTIONS = (
    *("grid", "heads", "options", "masked", "compile"),
    *("triton", "pointers", "ampere", "implementations", "targets", "float32", "low_rank", "microbatches"),
)
LOSSES = ("log_probs", "top_k", "given")
TORCH = "torch_gpu"
TRAINING = "train_speed"
MODELS = "huggingface_table"
_TITLES = {TORCH: "PyTorch", TRAINING: "Training", MODELS: "Hugging Face models"}
_PLOTTED = (programs.FORWARD, programs.IN_FORWARD, programs.RECOMPUTE, programs.CANONICAL)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents found in the folder, by section; those of further losses and of peers among them."""
    files = {name: folder / f"gpu_head_{name}.json" for name in SECTIONS}
    files |= {name: folder / f"gpu_losses_{name}.json" for name in LOSSES}
    files |= {path.stem: path for path in sorted(folder.glob("peers*.json"))}
    files |= {name: folder / f"{name}.json" for name in (TORCH, TRAINING, MODELS)}
    return {name: read(path) for name, path in files.items() if path.exists()}


def markdown(documents: dict[str, dict[str, Any]], steps: list[ladder.Step]) -> str:
    """All tables."""
    sections = {name: document["points"] for name, document in documents.items()}
    parts = ["# The head on a GPU", "Made from the result files by `python -m experiments.gpu_report`."]
    parts += ["## Targets", targets_table(summary.targets(sections)), devices_line(documents)]
    for name, document in documents.items():
        shown = {TORCH: _torch, TRAINING: _training, MODELS: models}.get(name, _section)(document["points"])
        parts += [f"## {_TITLES.get(name, name.replace('_', ' ').capitalize())}", machine_line(document), shown]
        left_out = {f"{p}: {r}" for point in document["points"].values() for p, r in point.get("left_out", {}).items()}
        parts += [f"Left out: {line}." for line in sorted(left_out)]
    if steps:
        parts += ["## Versions tried", table(*ladder.table(steps))]
    return "\n\n".join(parts) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def targets_table(targets: list[summary.Target], digits: str = ".4g") -> str:
    """Each target beside what was measured."""
    return table(["figure", "target", "measured", "reached"], [target.row(digits) for target in targets])


def devices_line(documents: Mapping[str, Any]) -> str:
    """The device that most sections were measured on, and those of others."""
    devices = {name: document["machine"]["device"] for name, document in documents.items()}
    most = statistics.mode(devices.values())
    others = (f"; {name.replace('_', ' ')}: {device}" for name, device in devices.items() if device != most)
    return f"Device: {most}{''.join(others)}."


def machine_line(document: Mapping[str, Any]) -> str:
    """How a result file was made, and on what."""
    facts = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    return f"`{document['command']}`: {facts}."


def _section(points: dict[str, Any]) -> str:
    """A row a point: milliseconds, the ratio in brackets, temporary memory."""
    names = list(dict.fromkeys(name for point in points.values() for name in point["results"]))
    rows = [
        [point_name, f"{point['n']}", f"{point['v']}", f"{point.get('h', '')}"]
        + [_cell(point["results"][name]) if name in point["results"] else "" for name in names]
        for point_name, point in points.items()
    ]
    return table(["point", "N", "V", "H", *names], rows)


def _torch(points: dict[str, Any]) -> str:
    """A row a point: what it comes to, and each caller's microseconds, milliseconds, MiB or share of a copy's rate."""
    rows = []
    for name, point in points.items():
        callers = ", ".join(
            f"{caller} " + ", ".join(f"{number:.4g} {unit}" for unit, number in result.items() if unit != "samples")
            for caller, result in point["results"].items()
        )
        beyond = "; ".join(f"{call} {us:.0f} us beyond JAX's" for call, us in point.get("overhead_us", {}).items())
        told = f"{point['ratio']:.3f} of {summary.RATIOS[name.split()[0]][1]}" if "ratio" in point else beyond
        rows.append([name, told, callers])
    return table(["point", "bridge", "callers"], rows)


def _training(points: dict[str, Any]) -> str:
    """A row a loop and head: milliseconds of a step in the loop and launched back to back, its speed, a start."""
    rows = []
    for name, point in points.items():
        for head, found in point["results"].items():
            numbers = found["loop"]["ms"], found["step"]["ms"], found["tokens_per_second"]
            start = [
                f"{s['compile_seconds']:.1f} ({s['backend_seconds']:.1f})" for s in found.get("start", {}).values()
            ]
            loop = summary.TRAINING_LOOPS[name]
            rows.append([loop, head, f"{found['ratio']:.3f}", *(f"{number:,.1f}" for number in numbers)])
            rows[-1] += start or ["", ""]
    compiling = "seconds to compile (in the backend)", "with kept programs"
    return table(["loop", "head", "ratio", "loop, ms", "step, ms", "tokens/s", *compiling], rows)


def models(points: dict[str, Any]) -> str:
    """A row for each size and loss: a training step's time, memory, and the first step's; JAX's own memory below."""
    rows, below = [], []
    for name, point in points.items():
        if "results" not in point:
            below.append(f"{name}: {point['mib']:.0f} MiB by the driver's count.")
            continue
        for variant, found in point["results"].items():
            first = found["first_step_seconds"]
            memory = found["torch_peak_mib"], found["driver_mib"]
            rows.append(
                [name, variant, f"{found['ms']:.1f}", *(f"{mib:.0f}" for mib in memory)]
                + [f"{first[when]:.1f}" for when in ("before", "after")]
            )
    header = [
        "model",
        "loss",
        "ms a step",
        "PyTorch's peak MiB",
        "driver's MiB",
        "first step, s",
        "with kept programs, s",
    ]
    return "\n\n".join([table(header, rows), *below])


def _cell(result: dict[str, Any]) -> str:
    if "compile_seconds" in result:
        return f"{result['compile_seconds']:.2f} s, {result['untuned_seconds']:.2f} s without autotuning"
    ratio = f" ({result['ratio']:.3f})" if "ratio" in result else ""
    if "share" in result:
        ratio = f" ({result['share']:.2f} of a copy's rate)"
    memory = result.get("temporary_mib", result.get("peak_mib", 0.0))
    return f"{result['ms']:.3f} ms{ratio}, {memory:.0f} MiB"


def plots(documents: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Ratios over grid and heads; the files written."""
    written = []
    for section in ("grid", "heads"):
        if section in documents and documents[section]["points"]:
            written.append(_plot_ratios(documents[section], folder / f"gpu_head_{section}.png"))
    return written


def _plot_ratios(document: dict[str, Any], path: Path) -> Path:
    from matplotlib.figure import Figure

    points = document["points"]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for program in _PLOTTED:
        found = summary.ratios(points, program)
        axes.plot(list(found), list(found.values()), "o-", label=program)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="time / bare product, or / three products", title=document["machine"].get("device", ""))
    axes.tick_params(axis="x", rotation=60)
    axes.legend()
    return save_figure(figure, path)


def write(folder: Path) -> list[Path]:
    """Makes `gpu_report.md` and the plots from the result files in the folder; the files written, none without results.

    Raises:
        ResultError: a result file cannot be read.
    """
    documents = load(folder)
    if not documents:
        return []
    report = folder / "gpu_report.md"
    write_atomically(report, markdown(documents, ladder.load(folder / ladder.FILE)))
    return [report, *plots(documents, folder)]
