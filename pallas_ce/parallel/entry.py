"""Every streamed operation is entered here: rows flattened, split over the mesh, and mapped by `vmap`.

Inside, where a device's share of the work is known, `at_lowering` leaves the choice of a backend to the lowering.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from pallas_ce.head import Batch
from pallas_ce.parallel.batching import over_rows
from pallas_ce.parallel.partitioning import partitioned
from pallas_ce.parallel.shards import RowArrays, Shards

# (shards, rows, *shared) -> (by_row, of_head): by_row leaves are `[N, ...]` where the rows' are flat `[N, ...]`.
Operation = Callable[..., tuple[Any, Any]]


def streamed(shards: Shards | None, operation: Operation) -> Callable[..., tuple[Any, Any]]:
    """`operation` on rows of any leading shape `[...]`, with its rule for `vmap`.

    Split as `shards` say, inside a `shard_map`; without them by `jit`'s partitioner, on a mesh.
    """

    def on_any_shape(shards: Shards, rows: RowArrays, *shared: Any) -> tuple[Any, Any]:
        leading = rows.batch.leading
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(leading) :]), rows)
        by_row, of_head = operation(shards, flat, *shared)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), by_row), of_head

    if shards is None:
        return over_rows(partitioned(on_any_shape))
    return over_rows(functools.partial(on_any_shape, shards))


def over_rows_only(operation: Callable[..., Any]) -> Callable[..., Any]:
    """As `streamed`, for an operation whose head, if it has one, is not split: `(by_row, *shared) -> by_row`.

    `by_row` is any tree of `[..., *K]` leaves, the first of them `[..., K]`; the operation sees them flat.
    """

    def entered(by_row: Any, *shared: Any) -> Any:
        (first, *others), structure = jax.tree.flatten(by_row)

        def headless(shards: Shards, rows: RowArrays, head: None, *shared: Any) -> tuple[Any, None]:
            del shards, head
            return operation(jax.tree.unflatten(structure, [rows.batch.hidden, *rows.more]), *shared), None

        return streamed(None, headless)(RowArrays(Batch(first), None, more=others), None, *shared)[0]

    return entered


def at_lowering[Variant, Out](variants: Sequence[Variant], operation: Callable[..., Out], *arrays: Any) -> Out:
    """`operation(variant, *arrays)`: the first of `variants` in a program lowered for CUDA, the second in any other.

    Both are traced and must return the same types; only one is lowered. A single variant is for every platform.
    """
    cuda, *others = (functools.partial(operation, variant) for variant in variants)
    if not others:
        return cuda(*arrays)
    (default,) = others
    return lax.platform_dependent(*arrays, cuda=cuda, default=default)
