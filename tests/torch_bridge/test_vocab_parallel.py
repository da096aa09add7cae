"""Two processes hold unequal parts of a head's vocabulary: loss and gradients equal the whole head's."""

import functools
import itertools
import random

import pytest
import torch

from tests.torch_bridge import processes
from tests.torch_bridge.problems import BY_ENTRY, assert_exact, made, stored_logits, stored_loss
from tests.torch_bridge.test_distillation import compare_drawn_parts_with_float64, compare_parts_with_float64
from torch_bridge import linear_cross_entropy, linear_log_probs, vocab_parallel_cross_entropy, vocab_parallel_log_probs

TOKENS, WIDTH, VOCABULARY = (3, 4), 8, 30


def sizes(tokens, width, v):
    return {
        "input": (*tokens, width), "linear_weight": (v, width), "linear_bias": (v,), "logit_scale": (),
        "up": (v, 3), "down": (3, width), "temperature": tokens, "token_weights": tokens,
    }  # fmt: skip


SIZES = sizes(TOKENS, WIDTH, VOCABULARY)
TARGET = torch.tensor([[-100, 0, 7, VOCABULARY], [1, 3, 6, 29], [8, 20, 5, -1]])
HEAD, BIASED = ("input", "linear_weight"), ("input", "linear_weight", "linear_bias", "token_weights")
# Names of tensors, and options; those that differ in reductions share their programs.
LOSSES = (
    *((BIASED, options) for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"normalizer": 5.0})),
    (BIASED, {"class_weights": torch.linspace(-0.2, 2, VOCABULARY).relu()}),
    (BIASED, {"target": torch.full(TOKENS, -100)}),
    (BIASED, {"class_weights": torch.linspace(0, 2, VOCABULARY), "label_smoothing": 0.2, "z_loss": 0.1}),
    ((*HEAD, "up", "down", "logit_scale"), {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0}),
)
NEAR = {"values": (1e-5, 1e-6), "slopes": (1e-5, 1e-6)}
# The same, and where the vocabulary is cut.
LOG_PROBS = (
    ((*BIASED[:3], "logit_scale", "temperature"), {"logit_softcap": 4.0}, 7),
    ((*HEAD, "up", "down"), {"temperature": torch.tensor(2.5), "ignore_index": 3}, 19),
)


def part(rank, cut=7):
    """The process's rows of a weight, and how a call says which they are."""
    mine = slice(cut) if rank == 0 else slice(cut, None)
    return mine, {"vocab_start": cut * rank, "vocab_size": VOCABULARY}


def compare_losses_with_float64(rank, _):
    mine, place = part(rank)
    function = functools.partial(vocab_parallel_cross_entropy, vocab_start=place["vocab_start"])
    for names, options in LOSSES:
        given, options = made(SIZES, 0, *names), {"target": TARGET, "vocab_size": VOCABULARY, **options}
        assert_exact(function, stored_loss, given, options, mine, **NEAR)
        if smoothing := options.pop("label_smoothing", None):  # as a tensor; and 0, which as a number is left out
            for value in (smoothing, 0.0):
                number = {"label_smoothing": torch.tensor(value)}
                assert_exact(function, stored_loss, given | number, options, mine, **NEAR)
    # A vocabulary whose ids narrow integers do not hold.
    hidden, few = torch.ones(4, WIDTH), torch.tensor([1, 5, 31, 120])
    wide = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0))[200 * rank : 200 * rank + 200]
    losses = [
        vocab_parallel_cross_entropy(hidden, wide, few.to(dtype), vocab_start=200 * rank, vocab_size=60_000)
        for dtype in (torch.int64, torch.int8, torch.uint8, torch.int16, torch.int32)
    ]
    assert all(map(losses[0].equal, losses))


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


def stored_log_probs(given, options):
    """`[2, ...]`: log-probabilities and entropies of stored logits."""
    log_p, target = stored_logits(given, options).log_softmax(-1), options["target"]
    v = log_p.shape[-1]
    counts = (target >= 0) & (target < v) & (target != options.get("ignore_index", -100))
    of_target = log_p.gather(-1, target.clamp(0, v - 1)[..., None])[..., 0]
    return torch.stack([of_target, -(log_p.exp() * log_p).sum(-1)]) * counts


def compare_log_probs_with_float64(rank, _):
    for names, options, cut in LOG_PROBS:
        mine, place = part(rank, cut)
        given = made(SIZES, 1, *names)
        options = {"target": TARGET, "vocab_size": VOCABULARY, **options}
        largest = stored_logits(given, options)[1, 0].argmax()
        same = 0 if largest >= cut else VOCABULARY - 1  # has the same logits, in the other part
        for name in set(names) & set(BY_ENTRY):
            given[name][same] = given[name][largest]
        rows = []

        def log_probs(place=place, rows=rows, **given):
            further = {"return_entropy": True, "return_argmax": True, "validate_parts": True} | place
            rows.append(vocab_parallel_log_probs(**given | further))
            return torch.stack([rows[-1].log_prob, rows[-1].entropy])

        assert_exact(log_probs, stored_log_probs, given, options, mine, slopes=(1e-4, 2e-5))
        counts, argmax = stored_log_probs(given, options)[1] > 0, stored_logits(given, options).argmax(-1)
        assert rows[0].argmax.equal(argmax.where(counts, 0).int())
        assert rows[0].argmax[1, 0] == min(same, largest)
    given, options = made(SIZES, 2, *HEAD), {"target": TARGET, "temperature": 0.3, "ignore_index": None}
    mine, place = part(rank, 1)
    alone = vocab_parallel_log_probs(given["input"], given["linear_weight"][mine], **options, **place)
    torch.testing.assert_close(alone, stored_log_probs(given, options)[0], rtol=1e-5, atol=1e-5)


def compare_drawn_log_probs_with_float64(rank):
    """Both processes draw the same."""
    draw, numbers = random.Random(0), torch.Generator().manual_seed(0)
    for seed in range(4):
        tokens, v = draw.choice([(1,), (5,), (2, 3)]), draw.randint(2, 40)
        cut, names = draw.randint(1, v - 1), [*HEAD, *draw.sample([*list(SIZES)[2:4], "temperature", "up down"], 2)]
        target = torch.randint(-1, v + 1, tokens, generator=numbers)
        options = {"target": target, "ignore_index": draw.choice([-100, None, 1])}
        options |= {"logit_softcap": draw.choice([None, 4.0]), "vocab_size": v}
        options |= {} if "temperature" in names else {"temperature": draw.choice([0.7, torch.tensor(2.5)])}
        given = made(sizes(tokens, draw.randint(1, 9), v), seed, *" ".join(names).split())

        def log_probs(cut=cut, **given):
            found = vocab_parallel_log_probs(vocab_start=cut * rank, return_entropy=True, **given)
            return torch.stack([found.log_prob, found.entropy])

        mine = slice(cut) if rank == 0 else slice(cut, None)
        assert_exact(log_probs, stored_log_probs, given, options, mine, slopes=(1e-4, 2e-5))


def hold_what_is_not_finite(rank, _):
    """Values and gradients are as in the whole head: of +inf or NaN on one process, and of -inf on one or on both."""
    hidden, weight = made(SIZES, 0, *HEAD).values()
    mine, place = part(rank)

    def log_probs(function, *head, **options):
        found = function(*head, return_entropy=True, **options)
        return torch.stack((found[0] if function is linear_log_probs else found.log_prob, found.entropy))

    functions = (
        (linear_cross_entropy, vocab_parallel_cross_entropy, {"reduction": "none"}),
        (linear_cross_entropy, vocab_parallel_cross_entropy, {"z_loss": 0.1, "label_smoothing": 0.1}),
        (functools.partial(log_probs, linear_log_probs), functools.partial(log_probs, vocab_parallel_log_probs), {}),
    )
    faults = [(value, at) for value in (torch.inf, torch.nan, -torch.inf) for at in (slice(12, 13), slice(7, None))]
    for (value, at), (whole, of_part, options) in itertools.product([*faults, (-torch.inf, slice(None))], functions):
        target = torch.tensor([0, 3, 5, -100] if value == -torch.inf else [0, 12, 9, -100])
        # What else makes the loss infinite has infinite derivatives, whose sums may differ.
        differentiated = "z_loss" not in options and (value != torch.inf or bool(options))

        def results(function, rows, target=target, value=value, at=at, differentiated=differentiated, **options):
            bias = torch.zeros(VOCABULARY)
            bias[at] = value
            leaves = [x.clone().requires_grad_(differentiated) for x in (hidden[0], weight[rows], bias[rows])]
            found = function(*leaves[:2], target, linear_bias=leaves[2], **options)
            return [found.detach(), *(torch.autograd.grad(found.sum(), leaves) if differentiated else ())]

        want = results(whole, slice(None), implementation="reference", **options)
        want[2:] = [x[mine] for x in want[2:]]
        got = results(of_part, mine, **options, **place)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{value} {at} {options}")


def every_check(rank, device):
    """In one group: starting two processes takes longer than all of it."""
    compare_losses_with_float64(rank, device)
    refuse_parts_that_are_not(rank, device)
    compare_log_probs_with_float64(rank, device)
    compare_drawn_log_probs_with_float64(rank)
    compare_parts_with_float64(rank, device)
    compare_drawn_parts_with_float64(rank)
    hold_what_is_not_finite(rank, device)


@pytest.mark.slow
def test_two_parts_have_the_loss_and_gradients_of_the_whole_and_other_parts_are_refused():
    processes.run(every_check)
