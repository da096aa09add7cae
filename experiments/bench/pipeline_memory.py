"""Memory of a pipeline's last stage: `python -m experiments.bench pipeline_memory`.

Stored logits, a chunked loss on them, and `PipelineFusedLoss` (`take_head`).

A GPipe schedule's last stage: the head and loss of every microbatch forward, then every one backward. The case is
Qwen3-1.7B's head (H 2048, V 151936, bfloat16), 1 x 4096 tokens a microbatch, 4 in flight.

Each contender runs in a process of its own: microbatches arrive as they would from the stage before, and their
gradients are made, but nothing is sent; the stage has no other layers, and no optimiser. Peaks are the driver's count,
of both frameworks' pools and with what pools round up; beside them stands the sum of both allocators' own peaks.
"""

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.bench.processes import apart
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.torch_timing import used_bytes, used_peaks
from torch_bridge import take_head

SHAPE = {"tokens": 4096, "width": 2048, "vocabulary": 151_936, "in_flight": 4}
CHUNK = 1024

_WARM_UP = {"tokens": 128, "width": 128, "vocabulary": 1024, "in_flight": 1}


def stored_logits(logits: Tensor, target: Tensor) -> Tensor:
    """The usual loss: logits as float32, then cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


def chunked(logits: Tensor, target: Tensor) -> Tensor:
    """The same by chunks of tokens, each converted to float32 when it is needed and again in the backward."""

    def part(rows: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(rows.float(), labels, reduction="sum")

    rows, labels = logits.flatten(0, -2).split(CHUNK), target.flatten().split(CHUNK)
    parts = [checkpoint(part, r, t, use_reentrant=False) for r, t in zip(rows, labels, strict=True)]
    return torch.stack(parts).sum() / target.numel()


def run_stage(name: str, shape: dict[str, int], device: str, implementation: str | None = None) -> None:
    """Forward of every microbatch, then backward of every one, as GPipe does it."""
    head = nn.Linear(shape["width"], shape["vocabulary"], bias=False, device=device, dtype=torch.bfloat16)
    model = nn.Sequential(head)
    losses: dict[str, Callable[..., Tensor]] = {"logits": stored_logits, "chunked": chunked}
    loss_fn = losses.get(name) or take_head(model, "0", implementation=implementation)
    waiting = []
    for _ in range(shape["in_flight"]):
        hidden = torch.empty(1, shape["tokens"], shape["width"], device=device, dtype=torch.bfloat16).normal_()
        target = torch.zeros(1, shape["tokens"], device=device, dtype=torch.int64)
        output = model(hidden.requires_grad_())
        # The schedule keeps the output until its microbatch's backward is over.
        waiting.append((output, loss_fn(output, target)))
    while waiting:
        output, loss = waiting.pop(0)
        loss.backward()
        del output, loss


def measured(name: str, shape: dict[str, int], device: str, implementation: str | None) -> Record:
    """A contender's bytes at its peak, by the driver's count and by both allocators' own; in a fresh process."""
    run_stage(name, _WARM_UP, device, implementation)  # starts both frameworks, whose own memory is not the stage's
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = used_bytes(device)
    driver, allocated = used_peaks(device, lambda: run_stage(name, shape, device, implementation))
    found = {"measured_gb": 1e-9 * (driver - before), "allocators_gb": 1e-9 * allocated}
    return {"results": {name: found}}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """A point a contender."""
    implementation = None if options.dry_run else "mosaic_gpu"
    shape = _WARM_UP if options.dry_run else SHAPE
    given = shape, options.device, implementation
    points = [Point(name, functools.partial(apart, measured, name, *given)) for name in ("logits", "chunked", "fused")]
    facts = {"torch": torch.__version__, "implementation": implementation, **shape}
    return [ResultFile("pipeline_memory", points, "pipeline_memory", facts)]
