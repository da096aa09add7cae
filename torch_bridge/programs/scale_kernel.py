"""A Triton kernel, imported where tensors on a GPU need it."""

import triton
import triton.language as tl


@triton.jit
def scale(first, first_size, second, second_size, factor, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both arrays' numbers times `factor[0]`, rounded once, by programs that share the blocks; nothing if that is 1."""
    by = tl.load(factor)
    if by != 1.0:
        _scale(first, first_size, by, block)
        _scale(second, second_size, by, block)


@triton.jit
def _scale(numbers, size, by, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * block
    while start < size:
        places = start + tl.arange(0, block)
        inside = places < size
        wide = tl.load(numbers + places, mask=inside).to(by.dtype)
        tl.store(numbers + places, (wide * by).to(numbers.dtype.element_ty), mask=inside)
        start += tl.num_programs(0) * block
