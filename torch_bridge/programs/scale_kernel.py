"""A Triton kernel, imported where tensors on a GPU need it."""

import triton
import triton.language as tl


@triton.jit
def scale(numbers, factor, size, blocks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """`numbers[:size] *= factor[0]`, rounded once, by programs that share the blocks; nothing if the factor is 1."""
    by = tl.load(factor)
    if by != 1.0:
        own = tl.program_id(0)
        while own < blocks:
            places = own.to(tl.int64) * block + tl.arange(0, block)
            inside = places < size
            wide = tl.load(numbers + places, mask=inside).to(by.dtype)
            tl.store(numbers + places, (wide * by).to(numbers.dtype.element_ty), mask=inside)
            own += tl.num_programs(0)
