"""Gradients times the upstream scalar, in place. A loss's scalar is nearly always 1, which costs no pass over them.

On a GPU the host does not know the scalar; a kernel reads it and ends at once where it is 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Enough programs to fill any GPU's memory bandwidth, few enough to leave in a few microseconds.
_PROGRAMS = 1024
_BLOCK = 4096


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies contiguous tensors by `factor []`, a scalar at least as wide on the same device; rounds once."""
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
