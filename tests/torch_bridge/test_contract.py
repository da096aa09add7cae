"""The whole contract through PyTorch, against the float64 oracle, and PyTorch's own cross entropy."""

import re
import textwrap
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
import torch

import pallas_ce
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import make, problems
from tests.torch_bridge.problems import LINEAR, MODES, bridged, tensors
from torch_bridge import (
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_row_statistics,
)

WAYS = [("xla", "recompute"), ("xla", "in_forward"), (None, "auto")]


def gradients(loss, arrays, upstream=None):
    found = torch.autograd.grad(loss, list(arrays.values()), upstream)
    return {name: g.numpy() for name, g in zip(arrays, found, strict=True)}


def assert_agrees(p, way, bound=1e-5, floor=3e-6, dtype=torch.float32):
    arrays = tensors(p, dtype)
    got = bridged(linear_cross_entropy, p, arrays, implementation=way[0], backward=way[1])
    upstream = np.linspace(-1, 1, p.labels.size) if got.ndim else 1.0
    want = oracle.cross_entropy(p.arrays, p.labels, p.options, upstream)
    assert got.dtype == dtype
    found = got.detach().numpy(), gradients(got, arrays, torch.tensor(upstream, dtype=dtype))
    assert_close(found, want, bound, floor)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_with_pytorchs_options_it_is_pytorchs_cross_entropy(reduction):
    p = make(2, 30, 9, 70)
    hidden, weight = (x.detach() for x in tensors(p, torch.float32).values())
    target, by_class = torch.tensor(p.labels).long(), torch.linspace(0, 2, 70)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    want = torch.nn.functional.cross_entropy(hidden @ weight.T, target, weight=by_class, **options)
    for found in (
        linear_cross_entropy(hidden, weight, target, class_weights=by_class, **options),
        cross_entropy(hidden @ weight.T, target, class_weights=by_class, **options),
    ):
        torch.testing.assert_close(found, want)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this PyTorch does not have it")
def test_pytorchs_own_function_and_module_take_the_same_arguments():
    """By the lines of docs/coming_from.md, and with the options that both have."""
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    lines = re.search(r"### PyTorch's own linear_cross_entropy\n\n((?: .*\n)+)", page)[1]
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*size) for size in ((2, 30, 9), (70, 9), (70,)))
    target, by_class = torch.randint(0, 70, (2, 30)), torch.rand(70)
    shown = {"torch": torch, "hidden": hidden, "weight": weight, "bias": bias, "target": target}
    shown |= {"in_features": 9, "num_classes": 70}
    exec(textwrap.dedent(lines), shown)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target, linear_bias=bias), shown["loss"])
    module = LinearCrossEntropyLoss(shown["in_features"], shown["num_classes"])
    module.load_state_dict(shown["module"].linear.state_dict())
    torch.testing.assert_close(module(hidden[0], target[0]), shown["module"](hidden[0], target[0]))
    given = {"input": hidden[0], "linear_weight": weight, "target": target[0], "ignore_index": int(target[0, 0])}
    for reduction in ("mean", "sum", "none"):
        given |= {"reduction": reduction, "label_smoothing": 0.1}
        want = torch.nn.functional.linear_cross_entropy(**given, weight=by_class)
        torch.testing.assert_close(linear_cross_entropy(**given, class_weights=by_class), want)


@pytest.mark.parametrize(("way", "by_token"), [*((way, False) for way in WAYS), (WAYS[0], True), (WAYS[2], True)])
@hypothesis.given(p=problems())
@hypothesis.settings(max_examples=4)
def test_loss_and_every_gradient_agree_for_any_options_and_any_upstream(way, by_token, p):
    if by_token:
        p.options.pop("normalizer", None)
        p.options["reduction"] = "none"
    assert_agrees(p, way)


def test_float64_is_computed_in_float64():
    p = make(3, 20, 7, 50)
    p.options["z_loss"] = 0.1
    with jax.enable_x64(True):
        assert_agrees(p, WAYS[2], 1e-12, 1e-14, torch.float64)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("leading", [(), (0,), (2, 3), (2, 0)])
def test_any_leading_shape_and_no_tokens_at_all(name, leading):
    """Of equal logits, whose log-probabilities are equal."""
    hidden, weight = torch.ones((*leading, 3), requires_grad=True), torch.zeros(5, 3, requires_grad=True)
    value = LINEAR[name](hidden, weight, torch.zeros(leading, dtype=torch.int64))
    value.backward()
    mean, count = name in MODES, hidden[..., 0].numel()
    expected = (count > 0 if mean else -count if name == "log_probs" else count) * torch.tensor(5.0).log()
    torch.testing.assert_close(value.detach(), expected)
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.any() == (count > 0)


def weighted(hidden, weight, target, token_weights, **options):
    return linear_cross_entropy(hidden, weight, target, token_weights=token_weights, z_loss=0.1, **options)


def policy(hidden, weight, target, token_weights, **options):
    found = linear_log_probs(hidden, weight, target, return_entropy=True, **options)
    return found.log_probs.sum() + found.entropy.sin().sum()


@pytest.mark.parametrize("leading", [(7,), (3, 5), (2, 1)])
@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("function", [weighted, policy])
def test_a_shift_is_the_loss_of_slices(function, leading, shift):
    torch.manual_seed(len(leading))
    hidden, weight = (torch.randn(*rows, 8, requires_grad=True) for rows in (leading, (30,)))
    target = torch.randint(-3, 34, (*leading, *((2,) if function is policy else ())))  # some lie outside
    token_weights = torch.rand(leading, requires_grad=True)
    kept, along = max(leading[-1] - shift, 0), len(leading) - 1
    sliced = [x.narrow(along, leading[-1] - kept, kept) for x in (target, token_weights)]
    values = (
        function(hidden, weight, target, token_weights, shift=shift),
        function(hidden.narrow(along, 0, kept), weight, *sliced),
    )
    differentiated = [hidden, weight, *([token_weights] if function is weighted else [])]
    got, want = ([x.detach(), *torch.autograd.grad(x, differentiated)] for x in values)
    torch.testing.assert_close(got, want)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width"),
    [(5, 256, 256), (5, 300, 256), (5, 256, 300), (256, 9, 6), (257, 9, 6)],
)
def test_rows_are_padded_to_256_whatever_the_other_sizes_are_and_padding_leaks_into_nothing(tokens, vocabulary, width):
    """Logits are small, so that padded rows would show."""
    for way in WAYS[:2]:
        assert_agrees(make(1, tokens, width, vocabulary, scale=0.3), way, 2e-5)


def test_metrics_are_those_of_the_library_and_carry_no_gradient():
    p = make(5, 40, 8, 60)
    p.options = {"z_loss": 1e-2, "return_metrics": True}
    loss, metrics = bridged(linear_cross_entropy, p, tensors(p, torch.float32))
    _, want = pallas_ce.linear_cross_entropy(**p.arrays, labels=p.labels, **p.options)
    assert loss.requires_grad
    for got, exact in zip(metrics, want, strict=True):
        assert not got.requires_grad
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-6)


@pytest.mark.parametrize("kind", ["number", "rows"])
def test_a_loss_written_in_torch_on_the_statistics_trains(kind):
    """With several targets, a temperature and a mask."""
    p = make(7, 30, 9, 70)
    first, mask = torch.tensor(p.labels).long().clamp(min=0), torch.tensor(p.labels) >= 0
    labels, temperature = torch.stack([first, first.roll(1)], 1), 0.5 if kind == "number" else torch.rand(30) + 0.5

    def focal(log_prob, entropy, lse):
        return (-((1 - log_prob.exp()) ** 2) * log_prob).sum() - 0.1 * (entropy * lse).sum()

    arrays, exact = tensors(p, torch.float32), tensors(p, torch.float64)
    row = linear_row_statistics(
        arrays["hidden"], arrays["weight"], labels, statistics=("argmax", "log_prob", "entropy", "lse"),
        row_mask=mask, temperature=temperature,
    )  # fmt: skip
    z = (exact["hidden"] @ exact["weight"].T)[mask]
    z = z / (temperature if kind == "number" else temperature[mask, None])
    log_p = torch.log_softmax(z, dim=1)
    want = focal(log_p.gather(1, labels[mask]), -(log_p.exp() * log_p).sum(1), z.logsumexp(1))
    got = focal(row.log_prob[mask], row.entropy[mask], row.lse[mask])
    assert torch.equal(row.argmax[mask].long(), log_p.argmax(1))
    assert not row.argmax[~mask].any()
    assert row.max_logit is None
    assert_close((got.item(), gradients(got, arrays)), (want.item(), gradients(want, exact)), 1e-5, floor=3e-6)
