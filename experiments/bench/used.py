"""Memory in use as the driver counts it, which sees both frameworks' pools."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

import torch_bridge

_STATUS = Path("/proc/self/status")


def used_bytes(device: str) -> int:
    """Bytes of the CUDA device in use, by all processes; for the CPU, the most that this process has had.

    Neither framework's pool returns memory by itself, so that what is in use after a call is the peak within it.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    # Where Linux tells it of the program itself: the count of `getrusage` begins with what the process before it had.
    if _STATUS.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocated_peak_bytes(device: str) -> int:
    """The sum of both allocators' peaks on the CUDA device, which need not have coincided; else `used_bytes`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() + (torch_bridge.memory_usage().jax_peak or 0)
    return used_bytes(device)


def apart(module: str, *words: str, **environment: str) -> tuple[int, int]:
    """The two numbers that `python -m module words` prints last, in a process of its own: pools only grow."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    driver, allocated = done.stdout.split()[-2:]
    return int(driver), int(allocated)
