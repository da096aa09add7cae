"""Forward mode, the transforms of `torch.func` and second derivatives are refused by name.

Some would give zero or wrong numbers, others fail obscurely.
"""

from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from tests.torch_bridge.problems import HEADS, STORED, as_on_a_gpu
from torch_bridge import cross_entropy, linear_cross_entropy, selective_log_softmax
from torch_bridge.materialized import chunks

# PyTorch's own, where forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

torch.manual_seed(0)
HIDDEN, WEIGHT, TARGET = torch.randn(5, 4), torch.randn(9, 4), torch.randint(0, 4, (5,))

CALLS = {name: call for name, call in (HEADS | STORED).items() if name != "module"}


REFUSED = "first derivatives in reverse mode only"


def tangent(function, requires_grad):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(HIDDEN.clone().requires_grad_(requires_grad), HIDDEN))


# And how the error begins.
INSIDE, TANGENT = "is inside a transform", "has a tangent"
TRANSFORMS = {
    "jvp": (lambda f: torch.func.jvp(f, (HIDDEN,), (HIDDEN,)), INSIDE),
    "jacfwd": (lambda f: torch.func.jacfwd(f)(HIDDEN), INSIDE),
    "grad": (lambda f: torch.func.grad(f)(HIDDEN), INSIDE),
    "vmap": (lambda f: torch.func.vmap(f)(HIDDEN[None]), INSIDE),
    "tangent": (lambda f: tangent(f, False), TANGENT),
    "tangent with gradient": (lambda f: tangent(f, True), TANGENT),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_and_tangents_are_refused(name, transform):
    run, begins = TRANSFORMS[transform]
    with pytest.raises(NotImplementedError, match=f"(input|logits) {begins}.*{REFUSED}"):
        run(lambda hidden: CALLS[name](hidden, WEIGHT, TARGET))


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"vocab_parallel"}))  # which needs other processes
def test_a_batch_of_upstream_gradients_is_refused(name):
    def call(hidden):
        return CALLS[name](hidden, WEIGHT, TARGET)

    with pytest.raises(NotImplementedError, match=f"a gradient is batched: leave out vectorize=True.*{REFUSED}"):
        torch.autograd.functional.jacobian(call, HIDDEN, vectorize=True)
    assert torch.autograd.functional.jacobian(call, HIDDEN).shape == (*call(HIDDEN).shape, *HIDDEN.shape)


@pytest.mark.parametrize("name", ["linear_weight", "logit_scale"])
def test_the_tensor_that_has_a_tangent_is_named(name):
    tensors = {"linear_weight": WEIGHT, "logit_scale": torch.tensor(1.0)}
    with forward_ad.dual_level():
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
            linear_cross_entropy(HIDDEN, target=TARGET, **tensors)


def test_a_tangent_of_an_upstream_gradient_is_refused():
    x = HIDDEN.clone().requires_grad_()
    with forward_ad.dual_level():
        factor = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        loss = factor * linear_cross_entropy(x, WEIGHT, TARGET)
        with pytest.raises(NotImplementedError, match="the gradient of output 0 has a tangent"):
            loss.backward()


def test_a_weight_that_trains_is_refused_inside_a_transform_of_something_else():
    weight = WEIGHT.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"linear_weight requires a gradient inside a transform.*{REFUSED}"):
        torch.func.grad(lambda x: x.sum() * linear_cross_entropy(HIDDEN, weight, TARGET))(HIDDEN)


TWICE = {
    "linear_cross_entropy": (linear_cross_entropy, (HIDDEN, WEIGHT, TARGET), ("token_weights", "z_loss", "normalizer")),
    "cross_entropy": (cross_entropy, (WEIGHT[:4], TARGET[:4]), ("token_weights", "z_loss", "normalizer")),
    "selective_log_softmax": (selective_log_softmax, (WEIGHT[:4], TARGET[:4]), ()),
}


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("name", TWICE)
def test_a_gradient_is_not_differentiated_again_whatever_it_is_of(name, on_a_gpu):
    function, (first, *others), options = TWICE[name]
    values = {"token_weights": torch.rand(len(first)), "z_loss": torch.tensor(0.1), "normalizer": torch.tensor(3.0)}
    inputs = {"first": first.clone()} | {option: values[option].clone() for option in options}

    def loss(first, **given):
        return function(first, *others, label_smoothing=0.1, **given).sum() if given else function(first, *others).sum()

    with as_on_a_gpu(on_a_gpu), mock.patch.object(chunks, "LEAST_ROWS", 4):
        for of in inputs:
            tensors = {key: x.detach().requires_grad_() for key, x in inputs.items()}
            value = loss(**tensors)
            (gradient,) = torch.autograd.grad(value, tensors[of], create_graph=True)
            for again in tensors.values():
                with pytest.raises(NotImplementedError, match=f"a gradient is differentiated again.*{REFUSED}"):
                    torch.autograd.grad(gradient.square().sum(), again, retain_graph=True)
            with pytest.raises(NotImplementedError, match=REFUSED):
                torch.autograd.functional.hessian(lambda x, of=of: loss(**(inputs | {of: x})), inputs[of])


def test_what_is_constant_in_a_transform_is_served():
    want = linear_cross_entropy(HIDDEN, WEIGHT, TARGET)
    _, tangent = torch.func.jvp(lambda x: x * linear_cross_entropy(HIDDEN, WEIGHT, TARGET), (want,), (want,))
    torch.testing.assert_close(tangent, want * want)


def test_forward_mode_is_refused_when_compiled_too():
    torch._dynamo.reset()

    def of_tangent(x):
        return torch.func.jvp(lambda x: linear_cross_entropy(x, WEIGHT, TARGET), (x,), (x,))[1]

    with pytest.raises(Exception, match=REFUSED):
        torch.compile(of_tangent, backend="eager", fullgraph=True)(HIDDEN)
