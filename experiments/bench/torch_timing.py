"""What the measurements in PyTorch share: inputs, waiting, and memory as the driver counts it for both frameworks."""

import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import torch

import torch_bridge  # before JAX starts, which leaves the device's memory to both
from experiments.bench.programs import Shape

_SECONDS_BETWEEN_LOOKS = 0.001


def inputs(shape: Shape, device: str) -> tuple[Any, Any, Any]:
    """Normal hidden states and weight, for logits of standard deviation 1, and random labels."""
    n, v, h = shape
    torch.manual_seed(0)
    hidden = torch.randn(n, h, device=device, dtype=torch.bfloat16).requires_grad_()
    # In place: peaks of memory in a process begin with its inputs.
    weight = torch.randn(v, h, device=device, dtype=torch.bfloat16).mul_(h**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), device=device)


def synchronize(result: Any = None) -> None:
    """Waits until `result` is there and the GPU, where there is one, has nothing left to do, for either framework."""
    jax.block_until_ready(result)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(run: Any) -> int:
    """Peak memory on the GPU of one launch above the memory before it, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def used_bytes(device: str) -> int:
    """Bytes of the CUDA device in use, by all processes; for the CPU, the most that this process has had."""
    if device == "cuda":
        torch.cuda.synchronize()
        return _in_use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def used_peaks(device: str, run: Callable[[], Any]) -> tuple[int, int]:
    """The most of `used_bytes` at any time within `run()`, and the sum of both allocators' own peaks.

    The first is also of pools that give memory back in between; the allocators' need not have coincided.
    """
    if device != "cuda":
        run()
        return used_bytes(device), used_bytes(device)
    ended = threading.Event()

    def watched() -> int:
        most = _in_use()
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            most = max(most, _in_use())
        return most

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watched)
        try:
            run()
            torch.cuda.synchronize()
        finally:
            ended.set()
        return watching.result(), torch.cuda.max_memory_allocated() + (torch_bridge.memory_usage().jax_peak or 0)


def _in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
