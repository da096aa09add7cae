"""What the autograd graph around a call asks of its backward, and where a weight's gradient goes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def node_of(ctx: Any, tensors: Sequence[Tensor | None], position: int) -> Any | None:
    """The autograd node that the gradient of the tensor at `position` goes to."""
    edges = ctx.next_functions
    return edges[sum(x is not None for x in tensors[:position])][0]


def is_asked(ctx: Any, tensors: Sequence[Tensor | None], position: int) -> bool:
    """Whether this backward pass uses the gradient: `torch.autograd.grad` and zero-bubble schedules ask for a part.

    `needs_input_grad` only knows what could be asked for. Whoever captures a leaf's gradient needs it; PyTorch says so
    by raising RuntimeError.
    """
    node = node_of(ctx, tensors, position)
    if node is None or torch.compiler.is_compiling():
        return True
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def into_main_grad(node: Any | None, gradient: Tensor) -> Tensor | None:
    """Adds to the weight's float32 `main_grad`, where it has one, in place of `.grad`.

    `grad_added_to_main_grad` is the convention of Megatron-LM, whose hooks still expect a gradient to arrive.
    """
    weight: Any = getattr(node, "variable", None)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return gradient
    main_grad.add_(gradient)
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        return torch.empty_like(gradient)
    return None
