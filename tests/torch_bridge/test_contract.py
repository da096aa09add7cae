"""The whole contract through PyTorch, against the float64 oracle, and PyTorch's own cross entropy."""

import hypothesis
import jax
import numpy as np
import pytest
import torch

import pallas_ce
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import make, problems
from tests.torch_bridge.problems import bridged, tensors
from torch_bridge import cross_entropy, linear_cross_entropy, linear_row_statistics

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
@pytest.mark.parametrize("stored", [False, True])
def test_with_pytorchs_options_it_is_pytorchs_cross_entropy(stored, reduction):
    p = make(2, 30, 9, 70)
    hidden, weight = (x.detach() for x in tensors(p, torch.float32).values())
    target, by_class = torch.tensor(p.labels).long(), torch.linspace(0, 2, 70)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    want = torch.nn.functional.cross_entropy(hidden @ weight.T, target, weight=by_class, **options)
    given = (hidden @ weight.T, target) if stored else (hidden, weight, target)
    function = cross_entropy if stored else linear_cross_entropy
    torch.testing.assert_close(function(*given, class_weights=by_class, **options), want)


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


@pytest.mark.parametrize("way", WAYS)
def test_leading_axes_and_no_tokens_at_all(way):
    weight, hidden = torch.randn(11, 4, requires_grad=True), torch.randn(0, 3, 4, requires_grad=True)
    target = torch.zeros(0, 3, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, target, implementation=way[0], backward=way[1])
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == (0, 3, 4)
    assert not weight.grad.any()


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


def test_a_loss_written_in_torch_on_the_statistics_trains():
    p = make(7, 30, 9, 70)
    labels = torch.tensor(p.labels).long().clamp(min=0)
    mask = torch.tensor(p.labels) >= 0

    def focal(log_prob, entropy):
        return (-((1 - log_prob.exp()) ** 2) * log_prob - 0.1 * entropy)[mask].sum()

    arrays, exact = tensors(p, torch.float32), tensors(p, torch.float64)
    names = ("argmax", "log_prob", "entropy", "max_logit")
    row = linear_row_statistics(arrays["hidden"], arrays["weight"], labels, statistics=names, row_mask=mask)
    log_p = torch.log_softmax(exact["hidden"] @ exact["weight"].T, dim=1)
    want = focal(log_p[torch.arange(30), labels], -(log_p.exp() * log_p).sum(1))
    got = focal(row.log_prob, row.entropy)
    assert torch.equal(row.argmax[mask].long(), log_p.argmax(1)[mask])
    assert not row.argmax[~mask].any()
    assert row.lse is None
    assert_close(gradients(got, arrays), gradients(want, exact), 1e-5, floor=3e-6)
