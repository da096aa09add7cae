"""Operations in eager PyTorch past its dispatcher, whose wrapping of a Python operator costs more than the operation.

Compilation, dispatch modes and functional transforms need the operator; all others take this way, through the same
forward, context and gradients.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def serves(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but autograd follows a call on these tensors."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors if x is not None)
    )


class Eager(torch.autograd.Function):
    """`(*arguments, operation) -> outputs`, of a `torch_bridge.ops.Operation`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """The operation's."""
        *arguments, operation = inputs
        output = operation.forward(*arguments)
        operation.setup_context(ctx, tuple(arguments), output)
        ctx.operation = operation
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The operation's, and none for itself."""
        return (*ctx.operation.differentiate(ctx, cotangents), None)
