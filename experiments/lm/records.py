"""The run's record: one JSON object a line, on disk as soon as it is known; and its plots and report.

Every record has `kind`, `head` and `step` (the number of optimiser steps taken); by kind it also has

* `train`: `loss` (mean over the batch's counted labels, before the step), `gradient_norm`, `learning_rate`, `seconds`
  (training time since the start or the resumption, compilation and validation excluded);
* `validation`: `loss`;
* `summary`: the numbers printed at the end; `tokens_per_second` leaves out the first steps of a session, too.
"""

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.charts import Panel, chart
from experiments.files import write_atomically

Record = dict[str, Any]


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """An append-only file of records; use it in a `with` statement. Without a path nothing is recorded."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = (path or Path(os.devnull)).open("a", encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, kind: str, head: str, step: int, **numbers: float) -> None:
        """Appends a record and hands it to the operating system."""
        self._file.write(json.dumps({"kind": kind, "head": head, "step": step, **numbers}) + "\n")
        self._file.flush()

    def rewind(self, head: str, step: int) -> None:
        """Drops what was recorded for `head` after `step`: a resumed run records it again."""
        if self.path is None:
            return
        kept = [r for r in read_records(self.path) if r["head"] != head or r["step"] <= step]
        self._file.close()
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self.path.open("a", encoding="utf-8")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; a last line cut short by a crash is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def curve(records: list[Record], kind: str, head: str) -> dict[int, float]:
    """The loss by step of one head, from its `train` or its `validation` records."""
    return {r["step"]: r["loss"] for r in records if r["kind"] == kind and r["head"] == head}


def differences(records: list[Record]) -> dict[int, float]:
    """|fused − canonical| training loss by step, over the steps that both heads have taken."""
    fused, canonical = (curve(records, "train", head) for head in ("fused", "canonical"))
    return {step: abs(fused[step] - canonical[step]) for step in sorted(fused.keys() & canonical.keys())}


def peak_bytes() -> int:
    """Peak bytes in use on the accelerator, or, on a CPU, the peak resident set of the process."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def as_text(count: float) -> str:
    """A byte count in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def plot(records: list[Record], folder: Path) -> None:
    """Draws `loss.png` and, where both heads were trained, `difference.png`."""
    heads = dict.fromkeys(record["head"] for record in records)
    lines = {f"{head}, {kind}": curve(records, kind, head) for kind in ("train", "validation") for head in heads}
    level = next(record["unigram_entropy"] for record in records if record["kind"] == "summary")
    steps = [step for line in lines.values() for step in line]
    lines["unigram entropy of the training tokens"] = dict.fromkeys((min(steps), max(steps)), level)
    chart(folder / "loss.png", [Panel(lines, "step", "loss (nats per token)", marked=False)])
    if by_step := differences(records):
        lines = {"|fused − canonical|": by_step}
        chart(folder / "difference.png", [Panel(lines, "step", "nats per token", marked=False)])


def report(records: list[Record], run: Path) -> str:
    """The text printed when a run ends."""
    summaries = [record for record in records if record["kind"] == "summary"]
    lines = [
        f"{record['head']}: validation loss {record['validation_loss']:.4f} nats per token, "
        f"{record.get('tokens_per_second', 0):,.0f} training tokens per second, {record['parameters']:,} parameters, "
        f"{as_text(record['step_temporary_bytes'])} of temporaries in a step, peak memory so far "
        f"{as_text(record['peak_bytes'])}"
        for record in summaries
    ]
    if by_step := differences(records):
        worst = max(by_step, key=lambda step: by_step[step])
        lines.append(
            f"largest |fused − canonical| training loss over {len(by_step)} steps: {by_step[worst]:.1e} (step {worst})"
        )
    entropy = summaries[0]["unigram_entropy"]
    below = all(record["validation_loss"] < entropy for record in summaries)
    lines.append(
        f"unigram entropy of the training tokens: {entropy:.4f} nats per token; "
        f"the validation loss is {'below' if below else 'NOT below'} it"
    )
    return "\n".join([*lines, f"files: {run}"])
