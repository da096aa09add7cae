"""How much memory the run has taken at its peak."""

import resource
import sys

import jax


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
