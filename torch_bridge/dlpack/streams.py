"""CUDA streams and the lifetimes of shared memory. Everything here does nothing for CPU tensors.

Order between the frameworks is kept by events, never by waiting on the host:

* PyTorch to JAX: JAX lends a stream, which is made to wait for an event on PyTorch's current one. One tensor of a call
  is imported on it; a program that takes them all runs behind that one event.
* JAX to PyTorch: PyTorch names its current stream, and JAX makes it wait for the array. The host waits until JAX has
  queued what computes the array: a stream can wait for nothing that is not queued, and memory has no address before.

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
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

# DLPack's number for CUDA's default stream, whose handle is 0.
_DEFAULT_STREAM = 1


class Current(NamedTuple):
    """PyTorch's current stream on a device, DLPack's number for it, and an event that is recorded on it alone.

    So its last record is behind every work that an earlier one was behind. Made once for each stream.
    """

    stream: torch.cuda.Stream
    handle: int
    event: torch.cuda.Event


class _On(torch.cuda._DeviceGuard):
    """A device as PyTorch's current one; `with` names its current stream."""

    def __enter__(self) -> Current:
        super().__enter__()  # type: ignore[no-untyped-call]
        return _current(*torch._C._cuda_getCurrentStream(self.idx))


@functools.lru_cache
def _current(stream_id: int, device_index: int, device_type: int) -> Current:
    stream = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    return Current(stream, stream.cuda_stream or _DEFAULT_STREAM, torch.cuda.Event())


_NO_STREAM = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager[Current | None]:
    """A context in which `device` is PyTorch's current one, as exchanging needs, with its current stream if it has any.

    Raises:
        RuntimeError: PyTorch records a CUDA graph, which JAX's work would be left out of, silently.
    """
    if device.type != "cuda":
        return _NO_STREAM
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "torch_bridge cannot be captured in a CUDA graph: JAX launches its kernels on streams of its own, which "
            "the graph would not contain. Leave the loss outside torch.cuda.graph, and compile without "
            "mode='reduce-overhead' or 'max-autotune'"
        )
    return _On(torch.cuda.current_device() if device.index is None else device.index)


def behind(current: Current, jax_device: Any) -> int:
    """The handle of a JAX stream that now waits for the work queued on the current one, of the same device."""
    handle: int = jax_device.get_stream_for_external_ready_events()
    current.event.record(current.stream)
    current.event.wait(_foreign(handle, current.stream.device_index))
    return handle


_foreign = functools.lru_cache(torch.cuda.ExternalStream)


def hold(tensors: Iterable[Any], current: Current | None) -> None:
    """Keeps the memory of the tensors among those, once dropped, from reuse before the work now queued on `current`."""
    if current is not None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(current.stream)
