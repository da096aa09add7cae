"""Run by `test_meshes.py`, as two processes with four CPU devices each; prints the checks that passed.

Of `data=2, tensor=4` the data axis lies across the processes; with the axes laid the other way round, tensor does.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_ce import MeshAxes
from tests.pallas_ce import layouts


def same(got: Any, want: Any) -> None:
    """Compares results of both processes; each has parts."""
    assert not any(x.is_fully_addressable for x in jax.tree.leaves(got))
    layouts.same(got, want)


def across(tensor: bool) -> Mesh:
    """The mesh whose tensor axis lies across the processes, or within each of them."""
    devices = np.array(jax.devices())  # By process.
    return Mesh(devices.reshape(4, 2).T if tensor else devices.reshape(2, 4), layouts.ALL)


def checks() -> Iterator[str]:
    """Under jit, and inside a shard_map."""
    # The others use both axes as one, which is the same either way.
    for layout, mode, tensor in (
        *((layout, "in_forward", False) for layout in layouts.LAYOUTS[2:5]),
        *((layout, "recompute", True) for layout in layouts.LAYOUTS[3:4]),
    ):
        step = jax.jit(layouts.with_gradients(mode, layout.vocabulary))
        same(step(layouts.placed(layout, across(tensor))), layouts.expected(mode, layout.vocabulary))
        yield f"{layout.name}, {mode}, tensor across={tensor}"
    layout, on = layouts.LAYOUTS[2], across(True)

    def part(a: Any) -> Any:
        local = layouts.loss(a, layout.vocabulary, normalizer=10.0, mesh_axes=MeshAxes(**layout.axes))
        return jax.lax.psum(local, "data")

    mapped = layouts.differentiated(jax.shard_map(part, mesh=on, in_specs=(layout.specs,), out_specs=P()))
    same(jax.jit(mapped)(layouts.placed(layout, on)), layouts.expected("recompute", layout.vocabulary, normalizer=10.0))
    yield "shard_map"


if __name__ == "__main__":
    address, index = sys.argv[1:]
    jax.distributed.initialize(
        address, 2, int(index), initialization_timeout=60, heartbeat_timeout_seconds=30, shutdown_timeout_seconds=60
    )
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    for passed in checks():
        print(f"passed: {passed}", flush=True)
