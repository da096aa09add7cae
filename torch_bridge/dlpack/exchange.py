"""Tensors as JAX arrays and back, through DLPack, sharing memory.

Strided views are copied, as PyTorch itself would. Other tensors that cannot be shared are refused by name.
"""

import atexit
import functools
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src import xla_bridge  # as in `torch_bridge.memory`
from jaxlib import _jax  # what JAX's own DLPack functions call
from torch._C import _from_dlpack, _to_dlpack  # what PyTorch's own call
from torch.distributed.tensor import DTensor

from torch_bridge import memory
from torch_bridge.dlpack import streams

# XLA's CPU code assumes it, and JAX silently copies other arrays. On a GPU the kernels need it.
_CPU_ALIGNMENT = 64
CUDA_ALIGNMENT = 256

# The dtypes that both frameworks have and DLPack carries; both have the same names for them.
TO_TORCH: dict[Any, torch.dtype] = {
    np.dtype(getattr(jnp, name)): getattr(torch, name)
    for name in (
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "bool"),
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
TO_JAX = {ours: theirs for theirs, ours in TO_TORCH.items()}

# What to do about a parameter that FSDP1 has sharded: a flat part, or a view of memory that was freed.
SHARDED = (
    "FSDP1 has sharded it: call the loss inside the forward of the module that FullyShardedDataParallel wraps, which "
    "gathers it, or, for a loss without gradients, inside summon_full_params"
)

# Far more than dropping tensors takes.
LETTING_GO_SECONDS = 0.1

# Whether this process was forked from one in which JAX had started: its threads are not here, and JAX waits for them.
forked = False


def _after_fork() -> None:
    global forked
    forked = forked or xla_bridge.backends_are_initialized()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

# JAX warns at each fork, and each new loader with workers forks. These only load data, and in a child that calls the
# bridge `check_dense` raises. Whoever started JAX by themselves may call it without the bridge, and needs the warning.
if not xla_bridge.backends_are_initialized():
    # Behind the user's own filters, which decide first.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called\. .* and JAX is multi", RuntimeWarning, append=True)

_WIDE = {torch.float64: "float64", torch.int64: "int64", torch.uint64: "uint64", torch.complex128: "complex128"}


def to_jax(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """The tensor's memory as a JAX array, ordered behind the work queued on PyTorch's current stream.

    The array is an alias: writing to the tensor while a JAX computation may still read it is a race, as between two
    CUDA streams. `requires_grad` is dropped. Strided, sliced, transposed and expanded views are made contiguous, and
    tensors that do not start at a multiple of 64 bytes, or 256 on a CUDA device, are copied: such as `x[1:]` of rows of
    other lengths, or parameters that lie in one flat tensor.

    Args:
        tensor: dense, on a CPU or a CUDA device that JAX uses too.
        name: what error messages call it.

    Returns:
        Array: same shape, dtype and device; the same memory where the tensor is contiguous (and aligned).

    Raises:
        TypeError: not a dense tensor; a DTensor; a dtype that JAX lacks; a 64-bit one while JAX's 64-bit mode is off,
            which would narrow it.
        ValueError: a device that JAX does not use in this process.

    Example:
        >>> import torch
        >>> from torch_bridge import to_jax
        >>> tensor = torch.arange(6.0).reshape(2, 3)
        >>> array = to_jax(tensor)
        >>> array.unsafe_buffer_pointer() == tensor.data_ptr()
        True
    """
    check_dense(name, tensor)
    if tensor.dtype not in TO_JAX:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, which JAX does not have; convert it to one of {list(map(str, TO_JAX))}"
        )
    with streams.on(tensor.device) as current:
        return _import([_plain(name, tensor)], _device(tensor.device, name), current)[0]


def share(
    names: Sequence[str], given: Sequence[Any], device: torch.device, current: streams.Current | None
) -> list[Any]:
    """Dense tensors on `device` as arrays, behind one event on its `current` stream; JAX's arrays among them stay.

    They are for one program that takes them all, even if it does not use some (`keep_unused` of `jax.jit`). Scalars on
    the CPU go to whichever device computes. 64-bit integers come as 32-bit words, which `words_to_int32` puts together.
    """
    plain = [_plain(name, x, True) if isinstance(x, torch.Tensor) else x for name, x in zip(names, given, strict=True)]
    return _import(plain, _device(device, names[0]), current)


def run(
    program: Callable[..., Iterable[jax.Array]],
    names: Sequence[str],
    given: Sequence[Any],
    device: torch.device,
    staying: Collection[int] = (),
) -> list[Any]:
    """A compiled program's results as tensors, of what `share` takes; those at `staying` stay JAX's arrays."""
    with streams.on(device) as current:
        found = adopt(program(*share(names, given, device, current)), current, staying)
        streams.hold(given, current)
    return found


def words_to_int32(words: jax.Array) -> jax.Array:
    """Integers `[..., K]` from their low and high words `[..., 2K]`; -1 for those beyond 32 bits."""
    low, high = words[..., ::2], words[..., 1::2]
    return jnp.where(high == low >> 31, low, -1)


def _plain(name: str, tensor: torch.Tensor, in_words: bool = False) -> torch.Tensor:
    """The tensor detached, as contiguous, aligned memory in a dtype that JAX has; int64 as words if that is asked."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    alignment = _CPU_ALIGNMENT if tensor.is_cpu else CUDA_ALIGNMENT
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} has no memory, as where {SHARDED}")
    tensor = tensor.clone() if tensor.data_ptr() % alignment else tensor
    if in_words and tensor.dtype == torch.int64:
        return tensor.view(torch.int32)
    check_width(name, tensor)
    return tensor


def check_width(name: str, tensor: torch.Tensor) -> None:
    """Refuses a dtype of 64 bits where JAX would narrow it."""
    if tensor.dtype in _WIDE and not jax.config.read("jax_enable_x64"):
        raise TypeError(
            f"{name} has dtype {_WIDE[tensor.dtype]}, which JAX would narrow to 32 bits: convert it, or switch on "
            "JAX's 64-bit mode with jax.config.update('jax_enable_x64', True)"
        )


def _import(given: Sequence[Any], to: Any, current: streams.Current | None) -> list[Any]:
    """Past `jax.dlpack.from_dlpack`, which takes eight times as long and orders each tensor on its own.

    On a GPU only the first array waits for the event, which costs the host as much time as the exchange.
    """
    # Behind all that made the tensors plain.
    handle = None if current is None else streams.behind(current, to)
    arrays: list[Any] = []
    for x in given:
        if not isinstance(x, torch.Tensor):
            arrays.append(x)
        elif current is not None and x.is_cpu:
            arrays.append(x.numpy())
        else:
            arrays.append(_jax.dlpack_managed_tensor_to_buffer(_to_dlpack(x), to, handle, None))
            handle = None
    return arrays


@functools.lru_cache
def _device(device: torch.device, name: str) -> Any:
    """JAX's device for PyTorch's; CUDA keeps its pool from then on. `name` is of a tensor there."""
    try:
        devices = jax.local_devices(backend=device.type)
        found = next(x for x in devices if device.index is None or x.local_hardware_id == device.index)
    except (RuntimeError, StopIteration) as error:
        raise ValueError(
            f"{name} lies on {device}, which JAX cannot read in this process ({error}): install "
            "the extra cuda12 or cuda13 of pallas-ce, and do not hide the device from JAX with JAX_PLATFORMS"
        ) from error
    if device.type == "cuda":
        memory.keep_pool(found.local_hardware_id)
    _at_exit(device)
    return found


@functools.cache
def _at_exit(device: torch.device) -> None:
    atexit.register(_let_go, device)


def _let_go(device: torch.device) -> None:
    """Gives JAX's threads time to drop the last call's tensors, for which they need the interpreter.

    They drop them a little after the results are there. Once the interpreter has ended, that aborts the process.
    """
    if forked:  # those threads are the parent's
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time.sleep(LETTING_GO_SECONDS)


def to_torch(array: jax.Array, name: str = "array") -> torch.Tensor:
    """The array's memory as a tensor; work queued later on PyTorch's current stream waits for it, the host does not.

    (On a CPU, where there are no streams, the host waits.) JAX regards the memory as immutable: do not write to the
    tensor while an array that shares it is in use.

    Args:
        array: on one device.
        name: what error messages call it.

    Returns:
        Tensor: same shape, dtype, memory and device.

    Raises:
        TypeError: not an array, one that JAX is tracing, keys of random numbers, or a dtype that PyTorch lacks.
        ValueError: sharded over several devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from torch_bridge import to_torch
        >>> to_torch(jnp.ones(3, jnp.bfloat16))
        tensor([1., 1., 1.], dtype=torch.bfloat16)
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        kind = "traced by JAX, so it has no memory yet" if isinstance(array, jax.core.Tracer) else "no JAX array"
        raise TypeError(f"{name} is a {type(array).__name__}, {kind}; pass a computed jax.Array")
    if array.dtype not in TO_TORCH:
        is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        cure = f"pass jax.random.key_data({name})" if is_key else f"convert it to one of {list(map(str, TO_TORCH))}"
        raise TypeError(f"{name} has dtype {array.dtype}, which PyTorch does not have; {cure}")
    if len(devices := array.devices()) > 1:
        raise ValueError(f"{name} is sharded over {len(devices)} devices; pass one shard: array.addressable_data(0)")
    (device,) = devices
    where = torch.device("cpu") if device.platform == "cpu" else torch.device("cuda", device.local_hardware_id)
    with streams.on(where) as current:
        return adopt([array], current)[0]


def adopt(arrays: Iterable[jax.Array], current: streams.Current | None, staying: Collection[int] = ()) -> list[Any]:
    """Computed arrays on one device as tensors, for which PyTorch's current stream waits; those at `staying` stay."""
    handle = None if current is None else current.handle
    return [
        array if place in staying else _from_dlpack(_jax.buffer_to_dlpack_managed_tensor(array, stream=handle))
        for place, array in enumerate(arrays)
    ]


def written(into: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`into` with the result of a program that was given its memory for it."""
    # JAX may have made another array all the same.
    return into if result.data_ptr() == into.data_ptr() else into.copy_(result)


def check_dense(name: str, tensor: Any) -> None:
    """Refuses all but a plain dense tensor with memory of its own, and a process in which JAX would hang."""
    if forked:
        raise RuntimeError(
            "this process was forked from one in which JAX had started, and JAX would wait for ever for threads that "
            "only that one has: start it with torch.multiprocessing.get_context('forkserver') or 'spawn'"
        )
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"{name} is a DTensor with placements {tensor.placements}: the bridge computes on whole local tensors. "
            "Call the loss inside the forward of the module that fully_shard wraps, where its parameters are gathered, "
            f"or pass {name}.full_tensor(grad_placements=...)"
        )
    if not isinstance(tensor, torch.Tensor):
        is_proxy = isinstance(tensor, torch.fx.Proxy)
        traced = ": for torch.fx.symbolic_trace, torch.fx.wrap the function" if is_proxy else ""
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor{traced}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{name} has layout {tensor.layout}; it must be dense and not quantised")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(f"{name} lies on {tensor.device}; the bridge serves CPU and CUDA tensors")


def check_one_device(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Refuses tensors on different devices; scalars on the CPU go everywhere, as in PyTorch."""
    (first, one), *others = ((name, x) for name, x in tensors.items() if x is not None)
    for name, tensor in others:
        if tensor.device != one.device and not (tensor.ndim == 0 and tensor.is_cpu):
            raise ValueError(f"{name} lies on {tensor.device} and {first} on {one.device}: move them to one device")
