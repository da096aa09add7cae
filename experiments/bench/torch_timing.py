"""What the measurements in PyTorch share: inputs, waiting, and memory as the driver counts it for both frameworks."""

import re
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import torch

import torch_bridge  # before JAX starts, which leaves the device's memory to both
from experiments.bench.programs import Shape

_STATUS = Path("/proc/self/status")
_SECONDS_BETWEEN_LOOKS = 0.001


def inputs(shape: Shape, device: str) -> tuple[Any, Any, Any]:
    """Normal hidden states and weight, for logits of standard deviation 1, and random labels."""
    n, v, h = shape
    torch.manual_seed(0)
    hidden = torch.randn(n, h, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(v, h, device=device, dtype=torch.bfloat16) * h**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), device=device)


def synchronize(result: Any = None) -> None:
    """Waits until `result` is there and the GPU, where there is one, has nothing left to do, for either framework."""
    jax.block_until_ready(result)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(run: Any) -> int:
    """Peak memory on the GPU of one launch above what is there before it, results included."""
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
    # Where Linux tells it of the program itself: the count of `getrusage` begins with what the process before it had.
    if _STATUS.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def used_peak_bytes(device: str, run: Callable[[], Any]) -> int:
    """The most of `used_bytes` at any time within `run()`, also of pools that give memory back in between."""
    if device != "cuda":
        run()
        return used_bytes(device)
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
        return watching.result()


def _in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def allocated_peak_bytes(device: str) -> int:
    """The sum of both allocators' peaks on the CUDA device, which need not have coincided; else `used_bytes`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() + (torch_bridge.memory_usage().jax_peak or 0)
    return used_bytes(device)
