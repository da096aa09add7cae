"""What decides how a call computes: `precision`, else PyTorch's own settings; and where its tensors lie."""

from unittest import mock

import jax
import pytest
import torch
from jax import lax

from pallas_ce.backends import device as targets
from tests.torch_bridge.problems import HEADS, head, value_and_gradients
from torch_bridge import linear_cross_entropy, linear_log_probs
from torch_bridge.api import checks, prepared

CUDA = torch.device("cuda")
# JAX refuses it where it lowers a product for a CPU.
ELSEWHERE = "TF32_TF32_F32"


@pytest.fixture(autouse=True)
def _settings():
    """PyTorch's settings as they were, whichever interface a test has used."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("precision", [ELSEWHERE, jax.lax.DotAlgorithmPreset.TF32_TF32_F32, None])
def test_products_have_the_precision_asked_for_or_that_of_pytorchs_settings(name, precision, monkeypatch):
    given = []
    prepared._known.clear()
    if precision is None:
        monkeypatch.setattr(checks, "precision_of", lambda *arguments: given.append(arguments) or ELSEWHERE)
    with pytest.raises(ValueError, match="precision 'TF32_TF32_F32' is not supported by dot_general on CPU"):
        HEADS[name](*head(), **({} if precision is None else {"precision": precision}))
    assert given == [(None, torch.device("cpu"))] * (precision is None)


def both():
    """After which PyTorch itself raises where `allow_tf32` is read."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize(
    ("choose", "on_cuda"),
    [
        (lambda: None, "highest"),
        (lambda: torch.set_float32_matmul_precision("high"), "tensorfloat32"),
        (lambda: torch.set_float32_matmul_precision("medium"), "tensorfloat32"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "tensorfloat32"),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), "tensorfloat32"),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), "tensorfloat32"),
        (both, "highest"),
    ],
)
def test_pytorchs_settings_are_those_of_cuda_devices(choose, on_cuda):
    choose()
    assert checks.precision_of(None, CUDA) == on_cuda
    assert checks.precision_of(None, torch.device("cpu")) == "highest"
    assert checks.precision_of("high", CUDA) == checks.precision_of(jax.lax.Precision.HIGH, CUDA) == "high"


def test_a_compiled_function_follows_the_settings():
    compiled = torch.compile(
        lambda x: x * (2 if checks.precision_of(None, CUDA) == "highest" else 3), fullgraph=True, backend="eager"
    )
    assert compiled(torch.ones(())) == 2
    torch.set_float32_matmul_precision("high")
    assert compiled(torch.ones(())) == 3


def test_a_float32_head_of_bfloat16_tensors():
    hidden, weight, target = (x.detach().bfloat16() if x.is_floating_point() else x for x in head())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    want = torch.log_softmax(wide[0] @ wide[1].T, -1).gather(1, target[:, None])[:, 0]
    got = linear_log_probs(hidden.float(), weight, target)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients, exact = (torch.autograd.grad(x.cos().sum(), of) for x, of in ((got, (hidden, weight)), (want, wide)))
    assert {x.dtype for x in gradients} == {torch.bfloat16}
    torch.testing.assert_close(gradients, tuple(x.bfloat16() for x in exact), rtol=8e-3, atol=1e-4)


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
