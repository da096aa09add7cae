"""Operations in eager PyTorch past its dispatcher, whose wrapping of a Python operator costs more than the operation.

Compilation, dispatch modes and constants in functional transforms need the operator. All other calls take this way,
with the same programs, saved tensors and gradients.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from torch_bridge.autograd import graph
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
    """`(*tensors, operation, program, static) -> outputs`, for an `Operation` and its arguments behind the tensors.

    Without missing tensors: autograd takes as long for None as for a tensor.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """The program's outputs; saves what else the backward needs."""
        *tensors, ctx.operation, program, ctx.static = inputs
        ctx.program = program
        layout = program.layout
        found = calls.forward(program, tensors, layout.staying)
        # Numbers by row, which live as long as the graph.
        ctx.staying = {i: found[i] for i in layout.staying}
        graph.save(ctx, layout, tensors, [x if isinstance(x, Tensor) else None for x in found])
        outputs = [x for x in found[: layout.outputs] if isinstance(x, Tensor)]
        ctx.mark_non_differentiable(*outputs[layout.differentiable :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors, and none for the rest."""
        program: Program = ctx.program
        signature, layout = program.signature, program.layout
        count, saved, given = len(signature.arrays), ctx.saved_tensors, cotangents[: layout.differentiable]

        def compute(asked: tuple[str, ...], total: Tensor | None) -> Sequence[Tensor]:
            tensors, found = saved[:count], list(saved[count:])
            # Only the operator raises where these gradients are to be differentiated in turn.
            if serves((*saved, *given)) and not torch.is_grad_enabled():
                for place, array in ctx.staying.items():
                    found[place] = array
                return _computed(program, tensors, found, given, asked, total)
            for place, array in ctx.staying.items():
                found[place] = exchange.to_torch(array)[: tensors[0].shape[0]]
            named = {name: x for (name, _), x in zip(signature.arrays, tensors, strict=True)}
            operation: Any = ctx.operation
            return list(operation.call_backward(named, ctx.static, found, given, asked))

        gradients = graph.gradients(ctx, signature, ctx.needs_input_grad, given, compute)
        return (*[gradients.get(name) for name, _ in signature.arrays], None, None, None)


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
    gradients: dict[str, Tensor] = {}
    if others:
        gradients |= zip(others, calls.backward(program, tensors, found, given, others), strict=True)
    if handed:
        (upstream,) = given
        assert upstream is not None
        gradients |= zip(handed, calls.handed_over(program, tensors, found, upstream, handed), strict=True)
    return [gradients[name] for name in asked]
