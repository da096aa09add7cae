"""Two processes hold unequal parts of a head's vocabulary: loss and gradients equal the whole head's."""

import itertools

import pytest
import torch

from pallas_ce import LowRank
from tests.torch_bridge import processes
from torch_bridge import linear_cross_entropy, vocab_parallel_cross_entropy

TOKENS, WIDTH, VOCABULARY = (3, 4), 8, 30
STARTS = (0, 7, VOCABULARY)
OPTIONS = (
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0, "logit_scale": 0.7},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"normalizer": 5.0},
)


def gradients(function, tensors, upstream=None):
    inputs = [x.clone().requires_grad_() for x in tensors]
    loss = function(*inputs)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return [loss.detach(), *(x.grad for x in inputs)]


def compare_with_the_whole(rank, _):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(*TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)
    token_weights = torch.rand(TOKENS)
    target = torch.randint(0, VOCABULARY, TOKENS)
    target[0] = torch.tensor([-100, 0, 7, VOCABULARY])
    mine = slice(STARTS[rank], STARTS[rank + 1])
    for options, ignored in itertools.product(OPTIONS, (False, True)):
        labels = torch.full_like(target, -100) if ignored else target

        def whole(hidden, weight, bias, token_weights, labels=labels, options=options):
            return linear_cross_entropy(
                hidden, weight, labels, linear_bias=bias, token_weights=token_weights, **options
            )

        def part(hidden, weight, bias, token_weights, labels=labels, options=options):
            return vocab_parallel_cross_entropy(
                hidden, weight, labels, linear_bias=bias, token_weights=token_weights,
                vocab_start=STARTS[rank], vocab_size=VOCABULARY, **options,
            )  # fmt: skip

        want = gradients(whole, (hidden, weight, bias, token_weights))
        got = gradients(part, (hidden, weight[mine], bias[mine], token_weights))
        for name, x, y in zip(("loss", "input", "weight", "bias", "token_weights"), got, want, strict=True):
            torch.testing.assert_close(x, y[mine] if name in ("weight", "bias") else y, rtol=1e-5, atol=1e-6, msg=name)
    up, down = torch.randn(VOCABULARY, 3), torch.randn(3, WIDTH)
    want = gradients(
        lambda *x: linear_cross_entropy(x[0], LowRank(*x[1:], 0.7), target), (hidden, weight, up, down)
    )  # fmt: skip
    got = gradients(
        lambda *x: vocab_parallel_cross_entropy(
            x[0], LowRank(*x[1:], 0.7), target, vocab_start=STARTS[rank], vocab_size=VOCABULARY
        ),
        (hidden, weight[mine], up[mine], down),
    )
    for name, x, y in zip(("loss", "input", "weight", "up", "down"), got, want, strict=True):
        torch.testing.assert_close(x, y[mine] if name in ("weight", "up") else y, rtol=1e-4, atol=1e-5, msg=name)
    scale = torch.tensor(0.7)
    want = gradients(lambda x, s: linear_cross_entropy(x, weight, target, logit_scale=s), (hidden, scale))
    got = gradients(
        lambda x, s: vocab_parallel_cross_entropy(
            x, weight[mine], target, logit_scale=s, vocab_start=STARTS[rank], vocab_size=VOCABULARY
        ),
        (hidden, scale),
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # A vocabulary whose ids narrow integers do not hold.
    wide = torch.randn(400, WIDTH)[200 * rank : 200 * rank + 200]
    few = torch.tensor([1, 5, 31, 120])
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        got, want = (
            vocab_parallel_cross_entropy(hidden[0], wide, t, vocab_start=200 * rank, vocab_size=60_000)
            for t in (few.to(dtype), few)
        )
        assert torch.equal(got, want), dtype


def refuse_parts_that_are_not(rank, _):
    """What a process passes that holds the whole weight, or another's rows, where the group says a part."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(4, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.arange(4)

    def loss(weight, start, size=VOCABULARY, **options):
        return vocab_parallel_cross_entropy(hidden, weight, target, vocab_start=start, vocab_size=size, **options)

    half = VOCABULARY // 2
    with pytest.raises(ValueError, match=r"has all 30 rows of vocab_size=30 on one of 2 processes.*linear_cross_entr"):
        loss(weight, 0)
    with pytest.raises(ValueError, match=r"equal on processes 0 and 1 of the group \(vocab_start=0 and 30\)"):
        loss(weight, VOCABULARY * rank, 2 * VOCABULARY, validate_parts=True)
    for start, rows, size in ((0, half, VOCABULARY), (half * rank, half - rank, VOCABULARY), (0, 9, half + 15 * rank)):
        with pytest.raises(ValueError, match=r"must be disjoint and together be one \[0, vocab_size\)"):
            loss(weight[start : start + rows], start, size, validate_parts=True)
    mine = weight[half * rank : half * rank + half]
    assert torch.equal(loss(mine, half * rank, validate_parts=True), loss(mine, half * rank))
    assert loss(torch.zeros_like(mine), half * rank, validate_parts=True).isfinite()  # an initial value of many


def hold_what_is_not_finite(rank, _):
    """A NaN of one part is one of the whole; a part of -inf only has no share in it."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(4, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH), torch.arange(4)
    mine, half = slice(STARTS[rank], STARTS[rank + 1]), weight[: STARTS[1]]
    for value in (torch.nan, -torch.inf):
        bias = torch.zeros(VOCABULARY)
        bias[STARTS[1] :] = value
        loss = vocab_parallel_cross_entropy(
            hidden, weight[mine], target, linear_bias=bias[mine], vocab_start=STARTS[rank], vocab_size=VOCABULARY
        )
        if value != -torch.inf:
            assert loss.isnan()
            continue
        want = linear_cross_entropy(hidden, half, target)
        torch.testing.assert_close(loss, want)
        (got, exact) = (torch.autograd.grad(x, hidden)[0] for x in (loss, want))
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)


def every_check(rank, device):
    """In one group: starting two processes takes longer than all of it."""
    for check in (compare_with_the_whole, refuse_parts_that_are_not, hold_what_is_not_finite):
        check(rank, device)


@pytest.mark.slow
def test_two_parts_have_the_loss_and_gradients_of_the_whole_and_other_parts_are_refused():
    processes.run(every_check)
