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


def test_neither_rows_nor_numbers_that_change_from_step_to_step_compile_again():
    def loss(head, n):
        return linear_cross_entropy(*head, normalizer=n, z_loss=n / 9, label_smoothing=n / 500)

    def log_prob(head, n):
        return linear_log_probs(*head, temperature=torch.tensor(n / 10)).sum()

    for function, programs in ((loss, 1), (log_prob, 2)):  # its gradients are made in the forward; or behind it
        with compilations() as compiled:
            values = [function(head(tokens, 4, 31), tokens) for tokens in (3, 50, 200, 7)]
            for value in values:
                value.backward()
        assert len({value.item() for value in values}) == 4
        assert len(compiled) == programs


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
