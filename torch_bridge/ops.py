"""The operations as PyTorch operators: implementation, shapes for tracing, and differentiation, once for all of them.

`pallas_ce::linear_cross_entropy` and its like return the function's outputs and, behind them, what the backward needs;
the latter is an operator too, so that `torch.compile` traces through both.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from torch_bridge import bucketing, eager, exchange, graph, operations, programs, streams
from torch_bridge.programs import Function, Shape, Signature

_TO_TORCH = {
    np.dtype(jnp.bfloat16): torch.bfloat16,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int8): torch.int8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.bool): torch.bool,
}
_TO_JAX = {ours: theirs for theirs, ours in _TO_TORCH.items()}

_SCHEMA_TYPES = {int: "int", str: "str", bool: "bool", float: "float"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """What describes an operator.

    Attributes:
        name: its name.
        function: the function of named arrays.
        options: the NamedTuple of the function's static options; all but `vocab_axis` are the operator's.
        required: names of the tensors that are always there, "input" `[N, H]` and "linear_weight" `[V, H]` first.
        optional: names of further tensors.
        by_row: for each tensor with one entry for each row, what fills padded rows; a scalar in its place is for all.
        differentiable: names of tensors, in the order of the bits of `differentiated`.
    """

    name: str
    function: Function
    options: Any
    required: tuple[str, ...]
    optional: tuple[str, ...]
    by_row: dict[str, float]
    differentiable: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the operator's arguments."""
        return self.required + self.optional

    def call(self, tensors: dict[str, Tensor | None], options: dict[str, Any]) -> list[Tensor]:
        """Calls the operator; what PyTorch will differentiate is read off the tensors."""
        differentiated = 0
        if torch.is_grad_enabled():
            for bit, name in enumerate(self.differentiable):
                tensor = tensors.get(name)
                if tensor is not None and tensor.requires_grad:
                    differentiated |= 1 << bit
        given = [tensors.get(name) for name in self.tensors]
        arguments = (*given, differentiated, *(options[name] for name in self.options._fields[1:]))
        if not eager.serves(given):
            return getattr(torch.ops.pallas_ce, self.name)(*arguments)
        if not differentiated:
            return self.forward(*arguments)
        function: Any = eager.Eager
        return list(function.apply(*arguments, self))

    def register(self) -> None:
        """Registers the operator, its backward, and their rules with PyTorch."""
        inputs = ", ".join(
            [f"Tensor {name}" for name in self.required]
            + [f"Tensor? {name}" for name in self.optional]
            + ["int differentiated"]
            + [f"{_schema_type(kind)} {name}" for name, kind in list(typing.get_type_hints(self.options).items())[1:]]
        )
        forward = torch.library.custom_op(
            f"pallas_ce::{self.name}", self.forward, mutates_args=(), schema=f"({inputs}) -> Tensor[]"
        )
        forward.register_fake(self._forward_shapes)
        forward.register_autograd(self.differentiate, setup_context=self.setup_context)
        backward = torch.library.custom_op(
            f"pallas_ce::{self.name}_backward",
            self.backward,
            mutates_args=(),
            schema=f"({inputs}, Tensor?[] outputs, Tensor[] kept, Tensor?[] cotangents, int asked) -> Tensor[]",
        )
        backward.register_fake(self._backward_shapes)

    def _read(self, arguments: Sequence[Any]) -> tuple[dict[str, Tensor], Signature]:
        """The tensors that are there, and what the call is compiled for."""
        count = len(self.tensors)
        tensors = {name: x for name, x in zip(self.tensors, arguments[:count], strict=True) if x is not None}
        differentiated = self._names(arguments[count])
        axis = _vocab_axis(tensors["linear_weight"])
        options = self.options(axis, *arguments[count + 1 :])
        shapes = tuple((name, self._shape(name, x, axis)) for name, x in tensors.items())
        return tensors, Signature(self.function, options, shapes, frozenset(differentiated))

    def _names(self, bits: int) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(self.differentiable) if bits >> bit & 1)

    def _is_by_row(self, name: str, tensor: Tensor) -> bool:
        return name in self.by_row and tensor.ndim > 0

    def _shape(self, name: str, tensor: Tensor, vocab_axis: int) -> Shape:
        axes: tuple[int | None, ...]
        if self._is_by_row(name, tensor):
            axes = (None, *(int(n) for n in tensor.shape[1:]))
        else:
            axes = tuple(int(n) for n in tensor.shape)
        return Shape(axes[::-1] if name == "linear_weight" and vocab_axis else axes, _TO_JAX[tensor.dtype])

    def _export(self, tensors: dict[str, Tensor], rows: int) -> dict[str, Any]:
        """Named arrays for JAX, rows padded."""
        arrays: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if self._is_by_row(name, tensor):
                tensor = bucketing.pad(tensor, rows, self.by_row[name])
            elif name == "linear_weight" and _vocab_axis(tensor):
                tensor = tensor.t()
            if tensor.ndim == 0 and tensor.device.type == "cpu":
                arrays[name] = tensor.detach().numpy()  # goes to whichever device computes
            else:
                arrays[name] = exchange.share(tensor, name)
        return arrays

    def _import(self, name: str, gradient: jax.Array, tensors: dict[str, Tensor]) -> Tensor:
        """The gradient of a tensor, in its shape."""
        found = exchange.adopt(gradient)
        if name in self.by_row:
            return _without_padding(found, tensors["input"].shape[0])
        return found.t() if name == "linear_weight" and _vocab_axis(tensors[name]) else found

    def forward(self, *arguments: Any) -> list[Tensor]:
        """The function's outputs, and what the backward needs beside them."""
        tensors, signature = self._read(arguments)
        tokens, device = tensors["input"].shape[0], tensors["input"].device
        streams.refuse_capture(device)
        with streams.on(device):
            rows = bucketing.bucket(tokens)
            program = programs.program(signature, rows)
            layout = programs.layout(signature)
            outputs, kept = program.forward(self._export(tensors, rows))
            found = [
                _without_padding(exchange.adopt(x), tokens) if shape.by_row else exchange.adopt(x)
                for x, shape in zip((*outputs, *kept), (*layout.outputs, *layout.kept), strict=True)
            ]
            streams.hold(tensors.values())
        return found

    def _forward_shapes(self, *arguments: Any) -> list[Tensor]:
        tensors, signature = self._read(arguments)
        layout, tokens = programs.layout(signature), tensors["input"].shape[0]
        return [
            tensors["input"].new_empty(
                [tokens if axis is None else axis for axis in shape.axes], dtype=_TO_TORCH[shape.dtype]
            )
            for shape in (*layout.outputs, *layout.kept)
        ]

    def backward(self, *arguments: Any) -> list[Tensor]:
        """The gradients asked for."""
        *arguments, outputs, kept, cotangents, asked = arguments  # type: ignore[assignment]
        tensors, signature = self._read(arguments)
        device = tensors["input"].device
        streams.refuse_capture(device)
        with streams.on(device):
            rows = bucketing.bucket(tensors["input"].shape[0])
            program = programs.program(signature, rows)
            backward = program.backward(self._names(asked))
            gradients = backward.run(
                self._export({name: x for name, x in tensors.items() if name in backward.reads}, rows),
                _padded(outputs, program.outputs),
                _padded([x if read else None for x, read in zip(kept, backward.reads_kept, strict=True)], program.kept),
                _padded(cotangents, program.outputs[: program.differentiable]),
            )
            found = [self._import(name, gradients[name], tensors) for name in self._names(asked)]
            streams.hold(x for x in (*tensors.values(), *outputs, *kept, *cotangents) if x is not None)
        return found

    def _backward_shapes(self, *arguments: Any) -> list[Tensor]:
        asked = self._names(arguments[-1])
        tensors = dict(zip(self.tensors, arguments, strict=False))
        return [
            tensors[name].t().new_empty(tensors[name].t().shape).t()
            if name == "linear_weight" and _vocab_axis(tensors[name])
            else tensors[name].new_empty(tensors[name].shape)
            for name in asked
        ]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        """Saves what the backward needs."""
        _, signature = self._read(inputs)
        layout = programs.layout(signature)
        count = len(self.tensors)
        # An output that is not needed is not saved: the caller may change it in place.
        reread = (x if i in layout.reread or i >= len(layout.outputs) else None for i, x in enumerate(output))
        ctx.save_for_backward(*inputs[:count], *reread)
        ctx.static = inputs[count:]
        ctx.outputs = len(layout.outputs)
        ctx.differentiable = layout.differentiable
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[layout.differentiable :])

    def differentiate(self, ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments."""
        count = len(self.tensors)
        saved = ctx.saved_tensors
        tensors, output = saved[:count], saved[count:]
        differentiated = ctx.static[0]
        asked = 0
        for bit, name in enumerate(self.differentiable):
            position = self.tensors.index(name)
            if differentiated >> bit & 1 and ctx.needs_input_grad[position] and graph.is_asked(ctx, tensors, position):
                asked |= 1 << bit
        gradients: dict[str, Tensor | None] = {}
        given = cotangents[: ctx.differentiable]
        if asked and any(x is not None for x in given):
            # Only the operator raises where these gradients are to be differentiated in turn.
            straight = eager.serves((*saved, *given)) and not torch.is_grad_enabled()
            backward = self.backward if straight else getattr(torch.ops.pallas_ce, f"{self.name}_backward")
            found = backward(
                *tensors, *ctx.static, list(output[: ctx.outputs]), list(output[ctx.outputs :]), list(given), asked
            )
            gradients = dict(zip(self._names(asked), found, strict=True))
        if (gradient := gradients.get("linear_weight")) is not None:
            gradients["linear_weight"] = graph.into_main_grad(graph.node_of(ctx, tensors, 1), gradient)
        return (*(gradients.get(name) for name in self.tensors), *(None for _ in ctx.static))


def _schema_type(kind: Any) -> str:
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    return f"{_SCHEMA_TYPES[members[0]]}?" if members else _SCHEMA_TYPES[kind]


def _vocab_axis(weight: Tensor) -> int:
    """1 where the weight is a transposed view of contiguous memory, which then needs no copy."""
    return int(not weight.is_contiguous() and weight.t().is_contiguous())


def _without_padding(tensor: Tensor, tokens: int) -> Tensor:
    """The first `tokens` rows; the tensor itself where those are all."""
    return tensor if tensor.shape[0] == tokens else tensor[:tokens]


def _padded(tensors: Sequence[Tensor | None], structs: Sequence[Any]) -> list[jax.Array | None]:
    """Arrays for JAX; those with fewer rows than `structs` say are padded."""
    return [
        None if x is None else exchange.share(x if x.shape == s.shape else bucketing.pad(x, s.shape[0]))
        for x, s in zip(tensors, structs, strict=True)
    ]


LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy",
    operations.LOSS,
    operations.LossOptions,
    ("input", "linear_weight", "target"),
    (
        "linear_bias",
        "class_weights",
        "token_weights",
        "logit_scale",
        "label_smoothing",
        "z_loss",
        "normalizer",
    ),
    {"input": 0, "target": -1, "token_weights": 0},
    (
        "input",
        "linear_weight",
        "linear_bias",
        "token_weights",
        "logit_scale",
        "label_smoothing",
        "z_loss",
        "normalizer",
    ),
)

LINEAR_ROW_STATISTICS = Operation(
    "linear_row_statistics",
    operations.STATISTICS,
    operations.StatisticsOptions,
    ("input", "linear_weight"),
    ("target", "linear_bias", "logit_scale", "logit_weights", "row_mask", "temperature"),
    {"input": 0, "target": -1, "row_mask": 0, "temperature": 1},
    ("input", "linear_weight", "linear_bias", "logit_scale"),
)

LINEAR_LOG_PROBS = Operation(
    "linear_log_probs",
    operations.LOG_PROBS,
    operations.LogProbsOptions,
    ("input", "linear_weight", "target"),
    ("linear_bias", "logit_scale", "temperature"),
    {"input": 0, "target": -1, "temperature": 1},
    ("input", "linear_weight", "linear_bias", "logit_scale"),
)

for _operation in (LINEAR_CROSS_ENTROPY, LINEAR_ROW_STATISTICS, LINEAR_LOG_PROBS):
    _operation.register()
