"""What the autograd graph around a call asks of its backward, and where a weight's gradient goes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autograd import first_order
from torch_bridge.programs.program import WEIGHT, Layout, Signature


def save(ctx: Any, layout: Layout, inputs: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Saves what the backward of a forward on `inputs` needs, of those and of what it found."""
    # An output that is not needed is not saved: the caller may change it in place.
    reread = [x if i in layout.reread or i >= layout.outputs else None for i, x in enumerate(found)]
    ctx.save_for_backward(*inputs, *reread)
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any,
    signature: Signature,
    needed: Sequence[bool],
    cotangents: Sequence[Tensor | None],
    compute: Callable[[tuple[str, ...], Tensor | None], Sequence[Tensor]],
) -> dict[str, Tensor | None]:
    """What a backward returns by inputs' names; no other gradients are computed than those that this pass uses.

    Args:
        ctx: autograd's.
        signature: the forward's.
        needed: which of its inputs could have a gradient.
        cotangents: of the differentiable outputs.
        compute: `(names, sum or None) -> gradients`; in place of the weight's it may return the sum with it added.
    """
    if all(x is None for x in cotangents):
        return {}
    first_order.reverse_mode({f"the gradient of output {i}": x for i, x in enumerate(cotangents)})
    # Tensors that are missing have no edge.
    asked = tuple(
        [
            name
            for (name, _), is_needed, (node, _) in zip(signature.arrays, needed, ctx.next_functions, strict=False)
            if is_needed and name in signature.differentiated and _is_executed(node) is not False
        ]
    )
    if not asked:
        return {}
    weight, total = _main_grad(ctx, asked)
    found: dict[str, Tensor | None] = dict(zip(asked, compute(asked, total), strict=True))
    if total is not None:
        found["linear_weight"] = _arrives(weight, total, found["linear_weight"])
    return found


def _main_grad(ctx: Any, asked: Sequence[str]) -> tuple[Any, Tensor | None]:
    """The weight and its `main_grad`, where it has one and its gradient is to be added there in place of `.grad`.

    `torch.autograd.grad` gets the gradient that it asks for, and `main_grad` does not change. Under `torch.compile` the
    node is not the leaf's, and `.grad` is filled.
    """
    node = ctx.next_functions[WEIGHT][0]
    weight = getattr(node, "variable", None)
    if "linear_weight" not in asked or _is_executed(node) is None:
        return weight, None
    return weight, getattr(weight, "main_grad", None)


def _arrives(weight: Any, total: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Adds the gradient to `main_grad`, and returns what comes in its place.

    `grad_added_to_main_grad` is the convention of Megatron-LM, whose hooks still expect a gradient to arrive: one that
    nobody reads, or zeros where `zero_out_wgrad` says that the embedding's will be added to it.
    """
    if gradient is not None and gradient is not total:
        total.add_(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like)(weight)


def _is_executed(node: Any | None) -> bool | None:
    """Whether this backward pass uses the gradient: `torch.autograd.grad` and zero-bubble schedules ask for a part.

    `needs_input_grad` only knows what could be asked for. None for a leaf whose gradient `torch.autograd.grad` returns
    in place of accumulating it; for such a leaf PyTorch raises an error.
    """
    if node is None or torch.compiler.is_compiling():
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None
