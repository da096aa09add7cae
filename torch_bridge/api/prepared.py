"""Functions that check a call once: a later one of the same signature only takes its tensors and runs.

A signature is all that checks read: shape, strides, dtype, device and need of a gradient of each tensor, the values of
all other arguments, and what PyTorch is set to.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pallas_ce import LowRank
from torch_bridge.api import checks
from torch_bridge.autograd import graph
from torch_bridge.autograd.operator import Operation
from torch_bridge.autograd.partitioned import gathering
from torch_bridge.dlpack import exchange
from torch_bridge.programs.program import program as programs

# A checked call: what `Operation.call` takes, and the result of its outputs; it holds no tensor.
type Prepared[Out] = tuple[Operation, dict[str, Any], Callable[[Iterator[Tensor]], Out]]

# What cannot change. A hash of anything else may be its address, and a signature would keep it.
_VALUES = {type(None), bool, int, float, str}

# Calls that were checked, by their functions and signatures. Packed batches bring a new token count with nearly each.
_known: dict[Hashable, tuple[graph.Call, Callable[[Iterator[Tensor]], Any]]] = {}
_MOST_KNOWN = 4096


def prepared[**P, Out](function: Callable[P, Prepared[Out]]) -> Callable[P, Out]:
    """Makes of a function that checks a call one that runs it, with partitioned parameters whole."""
    signature = inspect.signature(function)
    names = tuple(signature.parameters)

    @gathering
    def checked(*args: P.args, **kwargs: P.kwargs) -> Out:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        operation, takes, finish = function(*args, **kwargs)
        call, tensors = operation.call(takes, given)
        # Of whole parameters.
        if call.program is not None and (key := _signature(function, args, kwargs)) is not None:
            cached = programs.cache_info()
            if len(_known) >= _MOST_KNOWN or cached.currsize == cached.maxsize:
                _known.clear()  # and lets go of programs that the cache has evicted
            _known[key] = call, finish
        return finish(shaped(call.run(tensors), given))

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Out:
        # In a trace Dynamo would guard what it reads of those that are known.
        key = _signature(function, args, kwargs)
        if key is None or (known := _known.get(key)) is None:
            return checked(*args, **kwargs)
        (call, finish), given = known, {**dict(zip(names, args, strict=False)), **kwargs}
        found: Out = finish(shaped(call.run(call.taken(given)), given))
        return found

    (returned,) = typing.get_args(signature.return_annotation)
    public.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return public


def shaped(outputs: Sequence[Tensor], given: Mapping[str, Any]) -> Iterator[Tensor]:
    """Outputs `[N, ...]` with the leading shape of the input that was given; numbers as they are."""
    # An operator's have behind them what its backward needs, which must not be read.
    leading = given["input"].shape[:-1]
    return (x.reshape((*leading, *x.shape[1:])) if x.ndim and len(leading) != 1 else x for x in outputs)


def _signature(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """The call's signature; None for one that is always checked."""
    if exchange.forked or forward_ad._current_level >= 0 or not graph.serves(()):
        return None
    settings = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), checks.settings()
    try:
        return (function, settings, *map(_facts, args), *kwargs, *map(_facts, kwargs.values()))
    except (TypeError, RuntimeError):  # an argument may change, or is of a tensor's subclass; a tensor has no strides
        return None


def _facts(x: Any) -> Hashable:
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter:
        return x.shape, x.layout, x.stride(), x.dtype, x.device, x.requires_grad
    if kind is LowRank:
        return kind, *map(_facts, (x.scale, x.weight, x.up, x.down))
    if kind is tuple:
        return kind, *map(_facts, x)
    if kind not in _VALUES and not isinstance(x, Enum | np.generic):
        raise TypeError(kind)
    return kind, x
