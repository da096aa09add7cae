"""The operations as PyTorch operators: implementation, shapes for tracing, and differentiation, once for all of them.

An operator returns the function's outputs and, behind them, what the backward needs. The backward is an operator too,
so that `torch.compile` traces through both.
"""

from collections.abc import Hashable, Sequence
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

# Packed batches bring a new token count, hence a new key, with nearly every call.
_CALLS_KNOWN = 4096

# The fill of padded rows, for each tensor with one entry a row; a scalar in its place serves all rows.
_BY_ROW = {
    "input": 0,
    "teacher_input": 0,
    "token_weights": 0,
    "row_mask": 0,
    "temperature": 1,
    "target": -1,
    "support": -1,
    "parts": 0,
    "sums": 0,
}

# Tensors of every head: the low-rank term of its weight is `[V, r]` and `[r, H]`.
_HEAD = ("input", "linear_weight", "target", "linear_up", "linear_down", "linear_bias", "logit_scale")
_TEACHER = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_logit_scale")
_CONSTANT = {
    "target",
    "support",
    "class_weights",
    "logit_weights",
    "row_mask",
    "temperature",
    "parts",
    "sums",
    *_TEACHER,
}


# All but `vocab_axis`, in the order of the operators' schemas: what a call may leave out, and the types.
_DEFAULTS = dict(zip(Options._fields[1:], Options()[1:], strict=True))
_TYPES = {
    name: kind.__name__ if isinstance(kind, type) else str(kind).replace(" | None", "?")
    for name, kind in Options.__annotations__.items()
    if name in _DEFAULTS
}


class Operation:
    """An operator for a function of named arrays.

    `tensors` names its tensors in the order of its arguments and of the bits that stand for them: "input" `[N, H]` and
    "linear_weight" `[V, H]`, which are always there, come first.
    """

    def __init__(self, name: str, steps: Any, further: tuple[str, ...]) -> None:
        # Now and not when first read: torch.compile guards the attributes that a trace has read.
        self.name, self.tensors = name, _HEAD + further
        self.function = Function(getattr(pallas_ce, name.removesuffix("_of_parts")), steps)
        # The bit of each tensor, or 0 if it has no gradient.
        self._bits = tuple([0 if x in _CONSTANT else 1 << place for place, x in enumerate(self.tensors)])
        self._missing: dict[str, Any] = dict.fromkeys(self.tensors) | _DEFAULTS
        # Programs by a key that is quicker to make than a signature.
        self._known: dict[Hashable, Program] = {}
        self._register()

    def call(self, given: dict[str, Any]) -> list[Tensor]:
        """The function's outputs, differentiable as the tensors require it.

        `given` are checked arguments of a public function, by name; static ones that are missing have their defaults.
        """
        given = self._missing | given
        tensors, differentiated = [given[name] for name in self.tensors], 0
        named = {name: x for name, x in zip(self.tensors, tensors, strict=True) if x is not None}
        exchange.check_one_device(named)
        first_order.reverse_mode(named)
        if torch.is_grad_enabled():
            for tensor, bit in zip(tensors, self._bits, strict=True):
                if tensor is not None and tensor.requires_grad:
                    differentiated |= bit
        static = (differentiated, *[given[name] for name in _DEFAULTS])
        if not graph.serves(tensors):
            return list(getattr(OPERATORS, self.name)(*tensors, *static))
        program = self.program(tensors, static)
        if not differentiated:
            return calls.forward(program, list(named.values()))
        function: Any = graph.Eager
        return list(function.apply(*tensors, self, program, static))

    def _register(self) -> None:
        """Registers the operator, its backward, and their rules with PyTorch."""
        given = [f"Tensor{'' if name in _HEAD[:2] else '?'} {name}" for name in self.tensors]
        inputs = ", ".join([*given, "int differentiated", *[f"{kind} {name}" for name, kind in _TYPES.items()]])
        forward = register(self.name, self._forward, f"({inputs}) -> Tensor[]", self._forward_shapes)
        forward.register_autograd(graph.differentiate, setup_context=self._setup_context)
        inputs += ", Tensor?[] found, Tensor?[] cotangents, int asked"
        of_backward = f"{self.name}_backward"
        backward = register(of_backward, self._backward, f"({inputs}) -> Tensor[]", self._backward_shapes)
        backward.register_autograd(first_order.refuse)
        for name, flops in ((self.name, self._forward_flops), (of_backward, self._backward_flops)):
            flop_counter.register_flop_formula(getattr(OPERATORS, name), get_raw=True)(flops)

    def signature(self, tensors: Sequence[Any], static: Sequence[Any]) -> Signature:
        """The call's signature; both arguments are the operator's."""
        axis = _vocab_axis(tensors[1])
        shapes = []
        for name, tensor in zip(self.tensors, tensors, strict=True):
            if tensor is not None:
                sizes: tuple[int | None, ...] = tuple(map(int, tensor.shape[1:]))
                if tensor.ndim:
                    sizes = (None if name in _BY_ROW else int(tensor.shape[0]), *sizes)
                sizes = sizes[::-1] if axis and name == "linear_weight" else sizes
                shapes.append((name, Shape(sizes, exchange.TO_JAX[tensor.dtype], _BY_ROW.get(name, 0))))
        return Signature(self.function, Options(axis, *static[1:]), tuple(shapes), self._names(static[0]))

    def program(self, tensors: Sequence[Any], static: Sequence[Any]) -> Program:
        """The program for a call with the operator's arguments."""
        key = (_vocab_axis(tensors[1]), *static, *[None if x is None else (x.shape, x.dtype) for x in tensors])
        if (program := self._known.get(key)) is None:
            program = programs.program(self.signature(tensors, static), calls.bucket(tensors[0].shape[0]))
            if len(self._known) >= _CALLS_KNOWN:
                self._known.clear()
            self._known[key] = program
        return program

    def _for_any_rows(self, tensors: Sequence[Any], static: Sequence[Any]) -> Program:
        return programs.program(self.signature(tensors, static), programs.ANY_ROWS)

    def _names(self, bits: int) -> tuple[str, ...]:
        return tuple([name for bit, name in enumerate(self.tensors) if bits >> bit & 1])

    def _split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The operator's arguments: tensors, and static ones."""
        return arguments[: len(self.tensors)], arguments[len(self.tensors) :]

    def _forward(self, *arguments: Any) -> list[Tensor]:
        tensors, static = self._split(arguments)
        return calls.forward(self.program(tensors, static), [x for x in tensors if x is not None])

    def _backward(self, *arguments: Any) -> list[Tensor]:
        tensors, static = self._split(arguments[:-3])
        found, cotangents, asked = arguments[-3:]
        present = [x for x in tensors if x is not None]
        return calls.backward(self.program(tensors, static), present, found, cotangents, self._names(asked))

    def _forward_shapes(self, *arguments: Any) -> list[Tensor]:
        hidden, found = arguments[0], self._for_any_rows(*self._split(arguments)).found
        return [
            hidden.new_empty([hidden.shape[0] if n is None else n for n in x.axes], dtype=exchange.TO_TORCH[x.dtype])
            for x in found
        ]

    def _backward_shapes(self, *arguments: Any) -> list[Tensor]:
        asked = [(name, arguments[self.tensors.index(name)]) for name in self._names(arguments[-1])]
        return [
            torch.empty_like(x) if name == "linear_weight" and _vocab_axis(x) else x.new_empty(x.shape)
            for name, x in asked
        ]

    def _forward_flops(self, *arguments: Any, **_: Any) -> int:
        tensors, static = self._split(arguments)
        return self._flops(tensors, 1 + self._for_any_rows(tensors, static).sums)

    def _backward_flops(self, *arguments: Any, **_: Any) -> int:
        tensors, static = self._split(arguments[:-3])
        products = 1 + len({"input", "linear_weight"}.intersection(self._names(arguments[-1])))
        return 0 if self._for_any_rows(tensors, static).sums else self._flops(tensors, products)

    def _flops(self, tensors: Sequence[Any], products: int) -> int:
        """Of a number of products with the weight and its low-rank term, and of one with a teacher's weight."""
        sizes = {name: x.numel() for name, x in zip(self.tensors, tensors, strict=True) if x is not None}
        of_head = sum(sizes.get(name, 0) for name in ("linear_weight", "linear_up", "linear_down"))
        return 2 * tensors[0].shape[0] * (products * of_head + sizes.get("teacher_weight", 0))

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, static = self._split(inputs)
        graph.save(ctx, self, self._for_any_rows(tensors, static), static, tensors, output, False)


def _vocab_axis(weight: Tensor) -> int:
    """1 where the weight is a transposed view of contiguous memory, which then needs no copy."""
    return int(not weight.is_contiguous() and weight.t().is_contiguous())


_OF_LOSS = ("class_weights", "token_weights", "label_smoothing", "z_loss", "normalizer")
_OF_DISTILLATION = (*_TEACHER, "row_mask", "temperature", "token_weights", "normalizer")
_OF_ROWS = ("logit_weights", "row_mask", "temperature")
LINEAR_CROSS_ENTROPY = Operation("linear_cross_entropy", integration.cross_entropy_steps, _OF_LOSS)
LINEAR_ROW_STATISTICS = Operation("linear_row_statistics", integration.row_statistics_steps, _OF_ROWS)
LINEAR_LOG_PROBS = Operation("linear_log_probs", integration.log_probs_steps, ("temperature", "support"))
LINEAR_DISTILLATION = Operation("linear_distillation", integration.distillation_steps, _OF_DISTILLATION)
_OF_PARTS = (*_OF_DISTILLATION, "parts", "sums")
LINEAR_DISTILLATION_OF_PARTS = Operation(
    "linear_distillation_of_parts", integration.distillation_of_parts_steps, _OF_PARTS
)
