"""JAX's loops and choices, with what its compilers need beside.

Inside a `shard_map` with `check_vma=True` a loop's carry must not change its type, and zeros that become sums over a
device's own rows do: they start the same on all devices and differ afterwards.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# XLA has a GPU choose by itself, in a CUDA graph, where at least five launches follow each other, the choice included.
# Else the host waits for the device to tell. The predicate's own computation is one of them.
_LAUNCHES_BEFORE_CHOICE = 3


def chosen_by_device(predicate: jax.Array) -> jax.Array:
    """`lax.cond`'s predicate behind enough short launches that a GPU chooses by itself, if no branch has a loop."""
    for _ in range(_LAUNCHES_BEFORE_CHOICE):
        # Barriers keep them apart, and from being folded.
        predicate ^= lax.optimization_barrier(jnp.zeros((), bool))
        predicate = lax.optimization_barrier(predicate)
    return predicate


def apart[T](arrays: T) -> T:
    """The arrays, each with memory of its own for a kernel's operands, or for its results.

    XLA lets a kernel read a slice, ours or a user's, and write into one, in place (`dynamic_slice_fusion`). Slices
    begin anywhere, where Mosaic and cuBLAS want multiples. And a result that takes an operand's memory would be lost:
    the kernel writes over the operand, and XLA reads the slice. Behind a barrier XLA copies slices, but not whole
    arrays. Each array has a barrier of its own: of one around all results of a kernel XLA warns.
    """
    return jax.tree.map(lax.optimization_barrier, arrays)


def fori_loop[Carry](start: Any, stop: Any, body: Callable[[jax.Array, Carry], Carry], init: Carry) -> Carry:
    """`lax.fori_loop`, whose carry varies from the start over the mesh axes that the body makes it vary over."""
    while jax.sharding.get_abstract_mesh().manual_axes:
        declared = jax.tree.map(vary_like, init, jax.eval_shape(body, jnp.int32(0), init))
        if all(x is y for x, y in zip(jax.tree.leaves(declared), jax.tree.leaves(init), strict=True)):
            break
        init = declared
    return lax.fori_loop(start, stop, body, init)


def vary_like(x: jax.Array, other: Any) -> jax.Array:
    """`x`, declared to vary over the mesh axes, too, that any array of the tree `other` varies over."""
    missing = tuple(sorted(varying(other) - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying(tree: Any) -> frozenset[str]:
    """The mesh axes of a surrounding `shard_map` over which JAX knows some array of the tree to vary."""
    types = (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in jax.tree.leaves(tree))
    return frozenset().union(*(x.manual_axis_type.varying for x in types if x.manual_axis_type))
