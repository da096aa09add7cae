"""Changing token counts cause few compilations."""

import jax
import numpy as np
import pytest
import torch

from torch_bridge import linear_cross_entropy, linear_row_statistics
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
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    weight = torch.randn(37, 4, requires_grad=True)
    counts = np.random.default_rng(0).permutation(np.linspace(1, 8192, 100).astype(int))
    try:
        for tokens in counts:
            hidden = torch.randn(int(tokens), 4, requires_grad=True)
            loss = linear_cross_entropy(hidden, weight, torch.randint(0, 37, (int(tokens),)), backward=backward)
            loss.backward()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(set(counts)) == 100
    assert 0 < len(compiled) <= 8


def test_numbers_that_change_from_step_to_step_do_not_compile_again():
    hidden, weight, target = torch.randn(5, 4), torch.randn(31, 4), torch.randint(0, 31, (5,))
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        losses = {
            linear_cross_entropy(hidden, weight, target, normalizer=n, z_loss=n / 9, label_smoothing=n / 50).item()
            for n in range(3, 13)
        }
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(losses) == 10
    assert len(compiled) == 1


@pytest.mark.parametrize("tokens", [1, 255, 256, 257])
def test_padding_leaks_into_nothing(tokens):
    """Values of padded rows would show: logits are small, and some are masked besides."""
    torch.manual_seed(tokens)
    hidden = (torch.randn(tokens, 6) * 0.1).requires_grad_()
    weight = (torch.randn(9, 6) * 0.1).requires_grad_()
    target = torch.randint(0, 9, (tokens,))
    row = linear_row_statistics(hidden, weight, target)
    assert row.lse.shape == (tokens,)
    loss = linear_cross_entropy(hidden, weight, target) + row.lse.mean()
    z = hidden @ weight.T
    want = torch.nn.functional.cross_entropy(z, target) + torch.logsumexp(z, 1).mean()
    torch.testing.assert_close(loss, want)
    for got, exact in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-7)
