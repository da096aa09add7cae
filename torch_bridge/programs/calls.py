"""Programs on PyTorch tensors: padded to a program's rows, shared with JAX, and its results brought back.

JAX compiles for each shape, and packed batches have another number of tokens each time. So rows are padded up to the
next of a short list of sizes; padding is masked like ignored tokens, which cost no products, and costs a copy of the
rows. Training takes two programs a bucket where the backward is one of its own, as in "recompute": at most ten up to
8192 tokens, and two more for each doubling.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.dlpack import exchange
from torch_bridge.programs.program import WEIGHT, Program, Shape

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
    given, shapes = _in_memory_order(program, tensors), program.signature.arrays
    return _run(program.forward, program, given, shapes, program.found, given[0], staying)


def backward(
    program: Program,
    tensors: Sequence[Tensor],
    saved: Sequence[Tensor | jax.Array | None],
    cotangents: Sequence[Tensor | None],
    asked: tuple[str, ...],
    total: Tensor | None = None,
) -> list[Tensor]:
    """The gradients of the inputs in `asked`, from the forward's inputs and `saved`, all that it returned.

    Outputs that `Program.unread` names may be missing. A cotangent that is None is zero. A `total` to which
    `adds_to` says the weight's gradient can be added is returned in place of that.
    """
    compiled = program.backward(asked, tuple([x is not None for x in cotangents]), adds=total is not None)
    inputs, of = _in_memory_order(program, tensors), dict(program.signature.arrays)
    taken: list[Any] = [*inputs, *saved, *cotangents, total]
    read, shapes = [taken[i] for i in compiled.reads], [program.taken[i] for i in compiled.reads]
    found = _run(compiled.run, program, read, shapes, [of[name] for name in asked], inputs[0])
    found = _as_weight_lies(program, found, asked)
    if total is not None:
        place = asked.index("linear_weight")
        found[place] = exchange.written(total, found[place])
    return found


def adds_to(program: Program, total: Tensor, weight: Tensor, asked: tuple[str, ...]) -> bool:
    """Whether `backward` can add the weight's gradient to a tensor, for these gradients."""
    like = (total.shape, total.device, total.dtype) == (weight.shape, weight.device, torch.float32)
    dense = total.is_contiguous() and not program.signature.options.vocab_axis
    return like and dense and program.adds.issuperset(asked)


def handed_over(program: Program, saved: Sequence[Any], upstream: Any, asked: tuple[str, ...]) -> list[Tensor]:
    """Gradients of `Program.scaled`, in the memory of what the forward returned, which is lost; see `backward`.

    For the last backward of a graph: neither the host launches a program of JAX's nor does memory hold both.
    """
    found = [saved[program.scaled[name]].detach() for name in asked]
    scale_(found, upstream)
    return _as_weight_lies(program, found, asked)


def _as_weight_lies(program: Program, found: list[Tensor], names: tuple[str, ...]) -> list[Tensor]:
    """Gradients of those inputs, the weight's in its order of axes."""
    if program.signature.options.vocab_axis and "linear_weight" in names:
        position = names.index("linear_weight")
        found[position] = found[position].t()
    return found


def _in_memory_order(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with the weight `[H, V]` where that is how it lies in memory."""
    given = list(tensors)
    if program.signature.options.vocab_axis:
        given[WEIGHT] = given[WEIGHT].t()
    return given


def _run(
    compiled: Callable[..., Sequence[jax.Array]],
    program: Program,
    given: Sequence[Any],
    taken: Sequence[tuple[str, Shape]],
    results: Sequence[Shape],
    like: Tensor,
    staying: frozenset[int] = frozenset(),
) -> list[Any]:
    """A compiled program's results, of the rows of `like`: tensors by row are padded, and what becomes of them cut."""
    names, rows, missing = [name for name, _ in taken], like.shape[0], program.rows - like.shape[0]
    if not missing:
        return exchange.run(compiled, names, given, like.device, staying)
    padded = [
        pad(x, (0, 0) * (x.ndim - 1) + (0, missing), value=shape.fill) if shape.by_row and isinstance(x, Tensor) else x
        for x, (_, shape) in zip(given, taken, strict=True)
    ]
    found = exchange.run(compiled, names, padded, like.device, staying)
    # Detached: PyTorch lets no caller change a view in place that was made inside of a custom function.
    by_row = [shape.by_row and isinstance(x, Tensor) for x, shape in zip(found, results, strict=True)]
    return [x[:rows].detach() if cut else x for x, cut in zip(found, by_row, strict=True)]


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
