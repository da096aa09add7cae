"""Scaling in place: on the CPU, and the GPU's kernel by Triton's interpreter, in a process of its own."""

import pytest
import torch

from tests.torch_bridge import processes
from torch_bridge.programs.calls import scale_

_INTERPRETED = """
import torch
from torch_bridge.programs.scale_kernel import scale

block = 16
for sizes in ((1, 0), (15, 16), (17, 1000), (1000, 3)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for factor in (1.0, 0.3, 0.0):
            before = [torch.randn(size + 5).to(kind) for size, kind in zip(sizes, (dtype, torch.float32))]
            wide = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))
            first, second = (x.clone() for x in before)
            scale[(3,)](first, sizes[0], second, sizes[1], wide, block=block)
            for got, x, size in zip((first, second), before, sizes):
                # The interpreter cuts bfloat16 off; a GPU rounds.
                error = 2**-7 if x.dtype == torch.bfloat16 and factor not in (0, 1) else 0
                want = (x[:size].to(wide.dtype) * wide).to(x.dtype)
                torch.testing.assert_close(got[:size], want, rtol=error, atol=0)
                assert torch.equal(got[size:], x[size:])
print("done")
"""


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_factor_of_one_changes_nothing_and_others_are_not_rounded_first(factor):
    tensors = [torch.randn(7, 3).bfloat16(), torch.randn(5)]
    want = [(x.float() * factor).to(x.dtype) for x in tensors]
    versions = [x._version for x in tensors]
    scale_(tensors, torch.tensor(factor))
    assert all(map(torch.equal, tensors, want))
    assert (versions == [x._version for x in tensors]) == (factor == 1)


def test_the_kernel_scales_what_it_is_given_and_nothing_behind():
    pytest.importorskip("triton")
    assert processes.script(_INTERPRETED, TRITON_INTERPRET="1") == "done\n"
