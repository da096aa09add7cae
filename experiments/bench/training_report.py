"""Trainings with our losses and without, side by side: tables and a plot from `training_evidence.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench.report import machine_line, table
from experiments.bench.results import DRY, read
from experiments.command_line import save_figure, write_atomically

NAME = "training_evidence"

# By family, the variant with our loss and the one without.
FAMILIES = {"train_lm": ("fused", "canonical"), "Hugging Face": ("fused", "plain"), "TRL": ("fused", "plain")}
LARGEST = ", largest batch"

_ABSENT = "–"
_NOTES = """\
Losses are in nats a token. Time is the median of the steps behind the first three. Peak memory is the framework's own
count of one process that trains and nothing else: JAX's for train_lm, PyTorch's for the others, with JAX's beside it.
The driver's count has both frameworks' pools, which keep what they have once taken. Planned temporaries are what XLA's
compiled step takes beside its state and its batch. TRL's plain loss is that of the fused head that TRL itself puts in
the place of a model's forward."""


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, int, float]:
    """The largest difference of two trainings' losses, its step from 1, and that of their validation losses."""
    by_step = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    largest = max(by_step)
    return largest, 1 + by_step.index(largest), abs(ours["validation_loss"] - theirs["validation_loss"])


def markdown(document: Mapping[str, Any]) -> str:
    """The report of a result file."""
    points = document["points"]
    parts = ["# Trainings", "Made from the result file by `python -m experiments.training_evidence --report`."]
    if document["machine"].get(DRY):
        parts.append("**DRY RUN: models, vocabulary and steps were shrunk. These are not the published measurements.**")
    parts.append(machine_line(document))
    names = [f"{family}, {variant}" for family, variants in FAMILIES.items() for variant in variants]
    wanted = [*names, *(name + LARGEST for name in names if not name.startswith("TRL"))]
    if lacking := [name for name in wanted if name not in points]:
        parts.append(f"Not measured: {'; '.join(lacking)}. `python -m experiments.{NAME}` goes on.")
    trained = {name: points[name] for name in names if name in points}
    reached = {(point["tokenizer_entries"], point["vocabulary"]) for point in trained.values()}
    parts += [
        f"The text supports {entries:,} entries, which are the labels there are; the head has {vocabulary:,}."
        for entries, vocabulary in sorted(reached)
        if entries < vocabulary
    ]
    parts += [_NOTES, "## Steps", _trainings(trained), "## How far apart", _apart(points)]
    parts += ["## The largest batch that fits", _largest(points)]
    return "\n\n".join(parts) + "\n"


def _trainings(trained: Mapping[str, Any]) -> str:
    rows = []
    for name, point in trained.items():
        sizes = [f"{point['parameters']:,}", f"{point['batch']} × {point['sequence']}", str(len(point["losses"]))]
        losses = [point["losses"][0], point["losses"][-1], point["validation_loss"]]
        memory = [point.get(key) for key in ("peak_mib", "jax_peak_mib", "driver_mib", "step_temporary_mib")]
        cells = [_ABSENT if mib is None else f"{mib:.0f}" for mib in memory]
        rows.append([name, *sizes, *(f"{loss:.4f}" for loss in losses), f"{point['ms']:.1f}", *cells])
    header = ["training", "parameters", "rows × tokens", "steps", "first loss", "last loss", "validation", "ms a step"]
    return table([*header, "peak MiB", "JAX's peak beside it", "driver's MiB", "planned temporaries, MiB"], rows)


def _apart(points: Mapping[str, Any]) -> str:
    rows = []
    for family, variants in FAMILIES.items():
        ours, theirs = (points.get(f"{family}, {variant}") for variant in variants)
        if ours is not None and theirs is not None:
            largest, step, validation = differences(ours, theirs)
            ratios = (ours[key] / theirs[key] for key in ("ms", "peak_mib"))
            figures = [f"{largest:.2e}", str(step), f"{validation:.2e}", *(f"{ratio:.3f}" for ratio in ratios)]
            rows.append([f"{family}, {' and '.join(variants)}", *figures])
    header = ["trainings", "largest difference of a step's losses", "at step", "difference of the validation losses"]
    return table([*header, "ratio of times", "ratio of peaks"], rows)


def _largest(points: Mapping[str, Any]) -> str:
    rows = []
    for name, point in points.items():
        if name.endswith(LARGEST):
            tokens = point["batch"] * point["sequence"]
            tried = point.get("planned_mib") or point["used_mib"]
            trials = ", ".join(f"{batch}: {_ABSENT if mib is None else f'{mib:.0f}'}" for batch, mib in tried.items())
            speed = f"{1e3 * tokens / point['ms']:,.0f}"
            cells = [f"{point['batch']} × {point['sequence']}", f"{tokens:,}", speed, f"{point['limit_mib']:.0f}"]
            rows.append([name.removesuffix(LARGEST), *cells, trials])
    header = ["training", "rows × tokens", "tokens", "tokens a second", "MiB there are"]
    return table([*header, f"MiB by rows tried ({_ABSENT}: memory ran out)"], rows)


def plot(document: Mapping[str, Any], path: Path) -> Path:
    """A panel a family: the loss of every step."""
    from matplotlib.figure import Figure

    machine = document["machine"]
    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, (family, variants) in zip(figure.subplots(1, len(FAMILIES)), FAMILIES.items(), strict=True):
        # Two curves that agree hide each other: the second is drawn dashed on top of the first.
        for variant, dashes in zip(variants, ("-", "--"), strict=True):
            if point := document["points"].get(f"{family}, {variant}"):
                losses = point["losses"]
                axes.plot(range(1, len(losses) + 1), losses, dashes, linewidth=1, label=variant)
                axes.legend()
        axes.set(title=family, xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{machine.get('device')}{', DRY RUN' if machine.get(DRY) else ''}", fontsize=10)
    return save_figure(figure, path)


def write(folder: Path) -> list[Path]:
    """Makes `training_evidence.md` and `.png` from the folder's result file; the files written.

    Raises:
        ResultError: the result file is missing or cannot be read.
    """
    path = folder / f"{NAME}.json"
    document = read(path)
    report = path.with_suffix(".md")
    write_atomically(report, markdown(document))
    return [report, plot(document, path.with_suffix(".png"))]
