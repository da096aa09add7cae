"""Rows of stored logits a few at a time, as views, for functions that widen no more than a chunk of them."""

from collections.abc import Iterator

import torch

# Elements of a chunk, by device: 64 MiB of float32 keep a GPU busy; 4 MiB stay in a CPU's cache. Where there are few
# logits a chunk is a share of them, but not so small that launches take longer than the work.
ELEMENTS = {"cpu": 2**20}
_ELEMENTS_ELSEWHERE = 2**24
_SHARE = 16
_LEAST_ELEMENTS = 2**18

# Rows of the chunks that are powers of two.
LEAST_ROWS, _MOST_ROWS = 128, 16384


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers of `dtype` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Row numbers and rows `[n, V]`, views all of them: a slice such as `logits[:, :-1]` is not copied either."""
    most = ELEMENTS.get(logits.device.type, _ELEMENTS_ELSEWHERE)
    yield from _of(logits, 0, min(most, max(_LEAST_ELEMENTS, logits.numel() // _SHARE)))


def powers(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The same in parts of a power of two rows, for which programs are compiled; a last part may be smaller."""
    for part, rows in _of(logits, 0, _MOST_ROWS * logits.shape[-1]):
        first = 0
        while (left := rows.shape[0] - first) > 0:
            size = left if left < LEAST_ROWS else 1 << (left.bit_length() - 1)
            yield slice(part.start + first, part.start + first + size), rows[first : first + size]
            first += size


def _of(logits: torch.Tensor, start: int, elements: int) -> Iterator[tuple[slice, torch.Tensor]]:
    if not logits.numel():
        return
    try:
        rows = logits.view(-1, logits.shape[-1])
    except RuntimeError:  # the leading axes are not one axis in memory
        each = logits.shape[1:-1].numel()
        for number, part in enumerate(logits.unbind(0)):
            yield from _of(part, start + number * each, elements)
        return
    size = max(1, elements // rows.shape[1])
    for first in range(0, rows.shape[0], size):
        part = rows[first : first + size]
        yield slice(start + first, start + first + part.shape[0]), part


def check_inplace(logits: torch.Tensor, inplace_backward: bool) -> None:
    """Refuses to overwrite a leaf, or memory that several of the logits share, with a ValueError."""
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward=True on logits that are a leaf would overwrite a parameter; pass False")
    strides = zip(logits.stride(), logits.shape, strict=True)
    if inplace_backward and any(stride == 0 and size > 1 for stride, size in strides):
        raise ValueError(
            f"inplace_backward=True on an expanded view (shape {tuple(logits.shape)}, strides {logits.stride()}) would "
            "overwrite memory that several logits share; pass False, or logits.contiguous()"
        )
