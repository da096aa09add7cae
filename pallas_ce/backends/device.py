"""The device that a call is traced for, as far as the process tells, and the table of GPUs.

`parallel.partitioning.known_device` has what the arrays tell.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
from jax._src import config  # JAX has no public way to ask whether kernels are traced for Pallas' interpreter


def on_cpu(arrays: Any) -> bool:
    """Whether all of `arrays`, a pytree, have values that lie on CPUs, where work on them runs."""
    leaves = jax.tree.leaves(arrays)
    known = all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves)
    return bool(leaves) and known and all(device.platform == "cpu" for x in leaves for device in x.devices())


def interpreted() -> bool:
    """Whether kernels are traced for Pallas' interpreter, which runs those for a GPU on a CPU."""
    names = ("pallas_tpu_interpret_mode_context_manager", "pallas_interpret_mode_context_manager")
    return any(getattr(getattr(config, name, None), "value", None) is not None for name in names)


def platform() -> str:
    """The platform traced for, "cpu" or another: the ambient mesh's where known, else the process's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def _gpus() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


@functools.cache
def local_cuda() -> str | None:
    """The model of the process's first CUDA device, None without one."""
    return next((str(gpu.device_kind) for gpu in _gpus()), None)


def cuda_kind() -> str | None:
    """The model of the device traced for: the ambient mesh's where known, else the process's GPU; None without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return local_cuda() if device is None else str(device.device_kind)


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU traced for, or of an H100 where nothing tells, as in an interpreter."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return next((int(gpu.core_count) for gpu in _gpus()), 132) if device is None else int(device.num_cores)


class Gpus(NamedTuple):
    """GPUs of one compute capability.

    A program that is compiled for one that is not there to be asked knows it by the names of `models`, in which an x
    stands for any digit. `kernels` are the implementations for them, the default first. With each stands the file of
    its results on such a GPU, or None where it was compiled for one and never run: who has one finds out by
    `python -m pallas_ce.check_device`, and the file that it writes belongs in `experiments/results`.
    """

    models: tuple[str, ...]
    kernels: dict[str, str | None]


GPUS: dict[str, Gpus] = {
    "8.0": Gpus(("A100", "A800", "A30"), {"triton": None}),
    "8.6": Gpus(("A10", "A10G", "A16", "A2", "A40", "RTX Axxxx", "GeForce RTX 30xx"), {"triton": None}),
    "8.9": Gpus(("L4", "L20", "L40", "L40S", "RTX xxxx Ada", "RTX xxxx SFF Ada", "GeForce RTX 40xx"), {"triton": None}),
    "9.0": Gpus(
        ("H100", "H200", "H800", "H20", "GH200"),
        {
            "mosaic_gpu": "experiments/results/gpu_report.md",
            "triton": "experiments/results/check_device_h200.json",
        },
    ),
    "10.0": Gpus(("B200", "GB200"), {"triton": None}),
    "10.3": Gpus(("B300", "GB300"), {"triton": None}),
    "12.0": Gpus(("GeForce RTX 50xx", "RTX PRO xxxx Blackwell"), {"triton": None}),
    "12.1": Gpus(("GB10",), {"triton": None}),
}


def compute_capability(kind: str) -> str | None:
    """The compute capability of a device model, as "9.0"; None for one that is no CUDA device, or not known."""
    for gpu in _gpus():
        if gpu.device_kind == kind:
            return str(gpu.compute_capability)
    for capability, gpus in GPUS.items():
        # In words of their own: A10 does not name an A100.
        if any(re.search(rf"\b{model}\b".replace("x", r"\d"), kind) for model in gpus.models):
            return capability
    return None


def refusal(backend: str) -> str | None:
    """Why the device traced for cannot run a backend's kernels; None where it can. The interpreter runs Pallas' own."""
    if backend != "triton" and jax.sharding.get_abstract_mesh().abstract_device is None and interpreted():
        return None
    if (kind := cuda_kind()) is None:
        return "its kernels are for CUDA devices, and this process has none; use 'xla'"
    capability = compute_capability(kind)
    served = [capability for capability, gpus in GPUS.items() if backend in gpus.kernels]
    if capability in served:
        return None
    told = kind if capability is None else f"{kind}, of {capability}"
    return f"its kernels are for GPUs of compute capability {', '.join(served)}, and this one is {told}; use 'xla'"
