"""`LowRank`: a weight with a low-rank term (LoRA), which is never added to it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_ce.api import checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """Stands for `weight + scale · up · down` wherever a function takes a head's weight; a pytree.

    Logits are `hidden·weight + scale·(hidden·down)·up`: not even a tile of the sum is made, nor a gradient of its size.
    With the weight frozen a loss with gradients takes two large products in place of three (of a weight trained with
    it, three), and beside the gradients of `up` and `down` a few numbers for each row and column. A gradient has this
    structure too; to freeze the weight, differentiate `up` and `down` alone, as below.

    `up` and `down` may have another dtype than the weight, float32 beside bfloat16, say. They are multiplied in the
    call's compute dtype, which does not depend on theirs, and their gradients have theirs.

    Attributes:
        weight: `[V', H]`, or `[H, V']` with `vocab_axis=1`.
        up: `[V', r]`, or `[r, V']`: LoRA's B.
        down: `[r, H]`, or `[H, r]`: LoRA's A. Inside a `shard_map` `up` has the part of the vocabulary that the weight
            has, and `down` is whole.
        scale: LoRA's α/r, a Python number; to train or trace one, multiply `up` by it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import LowRank, linear_cross_entropy
        >>> hidden, weight = jnp.ones((6, 8)), jnp.ones((100, 8))
        >>> up, down = jnp.zeros((100, 2)), jax.random.normal(jax.random.key(0), (2, 8))
        >>> def loss(adapter, hidden):
        ...     up, down = adapter
        ...     return linear_cross_entropy(hidden, LowRank(weight, up, down, scale=2.0), jnp.arange(6))
        >>> (d_up, d_down), d_hidden = jax.grad(loss, (0, 1))((up, down), hidden)
        >>> d_up.shape, d_down.shape
        ((100, 2), (2, 8))

    References:
        "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al.), section 4.1.
    """

    weight: Any
    up: Any
    down: Any
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})


# What a call takes as a weight.
type WeightLike = checks.ArrayLike | LowRank


def read(weight: Any, convert: Callable[[str, Any], Any] = checks.array, name: str = "weight") -> LowRank:
    """The arrays of `weight`, as `convert(name, value)` makes them; `up` and `down` are None where it has no term.

    `name` is what errors call the weight.
    """
    if not isinstance(weight, LowRank):
        return LowRank(convert(name, weight), None, None)
    scale = weight.scale
    if not checks.is_plain(scale) or isinstance(scale, bool):
        raise TypeError(
            f"{name}.scale is a {type(scale).__name__}; it must be a Python number: multiply {name}.up by a traced or "
            "trained factor"
        )
    up, down = convert(f"{name}.up", weight.up), convert(f"{name}.down", weight.down)
    return LowRank(convert(f"{name}.weight", weight.weight), up, down, checks.scalar(f"{name}.scale", scale))
