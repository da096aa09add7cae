"""The run's pictures, drawn from its recorded metrics."""

from pathlib import Path

from experiments.charts import Panel, chart
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
    lines = {
        f"{head}, {kind}": curve(records, kind, head)
        for kind in ("train", "validation")
        for head in dict.fromkeys(record["head"] for record in records)
    }
    steps = [step for line in lines.values() for step in line]
    lines["unigram entropy of the training tokens"] = dict.fromkeys((min(steps), max(steps)), unigram_entropy)
    panel = Panel(lines, "step", "loss (nats per token)", marked=False)
    written = [chart(folder / "loss.png", [panel])]
    if by_step := differences(records):
        panel = Panel({"|fused − canonical|": by_step}, "step", "nats per token", marked=False)
        written.append(chart(folder / "difference.png", [panel]))
    return written
