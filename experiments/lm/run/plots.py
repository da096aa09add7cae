"""The run's pictures, drawn from its recorded metrics."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.command_line import save_figure
from experiments.lm.run.metrics import Record, curve, differences


def write_plots(records: list[Record], unigram_entropy: float, folder: Path) -> list[Path]:
    """Draws `loss.png` and, where both heads were trained, `difference.png`.

    Args:
        records: everything in the run's `metrics.jsonl`.
        unigram_entropy: drawn as the level that a model ignoring context could reach, nats a token.
        folder: where the pictures go; an existing one is replaced.

    Returns:
        The files written.
    """
    written = [save_figure(_loss_figure(records, unigram_entropy), folder / "loss.png")]
    by_step = differences(records)
    if by_step:
        written.append(save_figure(_difference_figure(by_step), folder / "difference.png"))
    return written


def _loss_figure(records: list[Record], unigram_entropy: float) -> Figure:
    figure, axes = _axes("loss (nats per token)")
    # Two curves that agree hide each other: the second is drawn dashed on top of the first.
    styles = (("fused", "tab:blue", "-"), ("logits", "tab:green", "-"), ("canonical", "tab:orange", "--"))
    for head, colour, dashes in styles:
        for kind, name, form in (("train", "training", dashes), ("validation", "validation", f"o{dashes}")):
            if by_step := curve(records, kind, head):
                label, width = f"{head}, {name}", 1 if kind == "train" else None
                axes.plot(list(by_step), list(by_step.values()), form, color=colour, linewidth=width, label=label)
    axes.axhline(unigram_entropy, color="grey", linestyle=":", label="unigram entropy of the training tokens")
    axes.legend()
    return figure


def _difference_figure(by_step: dict[int, float]) -> Figure:
    figure, axes = _axes("|fused − canonical| (nats per token)")
    axes.plot(list(by_step), list(by_step.values()), color="tab:purple", linewidth=1)
    # Exactly equal losses are common in the first steps, and a logarithm has no place for them.
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_ylim(bottom=0)
    return figure


def _axes(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    return figure, axes
