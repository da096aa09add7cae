"""A weight with a low-rank term (LoRA) through PyTorch: what of it is trained, what that costs, and errors."""

import re

import pytest
import torch
from torch import nn

from pallas_ce import LowRank
from torch_bridge import LinearCrossEntropyLoss, linear_cross_entropy
from torch_bridge.autograd.operator import LINEAR_CROSS_ENTROPY

TOKENS, WIDTH, VOCABULARY, RANK, SCALE = 20, 16, 56, 3, 0.7


def tensors():
    torch.manual_seed(0)
    shapes = {"hidden": (TOKENS, WIDTH), "weight": (VOCABULARY, WIDTH), "up": (VOCABULARY, RANK), "down": (RANK, WIDTH)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


TARGET = torch.arange(TOKENS).where(torch.arange(TOKENS) % 5 > 0, -100)


def merged(x):
    return x["weight"] + SCALE * x["up"] @ x["down"]


def loss(hidden, weight, **options):
    return linear_cross_entropy(hidden, weight, TARGET, **options)


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("trained", [["up"], ["down"], ["up", "down"], ["hidden", "up", "down"], ["weight", "up"]])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_merged_weight_and_only_of_what_requires_them(trained, transposed):
    given = {name: x.requires_grad_(name in trained) for name, x in tensors().items()}
    want = torch.autograd.grad(loss(given["hidden"], merged(given)), [given[name] for name in trained])
    weight = given["weight"]
    if transposed:
        weight = given["weight"] = weight.detach().t().contiguous().t().requires_grad_("weight" in trained)
    value = loss(given["hidden"], LowRank(weight, given["up"], given["down"], SCALE))
    torch.testing.assert_close(value, loss(given["hidden"], merged(given)))
    value.backward()
    for name, gradient in zip(trained, want, strict=True):
        torch.testing.assert_close(given[name].grad, gradient, rtol=1e-4, atol=1e-5)
    assert all(x.grad is None for name, x in given.items() if name not in trained)


def products(program, *arrays):
    """Shapes of the results of the products of a JAX program."""
    lines = [x for x in program.lower(*arrays).as_text().splitlines() if "stablehlo.dot_general" in x]
    return [tuple(map(int, re.findall(r"(\d+)x", line.rpartition("tensor<")[2]))) for line in lines]


@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_costs_no_product(mode, frozen):
    given = {name: x.requires_grad_(name in ("up", "down")) for name, x in tensors().items()}
    given["weight"].requires_grad_(not frozen)
    weight = LowRank(given["weight"], given["up"], given["down"], SCALE)
    LINEAR_CROSS_ENTROPY._known.clear()
    loss(given["hidden"], weight, backward=mode, implementation="xla").backward()
    (program,) = LINEAR_CROSS_ENTROPY._known.values()
    flat = program.structs()
    made = products(program.forward, *flat[: len(program.signature.arrays)])
    for backward in program._backwards.values():
        made += products(backward.run, *[flat[i] for i in backward.reads])
    assert made
    # `down` has its width too; the gradient of hidden states is not asked for.
    assert any(WIDTH in shape and RANK not in shape for shape in made) is not frozen


def test_it_is_multiplied_in_autocasts_dtype_and_its_gradients_keep_theirs():
    given = {name: x.requires_grad_(name in ("up", "down")) for name, x in tensors().items()}
    weight = given["weight"].to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(given["hidden"], LowRank(weight, given["up"], given["down"], SCALE))
    torch.testing.assert_close(value, loss(given["hidden"], merged(given)), rtol=2e-2, atol=0)
    value.backward()
    assert given["up"].grad.dtype == given["down"].grad.dtype == torch.float32


def test_a_loss_on_a_layers_weight_does_not_pass_over_its_adapter():
    layer = nn.Linear(4, 9)
    layer.base_layer = nn.Linear(4, 9)
    with pytest.raises(TypeError, match=r"Linear is a layer with an adapter.*LowRank"):
        LinearCrossEntropyLoss.shared_with(layer)
