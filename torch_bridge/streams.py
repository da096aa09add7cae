"""CUDA streams and the lifetimes of shared memory. Everything here does nothing for CPU tensors.

Order between the frameworks is kept by events, never by waiting on the host:

* PyTorch to JAX: DLPack's consumer names its stream, PyTorch records an event on its current stream and makes that
  stream wait. This needs the tensor's device to be current.
* JAX to PyTorch: PyTorch names its current stream, and JAX makes it wait for the array.

Memory must also not be *reused* early. Both allocators reuse memory in the order of their own streams:

* A tensor that JAX reads belongs to PyTorch's allocator. It is held until the results are imported; PyTorch's current
  stream then waits for JAX, so memory reused on that stream is safe, and `record_stream` extends that to tensors that
  were allocated on another.
* An array that PyTorch reads belongs to JAX's allocator. When PyTorch drops it, JAX may give its memory to its next
  computation. Every computation that the bridge starts reads a tensor of the current stream first, hence starts behind
  all work queued there. What the bridge cannot order is JAX work of the caller's own, or tensors read on further
  streams: wait for those before dropping them.
"""

import contextlib
from collections.abc import Iterable

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which `device` is PyTorch's current one, as exchanging its tensors needs."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def hold(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of `tensors`, once dropped, from reuse before the work now queued on the current streams."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError while PyTorch records a CUDA graph: JAX's work would be left out of it, silently."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "torch_bridge cannot be captured in a CUDA graph: JAX launches its kernels on streams of its own, which "
            "the graph would not contain. Leave the loss outside torch.cuda.graph, and compile without "
            "mode='reduce-overhead' or 'max-autotune'"
        )
