"""What autograd saves around a call and asks of its backward, and eager calls past PyTorch's dispatcher.

The dispatcher's wrapping of a Python operator costs more than the operation. Compilation, dispatch modes and constants
in functional transforms need the operator. All other calls are `Eager`, with the same programs, saved tensors and
gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from torch_bridge.autograd import first_order, partitioned
from torch_bridge.dlpack import exchange
from torch_bridge.programs import calls
from torch_bridge.programs.program import WEIGHT, Program, Signature

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
    """`(*tensors, operation, program, static) -> outputs`, for an `Operation` and its arguments behind the tensors.

    Without missing tensors: autograd takes as long for None as for a tensor.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """The program's outputs; saves what else the backward needs."""
        *tensors, ctx.operation, program, ctx.static = inputs
        ctx.program = program
        found = calls.forward(program, tensors, program.staying)
        # Numbers by row, which live as long as the graph.
        ctx.staying = {i: found[i] for i in program.staying}
        save(ctx, program, tensors, [x if isinstance(x, Tensor) else None for x in found])
        outputs = [x for x in found[: program.outputs] if isinstance(x, Tensor)]
        ctx.mark_non_differentiable(*outputs[program.differentiable :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors, and none for the rest."""
        program: Program = ctx.program
        signature = program.signature
        count, saved, given = len(signature.arrays), ctx.saved_tensors, cotangents[: program.differentiable]
        # Only the operator raises where these gradients are to be differentiated in turn.
        is_served = serves((*saved, *given)) and not torch.is_grad_enabled()
        # "auto" chooses by the number of rows. Processes may have different ones, and must gather equally often.
        reads = () if is_served and signature.options.backward == "in_forward" else saved

        def compute(asked: tuple[str, ...], total: Tensor | None) -> Sequence[Tensor]:
            tensors, found = saved[:count], list(saved[count:])
            if is_served:
                for place, array in ctx.staying.items():
                    found[place] = array
                return _computed(program, tensors, found, given, asked, total)
            for place, array in ctx.staying.items():
                found[place] = exchange.to_torch(array)[: tensors[0].shape[0]]
            named = {name: x for (name, _), x in zip(signature.arrays, tensors, strict=True)}
            operation: Any = ctx.operation
            return list(operation.call_backward(named, ctx.static, found, given, asked))

        made = gradients(ctx, signature, reads, ctx.needs_input_grad, given, compute)
        return (*[made.get(name) for name, _ in signature.arrays], None, None, None)


def _computed(
    program: Program,
    tensors: Sequence[Tensor],
    found: Sequence[Tensor | jax.Array | None],
    given: Sequence[Tensor | None],
    asked: tuple[str, ...],
    total: Tensor | None,
) -> list[Tensor]:
    """The gradients in `asked`; unless the graph is kept, it hands over the ones that lack the upstream scalar only.

    A `total` to which the backward can add the weight's gradient is returned in place of that.
    """
    if total is not None and calls.adds_to(program, total, tensors[WEIGHT], asked):
        return calls.backward(program, tensors, found, given, asked, total)
    kept_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    handed = () if kept_graph else tuple(name for name in asked if name in program.scaled)
    others = tuple(name for name in asked if name not in handed)
    made: dict[str, Tensor] = {}
    if others:
        made |= zip(others, calls.backward(program, tensors, found, given, others), strict=True)
    if handed:
        (upstream,) = given
        assert upstream is not None
        made |= zip(handed, calls.handed_over(program, tensors, found, upstream, handed), strict=True)
    return [made[name] for name in asked]


def save(ctx: Any, program: Program, inputs: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Saves what the backward of a forward on `inputs` needs, of those and of what it found."""
    # An output that is not needed is not saved: the caller may change it in place.
    reread = [x if i in program.reread or i >= program.outputs else None for i, x in enumerate(found)]
    ctx.save_for_backward(*inputs, *reread)
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any,
    signature: Signature,
    reads: Sequence[Tensor | None],
    needed: Sequence[bool],
    cotangents: Sequence[Tensor | None],
    compute: Callable[[tuple[str, ...], Tensor | None], Sequence[Tensor]],
) -> dict[str, Tensor | None]:
    """What a backward returns by inputs' names; no other gradients are computed than those that this pass uses.

    Args:
        ctx: autograd's.
        signature: the forward's.
        reads: saved tensors, which are whole while `compute` reads them.
        needed: which of its inputs could have a gradient.
        cotangents: of the differentiable outputs.
        compute: `(names, sum or None) -> gradients`; in place of the weight's it may return the sum with it added.
    """
    if all(x is None for x in cotangents):
        return {}
    first_order.reverse_mode({f"the gradient of output {i}": x for i, x in enumerate(cotangents)})
    # Tensors that are missing have no edge.
    nodes = {
        name: node
        for (name, _), is_needed, (node, _) in zip(signature.arrays, needed, ctx.next_functions, strict=False)
        if is_needed and name in signature.differentiated and _is_executed(node) is not False
    }
    if not nodes:
        return {}
    asked = tuple(nodes)
    weight, total = _main_grad(ctx, asked)
    with partitioned.gathered(reads):
        found: dict[str, Tensor | None] = dict(zip(asked, compute(asked, total), strict=True))
    for node in nodes.values():
        if partitioned.is_partitioned(leaf := getattr(node, "variable", None)) and _is_executed(node):
            partitioned.accept(leaf)
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
