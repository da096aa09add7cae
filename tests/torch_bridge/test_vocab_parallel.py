"""Two processes hold unequal parts of a head's vocabulary: loss and gradients equal the whole head's."""

import functools
import itertools
import random

import pytest
import torch

from pallas_ce import LowRank
from tests.torch_bridge import processes
from tests.torch_bridge.test_distillation import compare_parts_with_float64
from torch_bridge import (
    linear_cross_entropy,
    linear_log_probs,
    linear_row_statistics,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_probs,
)

TOKENS, WIDTH, VOCABULARY = (3, 4), 8, 30
STARTS = (0, 7, VOCABULARY)
OPTIONS = (
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0, "logit_scale": 0.7},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"normalizer": 5.0},
    {"class_weights": torch.linspace(-0.2, 2, VOCABULARY).relu()},
    {"class_weights": torch.linspace(0, 2, VOCABULARY), "label_smoothing": 0.2, "z_loss": 1e-2, "reduction": "sum"},
)


def gradients(function, *tensors):
    inputs = [x.clone().requires_grad_() for x in tensors]
    loss = function(*inputs)
    loss.backward(torch.ones_like(loss))
    return [loss.detach(), *(x.grad for x in inputs)]


def parts(rank):
    """The process's rows of a weight, and how a call says which they are."""
    mine = slice(STARTS[rank], STARTS[rank + 1])
    return mine, {"vocab_start": STARTS[rank], "vocab_size": VOCABULARY}


def compare_with_the_whole(rank, _):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(*TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)
    up, down, token_weights = torch.randn(VOCABULARY, 3), torch.randn(3, WIDTH), torch.rand(TOKENS)
    target = torch.randint(0, VOCABULARY, TOKENS)
    target[0] = torch.tensor([-100, 0, 7, VOCABULARY])
    nothing = torch.full_like(target, -100)
    mine, place = parts(rank)

    def of_head(loss, labels, options, x, w, b, s):
        return loss(x, w, labels, linear_bias=b, token_weights=s, **options)

    def of_low_rank(loss, labels, options, x, w, up, down):
        return loss(x, LowRank(w, up, down, 0.7), labels, **options)

    def of_number(loss, labels, options, x, number):
        head = weight[mine] if options else weight
        return loss(x, head, labels, **{name: number}, **options)

    head, term = (hidden, weight, bias, token_weights), (hidden, weight, up, down)
    cases = [(of_head, target, options, head) for options in OPTIONS]
    cases += [(of_head, nothing, options, head) for options in OPTIONS[:2]] + [(of_low_rank, target, {}, term)]
    for function, labels, options, given in cases:
        want = gradients(functools.partial(function, linear_cross_entropy, labels, options), *given)
        split = [x[mine] if len(x) == VOCABULARY else x for x in given]
        loss = functools.partial(function, vocab_parallel_cross_entropy, labels, options | place)
        want = [x[mine] if x.ndim and len(x) == VOCABULARY else x for x in want]
        near = {"rtol": 1e-5, "atol": 1e-6} if function is of_head else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(gradients(loss, *split), want, **near, msg=f"{options}")
    for name, value in (("logit_scale", 0.7), ("label_smoothing", 0.0)):  # as tensors, with gradients
        given = hidden, torch.tensor(value)
        want = gradients(functools.partial(of_number, linear_cross_entropy, target, {}), *given)
        got = gradients(functools.partial(of_number, vocab_parallel_cross_entropy, target, place), *given)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)
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
    with pytest.raises(ValueError, match=r"has all 30 rows of vocab_size=30 on one of 2 .*function of a whole head"):
        loss(weight, 0)
    with pytest.raises(ValueError, match=r"equal on processes 0 and 1 of the group \(vocab_start=0 and 30\)"):
        loss(weight, VOCABULARY * rank, 2 * VOCABULARY, validate_parts=True)
    for start, rows, size in ((0, half, VOCABULARY), (half * rank, half - rank, VOCABULARY), (0, 9, half + 15 * rank)):
        with pytest.raises(ValueError, match=r"must be disjoint and together be one \[0, vocab_size\)"):
            loss(weight[start : start + rows], start, size, validate_parts=True)
    mine = weight[half * rank : half * rank + half]
    assert torch.equal(loss(mine, half * rank, validate_parts=True), loss(mine, half * rank))
    assert loss(torch.zeros_like(mine), half * rank, validate_parts=True).isfinite()  # an initial value of many


def compare_log_probs_with_the_whole(rank, _):
    torch.manual_seed(1)
    mine, place = parts(rank)
    temperatures = (1.0, 0.3, torch.tensor(1.5), 0.5 + torch.rand(TOKENS))
    for temperature, softcap in zip(temperatures, (None, 4.0, None, 4.0), strict=True):
        hidden, weight, bias = torch.randn(*TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)
        scale, upstream, target = torch.tensor(0.9), torch.randn(2, *TOKENS), torch.randint(0, VOCABULARY, TOKENS)
        target[-1] = torch.tensor([-100, 0, VOCABULARY - 1, VOCABULARY])
        weight[20], bias[20] = weight[3], bias[3]  # the largest logit of a row is in both parts
        hidden[1, 0] = weight[3]
        bias[3] = bias[20] = 5.0
        options = {"temperature": temperature, "logit_softcap": softcap}

        def results(function, *given, options=options, upstream=upstream, target=target, **further):
            x, w, b, s = leaves = [tensor.clone().requires_grad_() for tensor in given]
            row = function(x, w, target, linear_bias=b, logit_scale=s, **options, **further)
            numbers = [row.log_prob, row.entropy]
            return row.argmax, [*numbers, *torch.autograd.grad(numbers, leaves, list(upstream))]

        further = {"row_mask": (target >= 0) & (target < VOCABULARY), "statistics": ("log_prob", "entropy", "argmax")}
        argmax, want = results(linear_row_statistics, hidden, weight, bias, scale, **further)
        further = {"return_entropy": True, "return_argmax": True, "validate_parts": True, **place}
        found, got = results(vocab_parallel_log_probs, hidden, weight[mine], bias[mine], scale, **further)
        assert found.equal(argmax)
        assert found[1, 0] == 3
        want = [x[mine] if place in (3, 4) else x for place, x in enumerate(want)]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    alone = vocab_parallel_log_probs(hidden, weight[mine], target, **place)
    torch.testing.assert_close(alone, linear_log_probs(hidden, weight, target), rtol=1e-5, atol=1e-5)


def compare_drawn_log_probs_with_float64(rank, _):
    """Log-probabilities, entropies and all gradients beside stored logits, of parts that are cut anywhere."""
    for seed in range(61, 65):  # which draw each value below at least once
        torch.manual_seed(seed)
        draw = random.Random(seed)
        cut, size, ignored = draw.randrange(1, VOCABULARY), draw.choice([1, 30]), draw.choice([-100, 3, None])
        given = {"input": size**0.5 * torch.randn(*TOKENS, WIDTH), "weight": torch.randn(VOCABULARY, WIDTH)}
        if draw.random() < 0.5:
            given["linear_bias"] = torch.randn(VOCABULARY)
        if draw.random() < 0.5:
            given["logit_scale"] = 0.5 + torch.rand(())
        if draw.random() < 0.5:
            given |= {"up": torch.randn(VOCABULARY, 2), "down": torch.randn(2, WIDTH)}
        softcap = draw.choice([None, 4.0])
        temperature = draw.choice([1.0, 0.3, torch.tensor(2.5), 0.4 + torch.rand(TOKENS)])
        target, upstream = torch.randint(-1, VOCABULARY + 1, TOKENS), torch.randn(2, *TOKENS)
        counts = (target >= 0) & (target < VOCABULARY) & (target != ignored)

        exact = {name: x.double().requires_grad_() for name, x in given.items()}
        weight = exact["weight"] + (0.7 * exact["up"] @ exact["down"] if "up" in exact else 0.0)
        z = (exact["input"] @ weight.T + exact.get("linear_bias", 0.0)) * exact.get("logit_scale", 1.0)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        log_p = (z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)).log_softmax(-1)
        of_target = log_p.gather(-1, target.clamp(0, VOCABULARY - 1)[..., None])[..., 0]
        want = torch.stack([of_target, -(log_p.exp() * log_p).sum(-1)]) * counts
        needed = torch.autograd.grad(want, list(exact.values()), upstream.double())

        mine = (slice(cut), slice(cut, None))[rank]
        leaves = {n: (x[mine] if x.ndim and len(x) == VOCABULARY else x).clone() for n, x in given.items()}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        options = {name: leaves[name] for name in ("linear_bias", "logit_scale") if name in leaves}
        head = leaves["weight"]
        head = LowRank(head, leaves["up"], leaves["down"], 0.7) if "up" in leaves else head
        options |= {"temperature": temperature, "logit_softcap": softcap, "ignore_index": ignored}
        place = {"vocab_start": cut * rank, "vocab_size": VOCABULARY}
        row = vocab_parallel_log_probs(leaves["input"], head, target, return_entropy=True, **options, **place)
        got = torch.stack([row.log_prob, row.entropy])
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5, msg=f"{seed}")
        slopes = torch.autograd.grad(got, list(leaves.values()), upstream)
        for name, x, y in zip(leaves, slopes, needed, strict=True):
            y = y[mine] if y.ndim and len(y) == VOCABULARY else y
            torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-4, msg=f"{seed} {name}")


def hold_what_is_not_finite(rank, _):
    """Values and gradients are as in the whole head: of +inf or NaN on one process, and of -inf on one or on both."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, WIDTH), torch.randn(VOCABULARY, WIDTH)
    mine, place = parts(rank)

    def log_probs(function, *head, **options):
        found = function(*head, return_entropy=True, **options)
        return torch.stack((found[0] if function is linear_log_probs else found.log_prob, found.entropy))

    functions = (
        (linear_cross_entropy, vocab_parallel_cross_entropy, {"reduction": "none"}),
        (linear_cross_entropy, vocab_parallel_cross_entropy, {"z_loss": 0.1, "label_smoothing": 0.1}),
        (functools.partial(log_probs, linear_log_probs), functools.partial(log_probs, vocab_parallel_log_probs), {}),
    )
    faults = [(value, at) for value in (torch.inf, torch.nan, -torch.inf) for at in (slice(12, 13), slice(7, None))]
    for (value, at), (whole, part, options) in itertools.product([*faults, (-torch.inf, slice(None))], functions):
        bias = torch.zeros(VOCABULARY)
        bias[at] = value
        target = torch.tensor([0, 3, 5, -100] if value == -torch.inf else [0, 12, 9, -100])

        def call(x, w, b, function, target=target, options=options, **place):
            return function(x, w, target, linear_bias=b, **options, **place)

        want = gradients(functools.partial(call, function=whole), hidden, weight, bias)
        got = gradients(functools.partial(call, function=part, **place), hidden, weight[mine], bias[mine])
        want = [x[mine] if name in (2, 3) else x for name, x in enumerate(want)]
        # What else makes the loss infinite has infinite derivatives, whose sums may differ.
        if "z_loss" in options or (value == torch.inf and not options):
            got, want = got[:1], want[:1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{value} {at} {options}")


def every_check(rank, device):
    """In one group: starting two processes takes longer than all of it."""
    compare_with_the_whole(rank, device)
    refuse_parts_that_are_not(rank, device)
    compare_log_probs_with_the_whole(rank, device)
    compare_parts_with_float64(rank, device)
    hold_what_is_not_finite(rank, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "checks", [every_check, pytest.param(compare_drawn_log_probs_with_float64, marks=pytest.mark.nightly)]
)
def test_two_parts_have_the_loss_and_gradients_of_the_whole_and_other_parts_are_refused(checks):
    processes.run(checks)
