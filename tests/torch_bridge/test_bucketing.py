"""Changing token counts cause few compilations."""

import numpy as np
import pytest
import torch

from pallas_ce import LowRank
from tests.torch_bridge.problems import compilations, head
from torch_bridge import linear_cross_entropy, linear_log_probs
from torch_bridge.programs.calls import bucket


def test_a_bucket_holds_the_rows_and_from_1024_on_not_twice_as_many():
    for rows in [*range(1, 5000, 7), 2**20 - 1, 2**20, 2**20 + 1]:
        size = bucket(rows)
        assert size >= rows
        assert rows <= 1024 or size < 2 * rows


@pytest.mark.parametrize("backward", [pytest.param("auto", marks=pytest.mark.nightly), "recompute"])
def test_a_hundred_token_counts_compile_at_most_ten_programs(backward):
    counts = np.random.default_rng(0).permutation(np.linspace(1, 8192, 100).astype(int))
    assert len(set(counts)) == 100
    with compilations() as compiled:
        for tokens in counts:
            linear_cross_entropy(*head(int(tokens), 4, 37), backward=backward).backward()
    assert 0 < len(compiled) <= 10


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


@pytest.mark.parametrize(("backward", "reduction"), [("in_forward", "mean"), ("recompute", "mean"), ("auto", "none")])
def test_what_is_by_row_is_known_whatever_the_rows(backward, reduction):
    """An array of the head that is as long as there are rows is not by row: nothing of it may be cut off as padding."""
    for tokens in (29, 4, 2, 5):
        hidden, weight, target = head(tokens, 4, 29)
        bias, scale = (torch.ones(shape, requires_grad=True) for shape in (29, ()))
        term = LowRank(weight, *(torch.ones(shape, requires_grad=True) for shape in ((29, 2), (2, 4))))
        leaves = (hidden, weight, term.up, term.down, bias, scale)

        def gradients(hidden, target, leaves=leaves, term=term, bias=bias, scale=scale):
            loss = linear_cross_entropy(
                hidden, term, target, linear_bias=bias, logit_scale=scale, backward=backward, reduction=reduction
            )
            return torch.autograd.grad(loss.sum(), leaves)

        found = gradients(hidden, target)
        none = torch.full((37,), -100)
        padded = gradients(torch.cat([hidden, hidden.detach().new_zeros(37, 4)]), torch.cat([target, none]))
        torch.testing.assert_close(found, padded, rtol=1e-5, atol=1e-6)
