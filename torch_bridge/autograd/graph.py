"""What autograd saves around a call and asks of its backward, by the operator or past PyTorch's dispatcher.

The dispatcher's wrapping of a Python operator costs more than the operation. Only compilation, dispatch modes and
constants in functional transforms need it. All other calls are `Eager`, with the same programs and saved tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge.autograd import OPERATORS, first_order, partitioned
from torch_bridge.dlpack import exchange
from torch_bridge.programs import calls
from torch_bridge.programs.program import WEIGHT, Program

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def serves(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd alone follows a call on these tensors."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not _PLAIN.issuperset(map(type, tensors))
    )


class Eager(torch.autograd.Function):
    """`(*tensors, operation, program, static) -> outputs`, for an `Operation` and its arguments."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """The program's outputs."""
        *tensors, operation, program, static = inputs
        found = calls.forward(program, tensors, program.staying)
        save(ctx, operation, program, static, tensors, found, True)
        return tuple(found[: program.outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors, and none for the rest."""
        return differentiate(ctx, cotangents)


def save(
    ctx: Any, operation: Any, program: Program, static: Any, tensors: Sequence[Any], found: Sequence[Any], eager: bool
) -> None:
    """Saves what `differentiate` needs of a forward on `tensors`, and of what it found."""
    ctx.operation, ctx.program, ctx.static, ctx.eager = operation, program, static, eager
    # JAX's arrays: numbers by row, which live as long as the graph.
    ctx.staying = {i: x for i, x in enumerate(found) if not isinstance(x, Tensor)}
    # An output that is not needed is not saved: the caller may change it in place.
    needed = [i not in ctx.staying and (i in program.reread or i >= program.outputs) for i in range(len(found))]
    ctx.save_for_backward(*tensors, *[x if wanted else None for x, wanted in zip(found, needed, strict=True)])
    ctx.mark_non_differentiable(*[x for x in found[program.differentiable :] if isinstance(x, Tensor)])
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments; none are computed but those that this backward pass uses."""
    names, given = ctx.operation.tensors, cotangents[: ctx.program.differentiable]
    made = _gradients(ctx, given) if any(x is not None for x in given) else {}
    return (*map(made.get, names), *[None] * (len(ctx.needs_input_grad) - len(names)))


def _gradients(ctx: Any, given: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """What the backward returns, by names of tensors."""
    first_order.reverse_mode({f"the gradient of output {i}": x for i, x in enumerate(given)})
    signature, saved, names = ctx.program.signature, ctx.saved_tensors, ctx.operation.tensors
    tensors, found = saved[: len(names)], list(saved[len(names) :])
    # Tensors that are missing have no edge.
    edges = zip([name for name, _ in signature.arrays], ctx.next_functions, strict=False)
    possible = {name for name, is_needed in zip(names, ctx.needs_input_grad, strict=False) if is_needed}
    possible.intersection_update(signature.differentiated)
    nodes = {name: node for name, (node, _) in edges if name in possible and _is_executed(node) is not False}
    if not nodes:
        return {}
    asked = tuple(nodes)
    # Only the operator raises where these gradients are to be differentiated in turn.
    is_served = ctx.eager and serves((*saved, *given)) and not torch.is_grad_enabled()
    # "auto" chooses by the number of rows. Processes may have different ones, and must gather equally often.
    reads = () if is_served and signature.options.backward == "in_forward" else saved
    weight, total = _main_grad(ctx, asked)
    with partitioned.gathered(reads):
        for place, array in ctx.staying.items():
            found[place] = array if is_served else exchange.to_torch(array)[: tensors[0].shape[0]]
        made: dict[str, Tensor | None]
        if is_served:
            made = _computed(ctx.program, tensors, found, given, asked, total)
        else:
            backward = getattr(OPERATORS, f"{ctx.operation.name}_backward")
            gradients = backward(*tensors, *ctx.static, found, list(given), ",".join(asked))
            made = dict(zip(asked, gradients, strict=True))
    for node in nodes.values():
        if partitioned.is_partitioned(leaf := getattr(node, "variable", None)) and _is_executed(node):
            partitioned.accept(leaf)
    if total is not None:
        made["linear_weight"] = _arrives(weight, total, made["linear_weight"])
    return made


def _computed(
    program: Program, tensors: Any, found: Any, given: Any, asked: tuple[str, ...], total: Tensor | None
) -> dict[str, Tensor | None]:
    """The gradients in `asked`; unless the graph is kept, the forward's own are scaled in place and returned.

    A `total` to which the backward can add the weight's gradient is returned in place of that.
    """
    kept_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    handed = () if kept_graph else tuple([name for name in asked if name in program.scaled])
    made: dict[str, Tensor | None] = {}
    if handed:
        made |= zip(handed, calls.handed_over(program, found, given[0], handed), strict=True)
    if others := tuple([name for name in asked if name not in handed]):
        # Programs that add to it hand nothing over.
        into = [total] if total is not None and calls.adds_to(program, total, tensors[WEIGHT], asked) else []
        made |= zip(others, calls.backward(program, tensors, found, given, others, *into), strict=True)
    return made


def _main_grad(ctx: Any, asked: Sequence[str]) -> tuple[Any, Tensor | None]:
    """The weight and its `main_grad`, where it has one and its gradient is to be added there in place of `.grad`.

    `torch.autograd.grad` gets the gradient that it asks for, and `main_grad` does not change. Under `torch.compile` the
    node is not the leaf's, and `.grad` is filled.
    """
    node = ctx.next_functions[WEIGHT][0]
    weight = getattr(node, "variable", None)
    accumulates = "linear_weight" in asked and _is_executed(node) is not None
    return weight, getattr(weight, "main_grad", None) if accumulates else None


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

    None for a leaf whose gradient `torch.autograd.grad` returns and does not accumulate: there PyTorch raises an error.
    """
    if node is None or torch.compiler.is_compiling():
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None
