"""`shift` in the bridge: the loss of sliced hidden states and targets, without slices."""

import pytest
import torch

from tests.torch_bridge.problems import value_and_gradients
from torch_bridge import linear_cross_entropy, linear_log_probs


def problem(*leading, targets=()):
    torch.manual_seed(len(leading))
    hidden, weight = torch.randn(*leading, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    return hidden, weight, torch.randint(-3, 34, (*leading, *targets)), torch.rand(leading)  # some lie outside


def weighted(hidden, weight, target, token_weights, **options):
    return linear_cross_entropy(hidden, weight, target, token_weights=token_weights, z_loss=0.1, **options)


def policy(hidden, weight, target, token_weights, **options):
    found = linear_log_probs(hidden, weight, target, return_entropy=True, **options)
    return found.log_probs.sum() + found.entropy.sin().sum()


@pytest.mark.parametrize("leading", [(7,), (3, 5), (2, 1)])
@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("function", [weighted, policy])
def test_it_is_the_loss_of_slices(function, leading, shift):
    def sliced(hidden, weight, target, token_weights):
        kept = max(leading[-1] - shift, 0)
        start, along = leading[-1] - kept, len(leading) - 1
        further = (x.narrow(along, start, kept) for x in (target, token_weights))
        return function(hidden.narrow(along, 0, kept), weight, *further)

    given = problem(*leading, targets=(2,) if function is policy else ())
    given[3].requires_grad_(function is weighted)
    got = value_and_gradients(lambda *x: function(*x, shift=shift), *given)
    torch.testing.assert_close(got, value_and_gradients(sliced, *given))


def test_token_weights_have_their_gradients_at_their_own_tokens():
    hidden, weight, target, token_weights = problem(2, 5)
    (gradient,) = torch.autograd.grad(
        weighted(hidden, weight, target.clamp(0, 29), token_weights.requires_grad_(), shift=1, reduction="sum"),
        token_weights,
    )
    assert (gradient != 0).tolist() == [[False, True, True, True, True]] * 2
