"""One GPU, two allocators: what a PyTorch user must know.

* PyTorch and JAX each keep a pool of device memory. Neither can use the other's pool. CUDA alone takes free memory of
  JAX's for PyTorch when the device has no other left.
* JAX's default is to take 75 % of the device at its first computation. Importing `torch_bridge` before that switches it
  off (`XLA_PYTHON_CLIENT_PREALLOCATE=false`) and has CUDA keep JAX's pool (`XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async`),
  which then grows to the peak of JAX's use; JAX's own would grow in steps to nearly twice as much. Where JAX has
  started already, a warning says so. Another setting of yours wins.
* The bridge uses scratch (`scratch_bytes` bounds it), and memory for what it returns and keeps: losses, gradients,
  float32 sums.
* `torch.cuda.empty_cache()` returns PyTorch's free memory to the device, where JAX can take it.
* An out-of-memory error of the one may be the other's doing: `memory_usage` shows both.
* Setting `XLA_PYTHON_CLIENT_ALLOCATOR=platform` gives everything back at once, but allocates slowly: for debugging.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping, MutableMapping

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether it has started without starting it

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# The settings with which JAX leaves device memory to PyTorch.
SHARING = {_PREALLOCATE: "false", _ALLOCATOR: "cuda_async"}

# Bytes that a pool holds before it gives any back.
_EVERYTHING = 2**64 - 1


def share_device(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leaves device memory to PyTorch: JAX takes what it needs, and no more; or warns where it is too late.

    Settings of the user's own are left alone, and nothing is started.
    """
    if any(name in environment for name in (_PREALLOCATE, _ALLOCATOR, *_FRACTIONS)):
        return
    if not xla_bridge.backends_are_initialized():
        environment.update(SHARING)
    elif jax.default_backend() == "gpu":
        warnings.warn(
            "JAX started before torch_bridge was imported and has reserved most of the GPU's memory, which PyTorch "
            f"cannot use now. Import torch_bridge first, or set {_PREALLOCATE}=false in the environment.",
            stacklevel=3,
        )


def keep_pool(ordinal: int, environment: Mapping[str, str] = os.environ) -> None:
    """Has CUDA keep the pool of a JAX that has started with `SHARING`, or warns that it does not.

    With these settings JAX has CUDA give unused memory back at each synchronisation. The next call then waits until it
    is mapped again. `ordinal` is the CUDA device's number in this process.
    """
    if any(environment.get(name) != value for name, value in SHARING.items()):
        return
    try:
        from cuda.bindings import driver  # which PyTorch brings

        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        status, device = driver.cuDeviceGet(ordinal)
        if not status:
            status, pool = driver.cuDeviceGetDefaultMemPool(device)
        if not status:
            (status,) = driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(_EVERYTHING))
        why = status.name if status else None
    except ImportError as error:
        why = f"{error}: pip install cuda-bindings"
    if why:
        message = "CUDA gives JAX's memory back at each synchronisation, which makes the call after it slower"
        warnings.warn(f"{message} ({why})", stacklevel=2)


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """Bytes on one device; None where a framework or device does not tell. `print` it for a summary.

    Attributes:
        torch_allocated: in PyTorch's tensors.
        torch_reserved: in PyTorch's pool, the tensors included.
        jax_in_use: in JAX's arrays and scratch.
        jax_peak: the most there ever was of it.
        jax_reserved: in JAX's pool, the arrays included.
        device_free: what neither has, nor any other process.
        device_total: all there is.
    """

    torch_allocated: int | None = None
    torch_reserved: int | None = None
    jax_in_use: int | None = None
    jax_peak: int | None = None
    jax_reserved: int | None = None
    device_free: int | None = None
    device_total: int | None = None

    def __str__(self) -> str:
        def mib(count: int | None) -> str:
            return "unknown" if count is None else f"{count / 2**20:,.0f} MiB"

        return "\n".join(
            [
                f"PyTorch  {mib(self.torch_allocated)} in tensors, {mib(self.torch_reserved)} reserved",
                f"JAX      {mib(self.jax_in_use)} in arrays, {mib(self.jax_reserved)} reserved, "
                f"{mib(self.jax_peak)} at the peak",
                f"device   {mib(self.device_free)} free of {mib(self.device_total)}",
            ]
        )


def memory_usage(device: int = 0) -> MemoryUsage:
    """The memory of a CUDA device that each framework holds, and the rest.

    Args:
        device: the CUDA device's index.

    Returns:
        MemoryUsage: bytes; all None on a machine without a CUDA device.

    Example:
        >>> from torch_bridge import memory_usage
        >>> print(memory_usage())  # doctest: +SKIP
        PyTorch  3,120 MiB in tensors, 3,402 MiB reserved
        JAX      512 MiB in arrays, 1,024 MiB reserved, 896 MiB at the peak
        device   138,000 MiB free of 143,771 MiB
    """
    import torch

    if not torch.cuda.is_available():
        return MemoryUsage()
    free, total = torch.cuda.mem_get_info(device)
    ours = [d for d in jax.local_devices() if d.platform == "gpu" and d.local_hardware_id == device]
    stats = (ours[0].memory_stats() if ours else None) or {}
    return MemoryUsage(
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        stats.get("bytes_in_use"),
        stats.get("peak_bytes_in_use"),
        stats.get("pool_bytes") or stats.get("bytes_reserved") or None,  # CUDA's pool tells 0
        free,
        total,
    )
