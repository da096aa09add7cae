"""The run's record: one JSON object a line, on disk as soon as it is known.

Every record has `kind`, `head` and `step` (the number of optimiser steps taken); by kind it also has

* `train`: `loss` (mean over the batch's counted labels, before the step), `gradient_norm`, `learning_rate`, `seconds`
  (training time since the start or the resumption, compilation and validation excluded);
* `validation`: `loss`;
* `summary`: the numbers printed at the end; `tokens_per_second` leaves out the first steps of a session, too.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        """Drops what was recorded for `head` after `step`, and its summary: a resumed run records it again."""
        if self.path is None:
            return
        lines = [
            json.dumps(record) + "\n"
            for record in read_records(self.path)
            if record["head"] != head or (record["step"] <= step and record["kind"] != "summary")
        ]
        self._file.close()
        write_atomically(self.path, "".join(lines))
        self._file = self.path.open("a", encoding="utf-8")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file; a last line cut short by a crash is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def curve(records: list[Record], kind: str, head: str) -> dict[int, float]:
    """The loss by step of one head, from its `train` or its `validation` records."""
    return {r["step"]: r["loss"] for r in records if r["kind"] == kind and r["head"] == head}


def differences(records: list[Record]) -> dict[int, float]:
    """|fused − canonical| training loss by step, over the steps that both heads have taken."""
    fused, canonical = (curve(records, "train", head) for head in ("fused", "canonical"))
    return {step: abs(fused[step] - canonical[step]) for step in sorted(fused.keys() & canonical.keys())}
