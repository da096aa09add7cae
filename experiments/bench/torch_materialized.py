"""Losses of stored logits in PyTorch, forward and backward, beside a copy of the logits: what bandwidth they reach."""

import functools
from collections.abc import Callable
from typing import Any

import torch

import torch_bridge
from experiments.bench import timing
from experiments.bench.torch_timing import peak_bytes, synchronize

# Passes over the logits that a loss and its gradient take at least, and a copy.
_PASSES, _COPY_PASSES = 3, 2
COPY = "copy"


def contenders() -> dict[str, Callable[[Any, Any], Any]]:
    """`(logits, labels) -> loss`, by name."""
    ours = torch_bridge.cross_entropy
    return {
        "in place": functools.partial(ours, inplace_backward=True),
        "kept": ours,
        "torch": torch.nn.functional.cross_entropy,
        "selective": lambda logits, labels: torch_bridge.selective_log_softmax(logits, labels).mean(),
        "torch selective": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[:, None]).mean(),
    }


def measure(shape: tuple[int, int, int], device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds and bandwidth of bfloat16 logits `[N, V]`, launched back to back, the contenders in turn.

    Returns:
        `{"n", "v", "results"}`: medians `ms` and `samples` of each; of losses the `share` of the copy's bandwidth that
        they reach for three passes, and the MiB allocated at the `peak_mib` by PyTorch beside logits.
    """
    n, v, _ = shape
    stored = torch.randn(n, v, device=device).bfloat16().requires_grad_()
    labels = torch.randint(0, v, (n,), device=device)
    target = torch.empty_like(stored)

    def differentiated(loss: Callable[[Any, Any], Any]) -> Any:
        logits = stored.view(n, v)  # no leaf, so that it may be overwritten
        return torch.autograd.grad(loss(logits, labels), logits)[0]

    def copied() -> Any:
        with torch.no_grad():
            return target.copy_(stored)

    runs: dict[str, Callable[[], Any]] = {COPY: copied}
    runs |= {name: functools.partial(differentiated, loss) for name, loss in contenders().items()}
    peaks = {name: peak_bytes(run) / 2**20 for name, run in runs.items() if name != COPY and device == "cuda"}
    found = timing.in_turn(runs, functools.partial(timing.per_launch, wait=synchronize), rounds)
    for name, result in found.items():
        if name in peaks:
            result["peak_mib"] = peaks[name]
        if name != COPY:
            result["share"] = _PASSES * found[COPY]["ms"] / (_COPY_PASSES * result["ms"])
    return {"n": n, "v": v, "results": found}
