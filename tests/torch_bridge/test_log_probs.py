"""`linear_log_probs` on tensors, against the float64 oracle."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import pallas_ce
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import statistics_problems
from tests.torch_bridge.problems import bridged, tensors
from torch_bridge import linear_log_probs

LOG_5 = 1.6094379
ALL = {"return_entropy": True, "return_sum_sq_probs": True, "return_hit": True}


@hypothesis.given(p=statistics_problems(), ignore_index=st.sampled_from([-100, 0, None]))
def test_everything_returned_agrees_with_the_oracle_and_so_do_gradients(p, ignore_index):
    """Weights of ignored labels do not matter."""
    arrays = tensors(p, torch.float32)
    got = bridged(linear_log_probs, p, arrays, ignore_index=ignore_index, **ALL)
    logits = oracle.Logits(p.arrays, **p.options)
    values, slopes = oracle.statistics(logits, p.labels)
    real = (p.labels >= 0) & (p.labels < logits.v) & (p.labels != ignore_index)
    by_row = real.reshape(len(real), -1).any(1)
    counts = {"log_prob": real, "entropy": by_row, "sum_sq_probs": by_row}
    upstream = {name: np.linspace(-1, 2, x.size, dtype=np.float32).reshape(x.shape) for name, x in counts.items()}
    total = sum((x * torch.tensor(g)).sum() for x, g in zip(got[:3], upstream.values(), strict=True))
    gradients = torch.autograd.grad(total, list(arrays.values()))
    found = [x.detach().numpy() for x in got[:3]], {name: g.numpy() for name, g in zip(arrays, gradients, strict=True)}
    exact = logits.gradients(oracle.pull_back(slopes, {name: counts[name] * g for name, g in upstream.items()}))
    assert_close(found, ([np.where(x, values[name], 0) for name, x in counts.items()], exact), 1e-5, 1e-5)
    argmax = values["argmax"].reshape(-1, *[1] * (p.labels.ndim - 1))
    np.testing.assert_array_equal(got.hit, real & (p.labels == argmax))
    assert got.log_probs.dtype == torch.float32
    assert not got.hit.requires_grad


@pytest.mark.parametrize("ways", [{}, {"return_hit": True}, {"return_sum_sq_probs": True}])
def test_only_what_is_asked_for_is_returned(ways):
    hidden, weight, target = torch.ones(2, 2, 3), torch.zeros(5, 3), torch.tensor([[0, 1], [-100, 4]])
    found = linear_log_probs(hidden, weight, target, **ways)
    torch.testing.assert_close(found.log_probs if ways else found, -LOG_5 * (target >= 0))
    if ways:
        names = {f"return_{name}" for name, x in found._asdict().items() if x is not None}
        assert names == {"return_log_probs", *ways}


@pytest.mark.parametrize("shift", [0, 1])
def test_a_support_means_what_it_does_in_jax(shift):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=generator).requires_grad_() for size in ((2, 5, 6), (31, 6)))
    target = torch.randint(0, 31, (2, 5), generator=generator)
    support = torch.cat([target[..., None], torch.randint(-1, 31, (2, 5, 4), generator=generator)], dim=2)
    target[0, 2], support[1, 3] = -100, -1
    options = {**ALL, "shift": shift}
    found = linear_log_probs(hidden, weight, target, support=support, **options)
    arrays = [jnp.asarray(x.detach().numpy()) for x in (hidden, weight)]
    labels, ids = target.numpy(), support.numpy()

    def weighted(entropy, log_probs, in_support, where):
        return (0.3 * entropy + where(in_support, log_probs, 0.0 * entropy)).sum()

    def of_jax(hidden, weight):
        found = pallas_ce.linear_log_probs(hidden, weight, labels, support=ids, **options)
        return weighted(found.entropy, found.log_probs, found.in_support, jnp.where), found

    (_, want), needed = jax.value_and_grad(of_jax, (0, 1), has_aux=True)(*arrays)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x.detach(), y, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(weighted(found.entropy, found.log_probs, found.in_support, torch.where), (hidden, weight))
    for x, y in zip(got, needed, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
