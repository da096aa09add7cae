"""Where tensors lie decides what a call runs on, whatever else the process has."""

from unittest import mock

import pytest
import torch
from jax import lax

from pallas_ce.backends import device as targets
from tests.torch_bridge.problems import head, value_and_gradients
from torch_bridge import linear_cross_entropy, linear_log_probs


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
def test_on_the_cpu_of_a_process_with_a_hopper_gpu_numbers_are_those_of_xla(function, monkeypatch):
    """Each program is traced for both; the forward that autograd keeps arrays of and its backward agree."""
    hidden, weight, target = head(40, 24, 88)
    given = *(x.detach().bfloat16().requires_grad_() for x in (hidden, weight)), target
    left_to_lowering = mock.Mock(wraps=lax.platform_dependent)

    def results(implementation):
        return value_and_gradients(lambda *x: function(*x, implementation=implementation).sum(), *given)

    want = results("xla")
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H200")
    monkeypatch.setattr(lax, "platform_dependent", left_to_lowering)
    assert all(map(torch.equal, results(None), want))
    left_to_lowering.assert_called()
    assert all(call.kwargs.keys() == {"cuda", "default"} for call in left_to_lowering.call_args_list)
