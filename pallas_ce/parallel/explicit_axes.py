"""Meshes with explicit axes: what is streamed is split from inside an automatic region (`entry.py`)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def program[Out](
    static: int = 0, by_row: Callable[..., Any] = lambda *_: True
) -> Callable[[Callable[..., Out]], Callable[..., Out]]:
    """Jits a function; the explicit axes of its arguments' mesh, if there are any, are automatic inside.

    Args:
        static: so many arguments, the first ones, are static. The first array of the others is `[..., K]`: its leading
            dimensions are the rows'.
        by_row: of the arguments: a prefix of the result's tree, whether a result has the rows'
            leading dimensions and lies as they do, or is a replicated scalar.
    """

    def decorate(function: Callable[..., Out]) -> Callable[..., Out]:
        jitted = jax.jit(function, static_argnums=tuple(range(static)))

        @functools.wraps(jitted)
        def run(*arguments: Any) -> Out:
            facts, arrays = arguments[:static], arguments[static:]
            shardings = [jax.typeof(x).sharding for x in jax.tree.leaves(arrays)]
            mesh = next((x.mesh for x in shardings if AxisType.Explicit in (x.mesh.axis_types or ())), None)
            if mesh is None:
                return jitted(*arguments)
            whole, as_rows = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in ((), shardings[0].spec[:-1]))
            places = jax.tree.map(lambda flag: as_rows if flag else whole, by_row(*arguments))
            return jax.sharding.auto_axes(functools.partial(jitted, *facts), out_sharding=places)(*arrays)

        return run

    return decorate
