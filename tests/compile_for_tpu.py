"""Compiling for TPUs on a machine without one: libtpu's compiler makes the program, nothing is run.

It shows what XLA makes of the portable backend there: arrays, temporary memory, collectives. It needs the `tpu-compile`
extra.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh


def tpu_mesh(topology: str, chips: int, axis: str = "tpu") -> Mesh:
    """A mesh of `chips` chips of a topology such as "v5e:2x2"; skips the test where the extra is missing."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("compiling for a TPU needs the tpu-compile extra")
    # No metadata server tells what machine this is, and there are no other hosts; but other processes may compile.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices[:chips]), (axis,), axis_types=(AxisType.Auto,))


def compile_for_tpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """The program compiled for the devices of the arguments, which have the sharding of such a mesh."""
    mesh, jitted = arguments[0].sharding.mesh, jax.jit(function)
    if mesh.size > 1:
        return jitted.lower(*arguments).compile()
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=mesh.abstract_mesh.abstract_device)):
        return jitted.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
