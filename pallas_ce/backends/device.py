"""The device that a call is traced for, as far as the trace tells.

A program is lowered after it was traced, for the device its arrays lie on; the process's default backend says nothing
of it. But a mesh knows its devices, those that are only compiled for included, and arrays know their mesh. Where no
mesh tells, a process without a CUDA device is taken to lower for none.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config  # JAX has no public way to ask whether kernels are traced for Pallas' interpreter
from jax.sharding import AbstractDevice, AbstractMesh


@contextlib.contextmanager
def known(arrays: Any) -> Iterator[AbstractDevice | None]:
    """The device that `arrays`, a pytree, are known to lie on; None where only lowering will tell.

    Inside, JAX's ambient mesh names it too, which is where rules and tables that depend on the device look.
    """
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        yield device
        return
    device = next(filter(None, map(_device, jax.tree.leaves(arrays))), None)
    if device is None:
        yield None
        return
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        yield device


def _device(array: Any) -> AbstractDevice | None:
    """That of the mesh of an array, tracer or struct."""
    # A tracer has the sharding of its type only.
    place = jax.typeof(array).sharding if isinstance(array, jax.Array) else getattr(array, "sharding", None)
    mesh = getattr(place, "mesh", None)
    return None if mesh is None else mesh.abstract_mesh.abstract_device


def on_cpu(arrays: Any) -> bool:
    """Whether all of `arrays`, a pytree, have values that lie on CPUs: what is done with them is done there."""
    leaves = jax.tree.leaves(arrays)
    known = all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves)
    return bool(leaves) and known and all(device.platform == "cpu" for x in leaves for device in x.devices())


def interpreted() -> bool:
    """Whether kernels are traced for Pallas' interpreter, which runs those for a GPU on a CPU."""
    names = ("pallas_tpu_interpret_mode_context_manager", "pallas_interpret_mode_context_manager")
    return any(getattr(getattr(config, name, None), "value", None) is not None for name in names)


def platform() -> str:
    """That of the device traced for, "cpu" or another: the ambient mesh's where known, else the process's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


@functools.cache
def local_cuda() -> str | None:
    """The model of the process's first CUDA device, None without one."""
    try:
        return next((str(device.device_kind) for device in jax.local_devices(backend="cuda")), None)
    except RuntimeError:
        return None


# For programs that are compiled for a GPU which is not there to be asked.
_MODELS = {"9.0": ("H100", "H200", "H800", "H20", "GH200")}


def compute_capability(kind: str) -> str | None:
    """That of a CUDA device of this model, as "9.0"; None for what is no CUDA device, or not known."""
    try:
        local = jax.local_devices(backend="cuda")
    except RuntimeError:
        local = []
    for device in local:
        if device.device_kind == kind:
            return str(device.compute_capability)
    return next((capability for capability, names in _MODELS.items() if any(name in kind for name in names)), None)
