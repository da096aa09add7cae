"""The device that a call is traced for, as far as the trace tells.

A program is lowered after it was traced, for the device its arrays lie on; the process's default backend says nothing
of it. But a mesh knows its devices, those that are only compiled for included, and arrays know their mesh. Where no
mesh tells, a process without a CUDA device is taken to lower for none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh


@contextlib.contextmanager
def known_device(arrays: Any) -> Iterator[AbstractDevice | None]:
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
    """The device of an array's, tracer's or struct's mesh."""
    # A tracer has the sharding of its type only.
    place = jax.typeof(array).sharding if isinstance(array, jax.Array) else getattr(array, "sharding", None)
    mesh = getattr(place, "mesh", None)
    return None if mesh is None else mesh.abstract_mesh.abstract_device
