"""`linear_log_probs` on tensors, against log-softmax in float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import torch

import pallas_ce
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import make, statistics_problems
from tests.torch_bridge import reference
from tests.torch_bridge.problems import bridged, head, options, tensors
from torch_bridge import linear_log_probs, linear_row_statistics

LOG_5 = 1.6094379
ALL = {"return_entropy": True, "return_sum_sq_probs": True, "return_hit": True}


def stored(p, arrays, ignore_index):
    """The same from stored logits."""
    z, temperature = reference.logits(arrays, p.options), options(p, torch.float64).get("temperature", 1.0)
    z = z / (temperature[:, None] if isinstance(temperature, torch.Tensor) and temperature.ndim else temperature)
    target = torch.tensor(p.labels).long()
    real = (target >= 0) & (target < z.shape[1]) & (target != (-100 if ignore_index is None else ignore_index))
    several = target.ndim > 1
    counts = real.any(1) if several else real
    log_p = torch.log_softmax(z, dim=1)
    safe = torch.where(real, target, 0)
    found = log_p.gather(1, safe if several else safe[:, None]).reshape(target.shape)
    largest = z.argmax(1)[:, None] if several else z.argmax(1)
    return pallas_ce.LogProbs(
        torch.where(real, found, 0),
        torch.where(counts, -(log_p.exp() * log_p).sum(1), 0),
        torch.where(counts, (2 * log_p).exp().sum(1), 0),
        real & (target == largest),
    )


def results(found, arrays):
    """Numbers, and gradients of all with weights of their own; those of what is ignored must not matter."""
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in found[:3])
    gradients = torch.autograd.grad(total, list(arrays.values()))
    return [x.detach().numpy() for x in found[:3]], [g.numpy() for g in gradients]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@hypothesis.given(p=statistics_problems(), ignore_index=st.sampled_from([-100, 0, None]))
@hypothesis.settings(max_examples=4)
def test_everything_returned_agrees_with_stored_logits_and_so_do_gradients(implementation, p, ignore_index):
    arrays, exact = tensors(p, torch.float32), tensors(p, torch.float64)
    got = bridged(linear_log_probs, p, arrays, ignore_index=ignore_index, implementation=implementation, **ALL)
    want = stored(p, exact, ignore_index)
    assert_close(results(got, arrays), results(want, exact), 1e-5, floor=1e-5)
    assert not got.hit.requires_grad
    assert got.hit.shape == p.labels.shape
    # Where two logits are equal in float32 alone, which one is largest is not decided.
    z = reference.logits(exact, p.options)
    top = torch.topk(z, min(2, z.shape[1]), dim=1).values
    decided = torch.ones(len(top), dtype=torch.bool) if top.shape[1] < 2 else top[:, 0] - top[:, 1] > 1e-5
    assert torch.equal(got.hit[decided], want.hit[decided])


@pytest.mark.parametrize("ways", [{}, {"return_hit": True}, {"return_sum_sq_probs": True}])
def test_only_what_is_asked_for_is_returned(ways):
    hidden, weight, target = torch.ones(2, 2, 3), torch.zeros(5, 3), torch.tensor([[0, 1], [-100, 4]])
    found = linear_log_probs(hidden, weight, target, **ways)
    torch.testing.assert_close(found.log_probs if ways else found, -LOG_5 * (target >= 0))
    if ways:
        names = {f"return_{name}" for name, x in found._asdict().items() if x is not None}
        assert names == {"return_log_probs", *ways}


@pytest.mark.parametrize("leading", [(), (0,), (2, 3), (2, 0)])
@pytest.mark.parametrize("targets", [(), (3,)])
def test_any_leading_shape(leading, targets):
    hidden = torch.ones((*leading, 3), requires_grad=True)
    target, temperature = torch.zeros((*leading, *targets), dtype=torch.int64), torch.full(leading, 2.0)
    found = linear_log_probs(hidden, torch.zeros(5, 3), target, temperature=temperature, return_entropy=True)
    torch.testing.assert_close(found.log_probs.detach(), torch.full(target.shape, -LOG_5))
    torch.testing.assert_close(found.entropy.detach(), torch.full(leading, LOG_5))
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert hidden.grad.shape == hidden.shape


def test_float64_is_computed_in_float64():
    p = make(3, 20, 7, 50)
    p.options = {"logit_softcap": 3.0, "temperature": np.linspace(0.5, 2, 20)}
    with jax.enable_x64(True):
        arrays = tensors(p, torch.float64)
        got, want = bridged(linear_log_probs, p, arrays, **ALL), stored(p, arrays, -100)
        assert got.log_probs.dtype == torch.float64
        assert_close(results(got, arrays), results(want, arrays), 1e-12, floor=1e-13)


def test_a_frozen_weight_gets_no_gradient_and_a_temperature_none_either():
    hidden, weight, target = head()
    temperature = (torch.rand(20) + 0.5).requires_grad_()
    found = linear_log_probs(hidden, weight.detach(), target, temperature=temperature)
    for_hidden, for_temperature = torch.autograd.grad(found.sum(), (hidden, temperature), allow_unused=True)
    want = torch.log_softmax(hidden @ weight.T / temperature.detach()[:, None], 1).gather(1, target[:, None]).sum()
    torch.testing.assert_close(for_hidden, torch.autograd.grad(want, hidden)[0], rtol=1e-4, atol=1e-6)
    assert for_temperature is None


def test_row_statistics_take_several_targets_and_temperatures_too():
    hidden, weight, target = head()
    targets, temperature = torch.stack([target, target.roll(1), target], 1), torch.rand(20) + 0.5
    names = ("log_prob", "lse", "entropy")
    row = linear_row_statistics(hidden, weight, targets, statistics=names, temperature=temperature)
    z = hidden @ weight.T
    log_p = torch.log_softmax(z / temperature[:, None], 1)
    torch.testing.assert_close(row.log_prob, log_p.gather(1, targets))
    torch.testing.assert_close(row.lse, torch.logsumexp(z / temperature[:, None], 1))
    by_number = linear_row_statistics(hidden, weight, targets, statistics=names, temperature=0.5)
    torch.testing.assert_close(by_number.lse, torch.logsumexp(2 * z, 1))
