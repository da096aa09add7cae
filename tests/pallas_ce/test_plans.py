"""Block sizes as `plans.csv` has them: a change may only take less.

A cell is `rows/columns/bytes`. "whole" follows where products have no memory for parts, and "slower" where the other
mode is faster. The cell is "-" where the way does not serve the problem. `python -m tests.pallas_ce.test_plans` writes
the file anew.
"""

import csv
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh
from ml_dtypes import bfloat16

from pallas_ce.backends import select
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import HeadSpec
from pallas_ce.modes.fold import Streams
from pallas_ce.modes.how import How, WeightSum
from pallas_ce.streaming.gradient_products import NO_GRADIENT

FILE = Path(__file__).with_name("plans.csv")


class Problem(NamedTuple):
    """Rows and a head, and what the caller says of memory."""

    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: Any = bfloat16
    padding: int = 0
    axis: int = 0
    rank: int = 0
    scratch_bytes: int | None = None
    given: bool = False

    @property
    def spec(self) -> HeadSpec:
        rows = self.vocab_size + self.padding
        return HeadSpec(
            self.hidden_size, rows, self.vocab_size, self.axis, np.dtype(self.dtype), softcap=None, rank=self.rank
        )


PROBLEMS = {
    "small": Problem(5, 64, 500, padding=12),
    "ragged": Problem(520, 512, 1000, rank=8, scratch_bytes=2**21),
    "few rows": Problem(300, 1024, 32768, scratch_bytes=2**22),
    "GPT-2": Problem(8191, 768, 50257, padding=47, axis=1),
    "Mistral": Problem(1000, 4096, 32000, axis=1, scratch_bytes=2**24),
    "4096 x 32768": Problem(4096, 1024, 32768),
    "float64": Problem(4096, 1024, 32768, np.float64),
    "8192 x 131072": Problem(8192, 4096, 131072),
    "given sum": Problem(8192, 4096, 131072, given=True),
    "float32": Problem(8192, 4096, 131072, np.float32),
    "low rank": Problem(8192, 4096, 131072, rank=16),
    "Llama in 64 MiB": Problem(8192, 4096, 128256, scratch_bytes=2**26),
    "float16": Problem(8192, 2880, 201088, np.float16),
    "Qwen": Problem(32768, 2048, 151936),
    "16384 x 262144": Problem(16384, 4096, 262144),
    "many rows": Problem(100_000, 2048, 128256),
    "many rows in 1 GiB": Problem(65536, 5120, 131072, scratch_bytes=2**30),
    "wide float32 in 64 MiB": Problem(2048, 8192, 131072, np.float32, scratch_bytes=2**26),
}


class Way(NamedTuple):
    """A backend, a device and a task."""

    backend: str
    device: str
    task: str


WAYS = [
    *(Way("mosaic_gpu", "H200", task) for task in ("forward", "in_forward", "recompute", "top_k")),
    Way("mosaic_gpu", "H20", "recompute"),
    *(Way("triton", "H200", task) for task in ("forward", "in_forward", "recompute")),
    *(Way("triton", "A100", task) for task in ("forward", "recompute")),
    *(Way("xla", device, task) for device in ("H200", "cpu") for task in ("forward", "in_forward", "recompute")),
    *(Way("xla", "tpu", task) for task in ("in_forward", "recompute")),
    Way("xla", "cpu", "top_k"),
    Way("xla", "H200", "pair"),
]
MULTIPROCESSORS = {"H200": 132, "H20": 78, "A100": 108}


def _mode(way: Way) -> Any:
    return way.task if way.task in ("in_forward", "recompute") else None


def _on(way: Way) -> Any:
    known = way.device in MULTIPROCESSORS
    kind, platform = (f"NVIDIA {way.device}", "cuda") if known else (way.device, way.device)
    device = AbstractDevice(kind, MULTIPROCESSORS.get(way.device, 1), platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def planned(way: Way, problem: Problem) -> Plan | None:
    spec, mode, bound = problem.spec, _mode(way), problem.scratch_bytes
    with _on(way):
        backend = select.load(way.backend)
        if backend.refusal(spec) is not None:
            return None
        try:
            if way.task == "top_k" and backend.top_k is not None:
                return backend.top_k(spec, 50, bound).block_sizes(problem.tokens)
            if way.task == "top_k":
                return Streams((spec,), bound, 4, 50).block_sizes(problem.tokens)
            if way.task == "pair":
                teacher = dataclasses.replace(spec, hidden_size=2 * spec.hidden_size)
                return Streams((spec, teacher), bound, 5).block_sizes(problem.tokens, "recompute")
            settings, total = How(way.backend, mode, bound), WeightSum()
            if mode == "in_forward":
                needs = NO_GRADIENT._replace(hidden=True, weight=True)
                total = settings.weight_sum(spec, spec.dtype, needs, given=problem.given)
            return settings.block_sizes(spec, problem.tokens, mode, total)
        except ValueError:  # the budget cannot hold one row
            return None


def _cell(plan: Plan | None) -> str:
    if plan is None:
        return "-"
    notes = (" whole" if not plan.splits else "") + (" slower" if plan.slower else "")
    return f"{plan.rows}/{plan.columns}/{plan.scratch_bytes}{notes}"


def table() -> dict[str, dict[str, str]]:
    return {name: {" ".join(way): _cell(planned(way, problem)) for way in WAYS} for name, problem in PROBLEMS.items()}


def recorded() -> dict[str, dict[str, str]]:
    with FILE.open(encoding="utf-8") as file:
        return {line.pop("problem"): line for line in csv.DictReader(file)}


def test_plans_are_the_recorded_ones() -> None:
    before = recorded()
    changes = [
        f"{name}, {way}: {before[name][way]} -> {cell}"
        for name, line in table().items()
        for way, cell in line.items()
        if cell != before[name][way]
    ]
    assert not changes, "where each takes no more bytes and no more time, `python -m tests.pallas_ce.test_plans`"


if __name__ == "__main__":
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["problem", *map(" ".join, WAYS)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"problem": name} | line for name, line in table().items())
