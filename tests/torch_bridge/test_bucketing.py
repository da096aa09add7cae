"""Changing token counts cause few compilations."""

import numpy as np
import pytest
import torch

from tests.torch_bridge.problems import compilations, head
from torch_bridge import linear_cross_entropy, linear_log_probs, linear_row_statistics
from torch_bridge.programs.bucketing import bucket, pad


def test_a_bucket_holds_the_rows_and_from_2048_on_not_twice_as_many():
    for rows in [*range(1, 5000, 7), 2**20 - 1, 2**20, 2**20 + 1]:
        size = bucket(rows)
        assert size >= rows
        assert rows <= 2048 or size < 2 * rows


def test_padding_is_behind_and_nothing_happens_where_none_is_missing():
    x = torch.ones(3, 2)
    assert pad(x, 3) is x
    assert pad(x, 5).tolist() == [[1, 1]] * 3 + [[0, 0]] * 2
    assert pad(torch.ones(2, dtype=torch.int32), 3, -1).tolist() == [1, 1, -1]


@pytest.mark.parametrize("backward", ["auto", "recompute"])
def test_a_hundred_token_counts_compile_at_most_eight_programs(backward):
    counts = np.random.default_rng(0).permutation(np.linspace(1, 8192, 100).astype(int))
    assert len(set(counts)) == 100
    with compilations() as compiled:
        for tokens in counts:
            linear_cross_entropy(*head(int(tokens), 4, 37), backward=backward).backward()
    assert 0 < len(compiled) <= 8


def test_numbers_that_change_from_step_to_step_do_not_compile_again():
    hidden, weight, target = (x.detach() for x in head(5, 4, 31))
    with compilations() as compiled:
        losses = {
            linear_cross_entropy(hidden, weight, target, normalizer=n, z_loss=n / 9, label_smoothing=n / 50).item()
            for n in range(3, 13)
        }
    assert len(losses) == 10
    assert len(compiled) == 1


def test_neither_token_counts_nor_temperatures_in_tensors_compile_log_probs_again():
    with compilations() as compiled:
        for tokens in (3, 50, 200, 7):
            hidden, *others = head(tokens, 4, 29)
            linear_log_probs(hidden, *others, temperature=torch.tensor(tokens / 10)).sum().backward()
            assert hidden.grad is not None
    assert len(compiled) == 2  # forward and backward


@pytest.mark.parametrize("tokens", [1, 255, 256, 257])
def test_padding_leaks_into_nothing(tokens):
    """Values of padded rows would show: logits are small, and some are masked besides."""
    hidden, weight, target = head(tokens, 6, 9)
    hidden, weight = ((0.1 * x.detach()).requires_grad_() for x in (hidden, weight))
    targets, temperature = torch.stack([target, target.roll(1)], 1), torch.rand(tokens) + 0.5
    row = linear_row_statistics(hidden, weight, target)
    assert row.lse.shape == (tokens,)
    found = linear_log_probs(hidden, weight, targets, temperature=temperature, return_entropy=True)
    loss = linear_cross_entropy(hidden, weight, target) + row.lse.mean()
    loss = loss + found.log_probs.mean() - found.entropy.mean()
    z = hidden @ weight.T
    log_p = torch.log_softmax(z / temperature[:, None], 1)
    exact = log_p.gather(1, targets), -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(tuple(found[:2]), exact)
    want = (
        torch.nn.functional.cross_entropy(z, target) + torch.logsumexp(z, 1).mean() + exact[0].mean() - exact[1].mean()
    )
    torch.testing.assert_close(loss, want)
    got, want = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
