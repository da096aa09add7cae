"""What a head reads of other modules of the model: an embedding, a linear layer, a layer with an adapter (LoRA)."""

from typing import Any, NamedTuple

import jax
from flax import nnx


class Parameters(NamedTuple):
    """The parameters of a head.

    Attributes:
        weight: `[V, H]` (`vocab_axis` 0) or `[H, V]` (1).
        vocab_axis: 0 or 1.
        bias: `[V]`, or None.
        lora: the adapter `lora_a [H, r]` and `lora_b [r, V]`, or None.
    """

    weight: nnx.Variable[Any]
    vocab_axis: int
    bias: nnx.Variable[Any] | None = None
    lora: nnx.LoRA | None = None


def embedding(embed: nnx.Module | nnx.Param[Any]) -> nnx.Variable[Any]:
    """The parameter of an embedding given as a module or as that parameter."""
    parameter = embed if isinstance(embed, nnx.Variable) else getattr(embed, "embedding", None)
    if not isinstance(parameter, nnx.Variable):
        cure = "build the head with LossHead.of_linear" if isinstance(embed, nnx.Linear | nnx.LoRA) else (
            "pass an nnx.Embed, or its parameter `embed.embedding`"
        )  # fmt: skip
        raise TypeError(f"embed is a {type(embed).__name__}: {cure}")
    return parameter


def layer(linear: nnx.Module) -> nnx.Linear:
    """The layer that has the kernel: inside an `nnx.LoRA`, or itself.

    Raises:
        TypeError: neither a layer of Flax nor an adapter of one, or one that multiplies in a way of its own.
        ValueError: an adapter of a layer that has one.
    """
    inner = linear.base_module if isinstance(linear, nnx.LoRA) else linear
    if inner is not linear and isinstance(inner, nnx.LoRA | nnx.LoRALinear):
        raise ValueError(f"linear is an nnx.LoRA of an {type(inner).__name__}: a head takes one adapter, so merge one")
    if type(inner) not in (nnx.Linear, nnx.LoRALinear):
        found = type(linear).__name__ if inner is linear else f"LoRA of a {type(inner).__name__}"
        raise TypeError(
            f"linear is a {found}: pass an nnx.Linear, an nnx.LoRALinear, or an nnx.LoRA whose base_module is an "
            "nnx.Linear"
        )
    assert isinstance(inner, nnx.Linear)
    if inner.dot_general is not jax.lax.dot_general:
        raise TypeError("linear has a dot_general of its own, which the head would not call: make it jax.lax's")
    return inner


def parameters(linear: nnx.Module) -> Parameters:
    """The parameters of a layer that `layer` takes."""
    inner = layer(linear)
    lora = linear if isinstance(linear, nnx.LoRA) else getattr(inner, "lora", None)
    return Parameters(inner.kernel, 1, inner.bias, lora)
