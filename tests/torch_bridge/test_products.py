"""How many products a pass has: in the compiled programs, and as PyTorch's counter of operations says."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pallas_ce import LowRank
from tests.torch_bridge.problems import LINEAR, MODES, products_of
from torch_bridge import linear_cross_entropy, linear_distillation

TOKENS, WIDTH, VOCABULARY, RANK, OF_TEACHER = 20, 8, 50, 2, 3


def distillation(hidden, weight, _):
    return linear_distillation(hidden, weight, torch.ones(TOKENS, OF_TEACHER), torch.ones(VOCABULARY, OF_TEACHER))


def low_rank(hidden, weight, target):
    weight = LowRank(weight, torch.ones(VOCABULARY, RANK), torch.ones(RANK, WIDTH))
    return LINEAR["in_forward"](hidden, weight, target)


@pytest.mark.parametrize(("frozen", "count"), [((), 3), (("weight",), 2), (("hidden",), 2)])
def test_a_recomputing_backward_has_the_logits_again_and_one_product_for_each_gradient_asked_for(head, frozen, count):
    for name, tensor in zip(("hidden", "weight"), head, strict=False):
        tensor.requires_grad_(name not in frozen)
    _, backward = products_of(lambda: LINEAR["recompute"](*head).backward())
    assert len(backward) == count


def test_a_distillations_backward_makes_no_statistics_again(head):
    """Two heads' tiles of logits and the student's two products, in one loop over tiles."""
    _, backward = products_of(lambda: distillation(*head).backward())
    assert len(backward) == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_with_a_low_rank_term_costs_no_product(head, mode, frozen):
    hidden, weight, target = head
    up, down = (torch.ones(shape, requires_grad=True) for shape in ((VOCABULARY, RANK), (RANK, WIDTH)))
    weight = LowRank(weight.requires_grad_(not frozen), up, down)
    options = {"backward": mode, "implementation": "xla"}
    made = products_of(lambda: linear_cross_entropy(hidden.detach(), weight, target, **options).backward())
    # `down` has its width too; the gradient of hidden states is not asked for.
    assert any(WIDTH in shape and RANK not in shape for shapes in made for shape in shapes) is not frozen


@pytest.mark.parametrize(
    ("function", "frozen", "products", "beside"),
    [
        (LINEAR["in_forward"], False, 3, 0),
        (LINEAR["in_forward"], True, 2, 0),
        (LINEAR["recompute"], False, 4, 0),
        (LINEAR["recompute"], True, 3, 0),
        (LINEAR["log_probs"], False, 4, 0),
        (distillation, False, 4, 2 * VOCABULARY * OF_TEACHER),
        (low_rank, False, 3, 3 * RANK * (VOCABULARY + WIDTH)),
    ],
)
def test_torchs_counter_of_operations_counts_the_products(head, function, frozen, products, beside):
    hidden, weight, target = head
    weight.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter:
        function(hidden, weight, target).sum().backward()
    assert counter.get_total_flops() == 2 * TOKENS * (products * VOCABULARY * WIDTH + beside)
