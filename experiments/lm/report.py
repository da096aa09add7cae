"""What is printed at the end of a run."""

import math
from pathlib import Path

from experiments.lm import memory
from experiments.lm.loop import Result
from experiments.lm.metrics import Record, differences
from experiments.lm.packing import Dataset
from experiments.lm.program import Program


def summary(program: Program, result: Result, dataset: Dataset) -> dict[str, float]:
    """The numbers of one head's training, as recorded in `metrics.jsonl`."""
    numbers = {
        "validation_loss": result.validation_loss,
        "unigram_entropy": dataset.unigram_entropy,
        "parameters": program.parameters,
        "tokens_per_second": result.tokens_per_second,
        "peak_bytes": result.peak_bytes,
        "step_temporary_bytes": program.step_temporary_bytes,
        "compile_seconds": program.compile_seconds,
    }
    # JSON has no NaN, which stands for the speed of a session that had nothing left to train.
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def report(records: list[Record], backend: str, run: Path) -> str:
    """The closing lines, from the run's recorded metrics."""
    summaries = [record for record in records if record["kind"] == "summary"]
    entropy = summaries[0]["unigram_entropy"]
    lines = [
        f"unigram entropy of the training tokens: {entropy:.3f} nats per token",
        f"parameters: {summaries[0]['parameters']:,}",
    ]
    whose = "the process, so far" if backend == "cpu" else "the device, so far"
    for record in summaries:
        comparison = "below" if record["validation_loss"] < entropy else "NOT below"
        speed = f"{record['tokens_per_second']:,.0f} tokens/s, " if "tokens_per_second" in record else ""
        lines.append(
            f"{record['head']}: final validation loss {record['validation_loss']:.3f} nats per token "
            f"({comparison} the unigram entropy), {speed}"
            f"{memory.as_text(record['step_temporary_bytes'])} of temporaries in a step, "
            f"peak memory of {whose} {memory.as_text(record['peak_bytes'])}"
        )
    by_step = differences(records)
    if by_step:
        worst = max(by_step, key=lambda step: by_step[step])
        lines.append(
            f"largest |fused − canonical| training loss over {len(by_step)} steps: {by_step[worst]:.2e} (step {worst})"
        )
    lines.append(f"files: {run}")
    return "\n".join(lines)
