"""Where tensors lie decides what a call runs on, whatever else the process has."""

import pytest
import torch
from jax import lax

from pallas_ce.backends import device as targets
from torch_bridge import linear_cross_entropy, linear_log_probs


def _results(function, implementation):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 24, generator=generator).to(torch.bfloat16).requires_grad_() for rows in (40, 88)
    )
    target = torch.randint(0, 88, (40,), generator=generator)
    value = function(hidden, weight, target, implementation=implementation).sum()
    value.backward()
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
def test_on_the_cpu_of_a_process_with_a_hopper_gpu_numbers_are_those_of_xla(function, monkeypatch):
    """Each program is traced for both; the forward that autograd keeps arrays of and its backward agree."""
    left_to_lowering = []
    platform_dependent = lax.platform_dependent

    def counted(*arrays, **branches):
        left_to_lowering.append(sorted(branches))
        return platform_dependent(*arrays, **branches)

    want = _results(function, "xla")
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H200")
    monkeypatch.setattr(lax, "platform_dependent", counted)
    got = _results(function, None)
    assert left_to_lowering
    assert left_to_lowering == [["cuda", "default"]] * len(left_to_lowering)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
