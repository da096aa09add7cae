"""Memory of a pipeline's last stage: `python -m experiments.bench pipeline_memory`.

Stored logits, a chunked loss on them, and `PipelineFusedLoss` (`take_head`).

A GPipe schedule's last stage: the head and loss of every microbatch forward, then every one backward. The case is
Qwen3-1.7B's head (H 2048, V 151936, bfloat16), 1 x 4096 tokens a microbatch, 4 in flight.

Counting runs PyTorch's own operators and autograd on tensors without memory, and follows each storage from its making
to its end; what the fused operator uses inside, as `pallas_ce.explain` predicts it, is added while it runs. The weight
and its gradient are counted, and the hidden states with theirs; optimiser states and the stage's layers are not.

Measuring runs the same schedule of one stage, each contender in a process of its own: microbatches arrive as they would
from the stage before, and their gradients are made, but nothing is sent. Peaks are the driver's count, of both
frameworks' pools and with what pools round up; beside them stands the sum of both allocators' own peaks.
"""

import argparse
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pallas_ce
from experiments.bench.processes import apart
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.torch_timing import allocated_peak_bytes, used_bytes
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


def fused(implementation: str | None, head: nn.Linear) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The head's loss, which has taken it."""
    model = nn.Sequential(head)
    return model, take_head(model, "0", implementation=implementation)


def contenders(
    implementation: str | None = None,
) -> dict[str, Callable[[nn.Linear], tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]]]:
    """For each, what the last stage has for a head, and its loss function."""
    return {
        "logits": lambda head: (head, stored_logits),
        "chunked": lambda head: (head, chunked),
        "fused": functools.partial(fused, implementation),
    }


def run_stage(name: str, shape: dict[str, int], device: str, implementation: str | None = None) -> None:
    """Forward of every microbatch, then backward of every one, as GPipe does it."""
    head = nn.Linear(shape["width"], shape["vocabulary"], bias=False, device=device, dtype=torch.bfloat16)
    module, loss_fn = contenders(implementation)[name](head)
    waiting = []
    for _ in range(shape["in_flight"]):
        hidden = torch.empty(1, shape["tokens"], shape["width"], device=device, dtype=torch.bfloat16).normal_()
        target = torch.zeros(1, shape["tokens"], device=device, dtype=torch.int64)
        output = module(hidden.requires_grad_())
        # The schedule keeps the output until its microbatch's backward is over.
        waiting.append((output, loss_fn(output, target)))
    for i, (_, loss) in enumerate(waiting):
        loss.backward()
        waiting[i] = None  # type: ignore[call-overload]
        del loss, _


class Counter(TorchDispatchMode):
    """Adds up the bytes of all storages alive; `peak` is the most there were."""

    def __init__(self, scratch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._scratch = scratch  # of the fused operator, while it runs
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and counts what it returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        inside = self._scratch if func.namespace == "pallas_ce" else 0
        self.peak = max(self.peak, self.now + inside)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        self.now += size
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def counted(name: str, shape: dict[str, int], implementation: str | None = None) -> int:
    """Peak bytes of a contender by accounting."""
    plan = pallas_ce.explain(
        jax.ShapeDtypeStruct((shape["tokens"], shape["width"]), jax.numpy.bfloat16),
        jax.ShapeDtypeStruct((shape["vocabulary"], shape["width"]), jax.numpy.bfloat16),
        backward="recompute",
        differentiate=("hidden", "weight"),
        implementation=implementation,  # type: ignore[arg-type]
    )
    with FakeTensorMode(), Counter(plan.scratch_bytes + plan.accumulator_bytes) as counter:
        run_stage(name, shape, "cpu", implementation)
    return counter.peak


def measured(name: str, shape: dict[str, int], device: str, implementation: str | None) -> tuple[int, int]:
    """Bytes that the stage takes at its peak, by the driver's count and by both allocators' own.

    In this process, one contender a process: pools only grow.
    """
    run_stage(name, _WARM_UP, device, implementation)  # starts both frameworks, whose own memory is not the stage's
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = used_bytes(device)
    run_stage(name, shape, device, implementation)
    return used_bytes(device) - before, allocated_peak_bytes(device)


def measure(name: str, shape: dict[str, int], device: str, implementation: str | None) -> Record:
    """A contender's bytes at its peak: counted, by the driver's count, and by both allocators' own."""
    driver, allocated = apart(measured, name, shape, device, implementation)
    counts = {"counted": counted(name, shape, implementation), "measured": driver, "allocators": allocated}
    return {"results": {name: {f"{how}_bytes": count for how, count in counts.items()}}}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """A point a contender."""
    implementation = None if options.dry_run else "mosaic_gpu"
    shape = _WARM_UP if options.dry_run else SHAPE
    points = [
        Point(name, functools.partial(measure, name, shape, options.device, implementation)) for name in contenders()
    ]
    facts = {"torch": torch.__version__, "implementation": implementation, **shape}
    return [ResultFile("pipeline_memory", points, "pipeline_memory", facts)]
