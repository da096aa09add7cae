"""The operations as PyTorch operators: implementation, shapes for tracing, and differentiation, once for all of them.

An operator returns the function's outputs and, behind them, what its backward needs, which is an operator too.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

import pallas_ce
from pallas_ce.api import integration
from torch_bridge.autograd import OPERATORS, first_order, graph, register
from torch_bridge.dlpack import exchange
from torch_bridge.programs import calls
from torch_bridge.programs import program as programs
from torch_bridge.programs.functions import Function, Options
from torch_bridge.programs.program import Program, Shape, Signature

# Tensors of every head: the low-rank term of its weight is `[V, r]` and `[r, H]`.
_HEAD = ("input", "linear_weight", "target", "linear_up", "linear_down", "linear_bias", "logit_scale")
_TEACHER = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_logit_scale")
_CONSTANT = {*_TEACHER, "target", "support", "class_weights", "logit_weights"}
_CONSTANT |= {"row_mask", "temperature", "parts", "sums"}

# The fill of padded rows, for each tensor with one entry a row; a scalar in its place serves all rows.
_BY_ROW = dict.fromkeys(("input", "teacher_input", "token_weights", "row_mask", "parts", "sums"), 0)
_BY_ROW |= {"temperature": 1, "target": -1, "support": -1}

# All but `vocab_axis`, in the order of the operators' schemas: what a call may leave out, and the types.
_DEFAULTS = dict(zip(Options._fields[1:], Options()[1:], strict=True))
_TYPES = {
    name: kind.__name__ if isinstance(kind, type) else str(kind).replace(" | None", "?")
    for name, kind in Options.__annotations__.items()
    if name in _DEFAULTS
}


class Operation:
    """An operator for a function of named arrays.

    `tensors` names its tensors in the order of its arguments: "input" `[N, H]` and "linear_weight" `[V, H]`, which are
    always there, come first.
    """

    def __init__(self, name: str, steps: Any, further: tuple[str, ...]) -> None:
        # Now and not when first read: torch.compile guards the attributes that a trace has read.
        self.name, self.tensors = name, _HEAD + further
        self.function = Function(getattr(pallas_ce, name.removesuffix("_of_parts")), steps)
        given = [f"Tensor{'' if x in _HEAD[:2] else '?'} {x}" for x in self.tensors]
        inputs = ", ".join([*given, "str differentiated", *[f"{kind} {x}" for x, kind in _TYPES.items()]])
        forward = register(name, self._forward, f"({inputs}) -> Tensor[]", self._forward_shapes)
        forward.register_autograd(graph.differentiate, setup_context=self._setup_context)
        inputs += ", Tensor?[] found, Tensor?[] cotangents, str asked"
        backward = register(f"{name}_backward", self._backward, f"({inputs}) -> Tensor[]", self._backward_shapes)
        backward.register_autograd(first_order.refuse)
        for of, is_backward in ((name, False), (f"{name}_backward", True)):
            flops = functools.partial(self._flops, is_backward)
            flop_counter.register_flop_formula(getattr(OPERATORS, of), get_raw=True)(flops)

    def call(self, checked: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[graph.Call, list[Tensor]]:
        """A call on a public function's arguments `given`, and its tensors.

        `checked` has by name what takes the tensors, and static arguments; ones that are missing have their defaults.
        """
        call = graph.Call(self, {x: take for x in self.tensors if (take := checked.get(x)) is not None}, (), None)
        tensors = call.taken(given)
        named = dict(zip(call.takes, tensors, strict=True))
        exchange.check_one_device(named)
        first_order.reverse_mode(named)
        follows = named.items() if torch.is_grad_enabled() else ()
        differentiated = [name for name, x in follows if x.requires_grad and name not in _CONSTANT]
        static = (",".join(differentiated), *[checked.get(name, default) for name, default in _DEFAULTS.items()])
        program = self.program(list(map(named.get, self.tensors)), static) if graph.serves(tensors) else None
        return call._replace(static=static, program=program), tensors

    def signature(self, tensors: Sequence[Any], static: Sequence[Any]) -> Signature:
        """The call's signature; both arguments are the operator's."""
        axis = _vocab_axis(tensors[1])
        shapes = []
        for name, tensor in zip(self.tensors, tensors, strict=True):
            if tensor is not None:
                if tensor.dtype != torch.int64:  # which is passed in words
                    exchange.check_width(name, tensor)
                sizes: tuple[int | None, ...] = tuple(map(int, tensor.shape[1:]))
                if tensor.ndim:
                    sizes = (None if name in _BY_ROW else int(tensor.shape[0]), *sizes)
                sizes = sizes[::-1] if axis and name == "linear_weight" else sizes
                shapes.append((name, Shape(sizes, exchange.TO_JAX[tensor.dtype], _BY_ROW.get(name, 0))))
        return Signature(
            self.function, Options(axis, *static[1:]), tuple(shapes), tuple(filter(None, static[0].split(",")))
        )

    def program(self, tensors: Sequence[Any], static: Sequence[Any]) -> Program:
        """The program for a call with the operator's arguments."""
        return programs.program(self.signature(tensors, static), calls.bucket(tensors[0].shape[0]))

    def _for_any_rows(self, arguments: Sequence[Any]) -> Program:
        return programs.program(self.signature(*self._split(arguments)), programs.ANY_ROWS)

    def _split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The forward's arguments, which a backward's begin with: tensors, and static ones."""
        count = len(self.tensors)
        return arguments[:count], arguments[count : count + 1 + len(_DEFAULTS)]

    def _forward(self, *arguments: Any) -> list[Tensor]:
        tensors, static = self._split(arguments)
        return calls.forward(self.program(tensors, static), _present(tensors))

    def _backward(self, *arguments: Any) -> list[Tensor]:
        tensors, static = self._split(arguments)
        found, cotangents, asked = arguments[-3:]
        program = self.program(tensors, static)
        return calls.backward(program, _present(tensors), found, cotangents, tuple(asked.split(",")))

    def _forward_shapes(self, *arguments: Any) -> list[Tensor]:
        rows, like = arguments[0].shape[0], arguments[0].new_empty
        return [
            like([rows if size is None else size for size in x.axes], dtype=exchange.TO_TORCH[x.dtype])
            for x in self._for_any_rows(arguments).found
        ]

    def _backward_shapes(self, *arguments: Any) -> list[Tensor]:
        asked = [(name, arguments[self.tensors.index(name)]) for name in arguments[-1].split(",")]
        return [
            torch.empty_like(x) if name == "linear_weight" and _vocab_axis(x) else x.new_empty(x.shape)
            for name, x in asked
        ]

    def _flops(self, is_backward: bool, *arguments: Any, **_: Any) -> int:
        """Of products with the weight and its low-rank term, and of one with a teacher's weight."""
        made = self._for_any_rows(arguments).sums
        if is_backward and made:
            return 0
        asked = {"input", "linear_weight"}.intersection(arguments[-1].split(",")) if is_backward else ()
        sizes = {name: x.numel() for name, x in zip(self.tensors, arguments, strict=False) if x is not None}
        of_head = sum(sizes.get(name, 0) for name in ("linear_weight", "linear_up", "linear_down"))
        return 2 * arguments[0].shape[0] * ((1 + made + len(asked)) * of_head + sizes.get("teacher_weight", 0))

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, static = self._split(inputs)
        there = dict.fromkeys(name for name, x in zip(self.tensors, tensors, strict=True) if x is not None)
        call = graph.Call(self, there, tuple(static), self._for_any_rows(inputs))
        graph.save(ctx, call, _present(tensors), output, False)


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _vocab_axis(weight: Tensor) -> int:
    """1 where the weight is a transposed view of contiguous memory, which then needs no copy."""
    return int(not weight.is_contiguous() and weight.t().is_contiguous())


_OF_LOSS = ("class_weights", "token_weights", "label_smoothing", "z_loss", "normalizer")
_OF_ROWS = ("logit_weights", "row_mask", "temperature")
_OF_DISTILLATION = (*_TEACHER, "row_mask", "temperature", "token_weights", "normalizer")
_OF_PARTS = (*_OF_DISTILLATION, "parts", "sums")
LINEAR_CROSS_ENTROPY = Operation("linear_cross_entropy", integration.cross_entropy_steps, _OF_LOSS)
LINEAR_ROW_STATISTICS = Operation("linear_row_statistics", integration.row_statistics_steps, _OF_ROWS)
LINEAR_LOG_PROBS = Operation("linear_log_probs", integration.log_probs_steps, ("temperature", "support"))
LINEAR_DISTILLATION = Operation("linear_distillation", integration.distillation_steps, _OF_DISTILLATION)
LINEAR_DISTILLATION_OF_PARTS = Operation(
    "linear_distillation_of_parts", integration.distillation_of_parts_steps, _OF_PARTS
)
