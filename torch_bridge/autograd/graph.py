"""What the autograd graph around a call asks of its backward, and where a weight's gradient goes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autograd import first_order
from torch_bridge.programs.program import Layout, Signature

# The weight is the second tensor of every operation.
_WEIGHT = 1


def save(ctx: Any, layout: Layout, inputs: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Saves what the backward of a forward on `inputs` needs, of those and of what it found."""
    # An output that is not needed is not saved: the caller may change it in place.
    reread = [x if i in layout.reread or i >= len(layout.outputs) else None for i, x in enumerate(found)]
    ctx.save_for_backward(*inputs, *reread)
    ctx.set_materialize_grads(False)


def asked(
    ctx: Any, signature: Signature, needed: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> tuple[str, ...]:
    """Names of the inputs whose gradients this backward pass uses; `needed` is of the signature's inputs."""
    if all(x is None for x in cotangents):
        return ()
    first_order.reverse_mode({f"the gradient of output {i}": x for i, x in enumerate(cotangents)})
    # Tensors that are missing have no edge.
    return tuple(
        [
            name
            for (name, _), is_needed, (node, _) in zip(signature.arrays, needed, ctx.next_functions, strict=False)
            if is_needed and name in signature.differentiated and _is_asked(node)
        ]
    )


def placed(ctx: Any, asked: Sequence[str], gradients: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Gradients by name, but the weight's where a `main_grad` has taken it."""
    found: dict[str, Tensor | None] = dict(zip(asked, gradients, strict=True))
    if (gradient := found.get("linear_weight")) is not None:
        found["linear_weight"] = _into_main_grad(ctx.next_functions[_WEIGHT][0], gradient)
    return found


def _is_asked(node: Any | None) -> bool:
    """Whether this backward pass uses the gradient: `torch.autograd.grad` and zero-bubble schedules ask for a part.

    `needs_input_grad` only knows what could be asked for. Whoever captures a leaf's gradient needs it.
    """
    return node is None or torch.compiler.is_compiling() or _is_executed(node) is not False


def _is_captured(node: Any) -> bool:
    """Whether `torch.autograd.grad` returns the gradient of this leaf in place of accumulating it."""
    return not torch.compiler.is_compiling() and _is_executed(node) is None


def _is_executed(node: Any) -> bool | None:
    """Whether this backward pass goes on there; None for a leaf that it stops at, for which PyTorch raises an error."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def _into_main_grad(node: Any | None, gradient: Tensor) -> Tensor | None:
    """Adds to the weight's float32 `main_grad`, where it has one, in place of `.grad`.

    `grad_added_to_main_grad` is the convention of Megatron-LM, whose hooks still expect a gradient to arrive: one that
    nobody reads, or zeros where `zero_out_wgrad` says that the embedding's will be added to it.

    What `torch.autograd.grad` asks for it gets, and `main_grad` stays as it is. Under `torch.compile` the node is not
    the leaf's, and `.grad` is filled. The gradient of each microbatch has been rounded to the weight's dtype.
    """
    weight: Any = getattr(node, "variable", None)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or _is_captured(node):
        return gradient
    main_grad.add_(gradient)
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(gradient) if zeros else torch.empty_like(gradient)
    return None
