"""What is printed at the end of a run."""

from pathlib import Path

from experiments.lm.run import memory
from experiments.lm.run.metrics import Record, differences


def report(records: list[Record], backend: str, run: Path) -> str:
    """The closing table, a column a head, from the run's recorded metrics."""
    summaries = [record for record in records if record["kind"] == "summary"]
    entropy = summaries[0]["unigram_entropy"]
    below = all(record["validation_loss"] < entropy for record in summaries)
    # Where two heads were trained, the second peak includes the first.
    peak = "peak memory of the process so far" if backend == "cpu" else "peak memory of the device so far"
    rows = [
        ("", [record["head"] for record in summaries]),
        ("final validation loss (nats per token)", [f"{record['validation_loss']:.4f}" for record in summaries]),
        ("training tokens per second", [_speed(record) for record in summaries]),
        ("temporaries of a training step", [memory.as_text(record["step_temporary_bytes"]) for record in summaries]),
        (peak, [memory.as_text(record["peak_bytes"]) for record in summaries]),
    ]
    lines = [f"{name:40}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows]
    by_step = differences(records)
    if by_step:
        worst = max(by_step, key=lambda step: by_step[step])
        lines.append(
            f"largest |fused − canonical| training loss over {len(by_step)} steps: {by_step[worst]:.1e} (step {worst})"
        )
    lines += [
        f"unigram entropy of the training tokens: {entropy:.4f} nats per token; "
        f"the validation loss is {'below' if below else 'NOT below'} it",
        f"parameters: {summaries[0]['parameters']:,}",
        f"files: {run}",
    ]
    return "\n".join(lines)


def _speed(record: Record) -> str:
    return f"{record['tokens_per_second']:,.0f}" if "tokens_per_second" in record else "–"
