"""What the functions refuse to differentiate: forward mode, transforms of `torch.func`, and gradients of gradients.

Each of these would give zeros, wrong numbers, or an error of PyTorch's that names no cause.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ONLY = (
    "torch_bridge has first derivatives in reverse mode only, by backward() or torch.autograd.grad: for others compute "
    "the loss of stored logits in plain PyTorch"
)


def reverse_mode(tensors: Mapping[str, Tensor | None]) -> None:
    """Raises NotImplementedError for a tensor that forward mode or a transform of `torch.func` follows.

    Operators would take it for a constant there, or fail with what PyTorch says of them.
    """
    # Dynamo can trace the level of forward mode; in other transforms it refuses the operators.
    tracing = torch.compiler.is_compiling()
    in_transform = not tracing and torch._C._functorch.peek_interpreter_stack() is not None
    if not in_transform and forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and (what := _followed_by(tensor, tracing, in_transform)):
            raise NotImplementedError(f"{name} {what}; {_ONLY}")


def _followed_by(tensor: Tensor, tracing: bool, in_transform: bool) -> str | None:
    """What would be lost of the tensor, in words."""
    if tracing:
        return "is compiled inside forward-mode differentiation"
    if in_transform:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "is inside a transform of torch.func (grad, jvp, vmap, ...)"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "requires a gradient inside a transform of torch.func (grad, jvp, vmap, ...)"
    in_forward_mode = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    if in_forward_mode and forward_ad.unpack_dual(tensor).tangent is not None:
        return "has a tangent of forward-mode differentiation"
    return None


def one_by_one(cotangents: Iterable[Tensor | None]) -> None:
    """Raises NotImplementedError for a cotangent that stands for a batch of them."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in cotangents):
        raise NotImplementedError(f"a gradient is batched: leave out vectorize=True, or is_grads_batched=True; {_ONLY}")


def refuse(ctx: Any, *_: Any) -> NoReturn:
    """The derivative of every gradient."""
    raise NotImplementedError(f"a gradient is differentiated again; {_ONLY}")


def final(gradients: Sequence[Tensor], of: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Gradients that a backward has computed without a graph; differentiating them again raises an error.

    They depend on `of`. Alone, PyTorch would take them for constants where it makes a graph of the backward.
    """
    depends = [x for x in of if x is not None and x.requires_grad] if torch.is_grad_enabled() else []
    function: Any = _Final
    return function.apply(len(depends), *depends, *gradients) if depends else gradients


class _Final(torch.autograd.Function):
    """`(n, *n tensors, *gradients) -> gradients`."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([gradient.detach() for gradient in tensors[count:]])

    backward = staticmethod(refuse)


def differentiable_once(tensor: Tensor | None) -> Tensor | None:
    """The tensor as an input of differentiable PyTorch operators whose result is differentiable once."""
    # A compiled function cannot be differentiated twice in any case.
    if tensor is None or torch.compiler.is_compiling() or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    once = tensor.view_as(tensor)
    once.register_hook(lambda gradient: final([gradient], (gradient, tensor))[0])
    return once
