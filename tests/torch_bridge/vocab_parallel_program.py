"""Two processes hold unequal parts of a head's vocabulary: loss and gradients are those of the whole head."""

import itertools

import pytest
import torch
import torch.distributed as dist

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


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
    # A vocabulary whose ids narrow integers do not hold.
    wide = torch.randn(400, WIDTH)[200 * rank : 200 * rank + 200]
    few = torch.tensor([1, 5, 31, 120])
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        got, want = (
            vocab_parallel_cross_entropy(hidden[0], wide, t, vocab_start=200 * rank, vocab_size=60_000)
            for t in (few.to(dtype), few)
        )
        assert torch.equal(got, want), dtype
    for message, wrong in (
        ("normalizer is given with reduction='sum'", {"reduction": "sum", "normalizer": 5.0}),
        ("label_smoothing=3.0 must be between 0 and 1", {"label_smoothing": 3.0}),
        (r"token_weights has shape \(1,\); it must be", {"token_weights": torch.ones(1)}),
        ("ignore_index='a' must be", {"ignore_index": "a"}),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            vocab_parallel_cross_entropy(hidden, weight[mine], target, vocab_start=0, vocab_size=VOCABULARY, **wrong)
    with pytest.raises(ValueError, match="vocab_start=20 with 23 rows"):
        vocab_parallel_cross_entropy(hidden, weight[7:], target, vocab_start=20, vocab_size=VOCABULARY)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
