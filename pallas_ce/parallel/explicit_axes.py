"""Meshes with explicit axes: what is streamed is split from inside an automatic region (`partitioning.py`)."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def in_automatic_region(function: Callable[..., Any], by_row: Any, rows: jax.Array, *arguments: Any) -> Any:
    """`function(*arguments)`, with the explicit axes of the arguments' mesh made automatic inside, if there are any.

    Args:
        function: on arrays; differentiable.
        by_row: a prefix of the result's tree: whether a result has the leading dimensions of `rows` and lies as they
            do, or is a replicated scalar.
        rows: `[..., K]`, for how its leading dimensions lie.
        *arguments: pytrees.
    """
    mesh = _explicit_mesh(arguments)
    if mesh is None:
        return function(*arguments)
    spec = PartitionSpec(*jax.typeof(rows).sharding.spec[: rows.ndim - 1])
    places = jax.tree.map(lambda flag: NamedSharding(mesh, spec if flag else PartitionSpec()), by_row)
    return jax.sharding.auto_axes(function, out_sharding=places)(*arguments)


def _explicit_mesh(tree: Any) -> AbstractMesh | None:
    for leaf in jax.tree.leaves(tree):
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Explicit in (mesh.axis_types or ()):
            return mesh
    return None
