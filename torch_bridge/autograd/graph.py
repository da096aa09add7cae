"""What autograd saves around a call and asks of its backward, by the operator or past PyTorch's dispatcher.

The dispatcher's wrapping of a Python operator costs more than the operation. Only compilation, dispatch modes and
constants in functional transforms need it. All other calls are `Eager`, with the same programs and saved tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pallas_ce import LowRank
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


class Call(NamedTuple):
    """A call of an `Operation`, which holds no tensor.

    Attributes:
        operation: its operator and programs.
        takes: for the tensors that there are, functions of the arguments that have their names.
        static: the operator's static arguments.
        program: the program, where autograd alone follows the call.
    """

    operation: Any
    takes: Mapping[str, Any]
    static: tuple[Any, ...]
    program: Program | None

    def taken(self, given: Mapping[str, Any]) -> list[Tensor]:
        """The tensors, of a public function's arguments."""
        if isinstance(weight := given["linear_weight"], LowRank):
            given = {**given, "linear_weight": weight.weight, "linear_up": weight.up, "linear_down": weight.down}
        return [take(given.get(name)) for name, take in self.takes.items()]

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The function's outputs, differentiable as the tensors require it."""
        if self.program is None:
            found: list[Tensor] = getattr(OPERATORS, self.operation.name)(*self.of_operator(tensors), *self.static)
            return found
        if not self.static[0]:
            return calls.forward(self.program, tensors)
        function: Any = Eager
        outputs: tuple[Tensor, ...] = function.apply(*tensors, self)
        return outputs

    def of_operator(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """All tensors of the operator; None for those that are missing."""
        return list(map(dict(zip(self.takes, tensors, strict=True)).get, self.operation.tensors))


class Eager(torch.autograd.Function):
    """`(*tensors, call) -> outputs`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """The program's outputs."""
        *tensors, call = inputs
        program = call.program
        found = calls.forward(program, tensors, program.staying)
        save(ctx, call, tensors, found, True)
        return tuple(found[: program.outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors, and none for the rest."""
        return differentiate(ctx, cotangents)


def save(ctx: Any, call: Call, tensors: Sequence[Tensor], found: Sequence[Any], eager: bool) -> None:
    """Saves what `differentiate` needs of a forward on `tensors`, and of what it found."""
    program: Any = call.program
    ctx.call, ctx.eager = call, eager
    # JAX's arrays: numbers by row, which live as long as the graph.
    ctx.staying = {i: found[i] for i in program.staying} if eager else {}
    # An output that is not needed is not saved: the caller may change it in place.
    unsaved = program.unread | ctx.staying.keys()
    ctx.save_for_backward(*tensors, *[None if i in unsaved else x for i, x in enumerate(found)])
    others = [x for i, x in enumerate(found) if i >= program.differentiable and i not in ctx.staying]
    if others:
        ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments; none are computed but those that this backward pass uses."""
    names = ctx.call.takes if ctx.eager else ctx.call.operation.tensors
    given = cotangents[: ctx.call.program.differentiable]
    made = _gradients(ctx, given) if any(x is not None for x in given) else {}
    return (*map(made.get, names), *[None] * (len(ctx.needs_input_grad) - len(names)))


def _gradients(ctx: Any, given: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """What the backward returns, by names of tensors."""
    first_order.one_by_one(given)
    first_order.reverse_mode({f"the gradient of output {i}": x for i, x in enumerate(given)})
    call, saved = ctx.call, ctx.saved_tensors
    signature, count = call.program.signature, len(call.takes)
    tensors, found = saved[:count], list(saved[count:])
    # Tensors that are missing have no edge.
    edges = zip(call.takes, ctx.next_functions, strict=False)
    possible = {name: node for name, (node, _) in edges if node is not None and name in signature.differentiated}
    nodes = {name: node for name, node in possible.items() if _is_executed(node) is not False}
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
            made = _computed(call.program, tensors, found, given, asked, total)
        else:
            backward = getattr(OPERATORS, f"{call.operation.name}_backward")
            gradients = backward(*call.of_operator(tensors), *call.static, found, list(given), ",".join(asked))
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
    weight: Any = getattr(node, "variable", None)
    accumulates = "linear_weight" in asked and _is_executed(node) is not None
    total = getattr(weight, "main_grad", None) if accumulates else None
    if total is not None and not (total.shape == weight.shape and total.is_floating_point()):
        raise ValueError(
            f"linear_weight.main_grad has shape {tuple(total.shape)} and dtype {total.dtype}; it must be "
            f"{tuple(weight.shape)}, of a floating dtype"
        )
    return weight, total


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
