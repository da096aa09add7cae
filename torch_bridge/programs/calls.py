"""Programs on PyTorch tensors: padded to a program's rows, shared with JAX, and its results brought back.

JAX compiles for each shape. Packed batches have another number of tokens each time, so their rows are padded up to the
next of a short list of sizes, and the padding is masked like ignored tokens, which cost no products. Padding costs a
copy of the rows, and from 1024 rows on at most twice their memory.

Training takes two programs a bucket where the backward is one of its own, as in "recompute": at most ten up to 8192
tokens, and two more for each doubling.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.dlpack import exchange
from torch_bridge.programs.program import Program, Shape

# Enough programs to fill any GPU's memory bandwidth, few enough to leave in a few microseconds.
_PROGRAMS = 1024
_BLOCK = 4096


def bucket(rows: int) -> int:
    """The number of rows to compile for: the smallest of 256, 1024, 2048, 4096, … that holds `rows`.

    Below 1024 rows the memory of padding does not matter and compilations do; from there on powers of two, which are
    what batches of one size usually have.

    >>> [bucket(rows) for rows in (0, 256, 257, 5000, 8192)]
    [256, 256, 1024, 8192, 8192]
    """
    return 256 if rows <= 256 else max(1024, 1 << (rows - 1).bit_length())


def forward(program: Program, tensors: Sequence[Tensor], staying: frozenset[int] = frozenset()) -> list[Any]:
    """The outputs, and what the backward needs beside them and the inputs, of dense tensors on one device.

    Results are tensors; at the places `staying` they are JAX's arrays, with the padding of the program's rows.
    """
    given = _in_memory_order(program, tensors)
    found = _run(program.forward, program, given, program.signature.arrays, tensors[0], staying)
    return _without_padding(program, found, program.found, tensors[0])


def backward(
    program: Program,
    tensors: Sequence[Tensor],
    saved: Sequence[Tensor | jax.Array | None],
    cotangents: Sequence[Tensor | None],
    asked: tuple[str, ...],
    total: Tensor | None = None,
) -> list[Tensor]:
    """The gradients of the inputs in `asked`, from the forward's inputs and `saved`, all that it returned.

    Outputs that `Program.reread` does not name may be missing. A cotangent that is None is zero. A `total` to which
    `adds_to` says the weight's gradient can be added is returned in place of that.
    """
    compiled = program.backward(asked, tuple([x is not None for x in cotangents]), adds=total is not None)
    taken: list[Any] = [*_in_memory_order(program, tensors), *saved, *cotangents]
    of_taken = program.taken
    if total is not None:
        taken.append(total)
        of_taken = (*of_taken, ("main_grad", Shape(tuple(total.shape), np.dtype(np.float32))))
    read, shapes = [taken[i] for i in compiled.reads], [of_taken[i] for i in compiled.reads]
    found = _as_inputs(program, _run(compiled.run, program, read, shapes, tensors[0]), asked, tensors[0])
    if total is not None:
        place = asked.index("linear_weight")
        found[place] = exchange.written(total, found[place])
    return found


def adds_to(program: Program, total: Tensor, weight: Tensor, asked: tuple[str, ...]) -> bool:
    """Whether `backward` can add the weight's gradient to a tensor, for these gradients."""
    like = (total.shape, total.device, total.dtype) == (weight.shape, weight.device, torch.float32)
    dense = total.is_contiguous() and not program.signature.options.vocab_axis
    return like and dense and "linear_weight" in asked and program.adds.issuperset(asked)


def handed_over(
    program: Program, tensors: Sequence[Tensor], saved: Sequence[Any], upstream: Any, asked: tuple[str, ...]
) -> list[Tensor]:
    """Gradients of `Program.scaled`, in the memory of what the forward returned, which is lost; see `backward`.

    For the last backward of a graph: neither the host launches a program of JAX's nor does memory hold both.
    """
    found = [saved[program.scaled[name]].detach() for name in asked]
    scale_(found, upstream)
    return _as_inputs(program, found, asked, tensors[0])


def _as_inputs(program: Program, found: list[Tensor], names: tuple[str, ...], like: Tensor) -> list[Tensor]:
    """Gradients of those inputs as the tensors lie that came in."""
    of = dict(program.signature.arrays)
    found = _without_padding(program, found, [of[name] for name in names], like)
    if program.signature.options.vocab_axis and "linear_weight" in names:
        position = names.index("linear_weight")
        found[position] = found[position].t()
    return found


def _in_memory_order(program: Program, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, with the weight `[H, V]` where that is how it lies in memory."""
    if not program.signature.options.vocab_axis:
        return tensors
    hidden, weight, *others = tensors
    return hidden, weight.t(), *others


def _run(
    compiled: Callable[..., Sequence[jax.Array]],
    program: Program,
    given: Sequence[Any],
    shapes: Sequence[tuple[str, Shape]],
    like: Tensor,
    staying: frozenset[int] = frozenset(),
) -> list[Any]:
    """The results of a compiled program; `like` has the call's device and rows."""
    if missing := program.rows - like.shape[0]:
        given = [
            pad(x, (0, 0) * (x.ndim - 1) + (0, missing), value=shape.fill)
            if shape.by_row and isinstance(x, Tensor)
            else x
            for x, (_, shape) in zip(given, shapes, strict=True)
        ]
    return exchange.run(compiled, [name for name, _ in shapes], given, like.device, staying)


def _without_padding(program: Program, found: list[Any], shapes: Sequence[Shape], like: Tensor) -> list[Any]:
    """The rows that the call has, of the tensors that have rows."""
    if (rows := like.shape[0]) == program.rows:
        return found
    return [x[:rows] if shape.by_row and isinstance(x, Tensor) else x for x, shape in zip(found, shapes, strict=True)]


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies contiguous tensors by `factor []`, a scalar at least as wide on the same device; rounds once.

    A loss's scalar is nearly always 1, which costs no pass over them. On a GPU the host does not know the scalar; a
    kernel reads it and ends at once where it is 1.
    """
    if factor.is_cpu:
        if (number := factor.item()) != 1:
            for tensor in tensors:
                tensor.mul_(number)
        return
    from torch_bridge.programs.scale_kernel import scale

    with torch.cuda.device(factor.device):
        # Two at a time, as most calls have: a launch takes the host longer than all else in such a backward.
        for first in range(0, len(tensors), 2):
            one, other = tensors[first], tensors[min(first + 1, len(tensors) - 1)]
            size, further = one.numel(), 0 if other is one else other.numel()
            programs = -(-max(size, further, 1) // _BLOCK)
            scale[(min(_PROGRAMS, programs),)](one, size, other, further, factor, block=_BLOCK)
