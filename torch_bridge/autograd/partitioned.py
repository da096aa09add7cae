"""Parameters that DeepSpeed's ZeRO-3 has partitioned, which hold nothing but while all processes gather them.

DeepSpeed gathers a module's own around its forward and backward. A loss elsewhere reads a head that nobody calls.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pallas_ce import LowRank


def is_partitioned(tensor: Any) -> bool:
    """Whether it is such a parameter, and nobody holds it gathered."""
    status = getattr(tensor, "ds_status", None) if isinstance(tensor, Tensor) else None
    return status is not None and status.name == "NOT_AVAILABLE"


def whole_shape(parameter: Any) -> torch.Size:
    """The parameter's shape; of a partitioned one the shape that gathering gives it."""
    shape: torch.Size = parameter.ds_shape if is_partitioned(parameter) else parameter.shape
    return shape


def gathered(tensors: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the partitioned ones are whole. All processes must enter it, in the same order."""
    held = [x for x in tensors if is_partitioned(x)]
    return importlib.import_module("deepspeed").zero.GatheredParameters(held) if held else contextlib.nullcontext()


def gathering[**P, Out](function: Callable[P, Out]) -> Callable[P, Out]:
    """`function`, in whose calls the partitioned ones among its arguments are whole."""

    @functools.wraps(function)
    def gathers(*args: P.args, **kwargs: P.kwargs) -> Out:
        given = () if torch.compiler.is_compiling() else (*args, *kwargs.values())
        parts = [(x.weight, x.up, x.down) if isinstance(x, LowRank) else (x,) for x in given]
        with gathered(tensor for several in parts for tensor in several):
            return function(*args, **kwargs)

    return gathers


def accept(parameter: Any) -> None:
    """Lets a partitioned parameter accumulate the gradient that this backward returns, without another gather.

    PyTorch compares a gradient's strides with the parameter's as it is then. One number, repeated, has the whole shape
    until DeepSpeed's hook has taken the gradient. Whatever gathers the parameter before that puts its own memory there.
    """
    parameter.data = stand_in = parameter.new_empty(()).expand(parameter.ds_shape)

    def empty(_: Tensor) -> None:
        hook.remove()
        if parameter.data_ptr() == stand_in.data_ptr():
            parameter.data = stand_in.new_empty(0)

    # Hooks are called in the order in which they were registered.
    hook = parameter.register_post_accumulate_grad_hook(empty)


def accept_with(result: Tensor, parameters: Iterable[Any]) -> None:
    """`accept`, when the gradient arrives of a `result` that was made of the parameters while they were gathered."""
    for x in parameters:
        if result.requires_grad and is_partitioned(x) and x.requires_grad:
            result.register_hook(lambda _, x=x: accept(x))
