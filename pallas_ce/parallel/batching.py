"""How the streamed operations behave under `vmap`: one rule for all of them.

Rows are independent given the head, so a batch that shares the head is just more rows: it folds into them, and the
weight is streamed once for all examples. Where the head itself is batched, or a gradient of the head is needs_grad for
each example, the operation maps over the batch, one example's scratch at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

RowsOperation = Callable[..., tuple[Any, Any]]


def over_rows(operation: RowsOperation) -> RowsOperation:
    """Gives `operation` its `vmap` rule.

    Args:
        operation: `(by_row, *shared) -> (by_row, of_head)` on pytrees: leaves of `by_row` share their leading
            dimensions, of which there may be any number.
    """

    @custom_vmap
    def batched(by_row: Any, *shared: Any) -> tuple[Any, Any]:
        return operation(by_row, *shared)

    @batched.def_vmap
    def rule(size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        is_batched = jax.tree.unflatten(jax.tree.structure(arguments), jax.tree.leaves(in_batched))
        per_example = jax.eval_shape(operation, *jax.tree.map(_one_example, arguments, is_batched))
        if size == 0:
            out = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), per_example)
        elif any(jax.tree.leaves(is_batched[1:])) or jax.tree.leaves(per_example[1]):
            out = _map(batched, arguments, is_batched)
        else:
            out = batched(_fold(size, arguments[0], is_batched[0]), *arguments[1:])
        return out, jax.tree.map(lambda _: True, out)

    return batched


def _one_example(x: jax.Array, is_batched: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:] if is_batched else x.shape, x.dtype)


def _fold(size: int, by_row: Any, is_batched: Any) -> Any:
    """The batch as one more leading dimension of every leaf."""
    return jax.tree.map(
        lambda x, flag: x if flag else lax.broadcast_in_dim(x, (size, *x.shape), tuple(range(1, x.ndim + 1))),
        by_row, is_batched,
    )  # fmt: skip


def _map(operation: RowsOperation, arguments: tuple[Any, ...], is_batched: Any) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(is_batched)

    def one(batched: list[jax.Array]) -> tuple[Any, Any]:
        example = iter(batched)
        chosen = [next(example) if b else x for x, b in zip(leaves, flags, strict=True)]
        return operation(*jax.tree.unflatten(structure, chosen))

    return lax.map(one, [x for x, b in zip(leaves, flags, strict=True) if b])
