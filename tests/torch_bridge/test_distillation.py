"""Distillation on tensors, and on parts of a vocabulary: values and gradients beside float64."""

import functools
import random
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torch_bridge.problems import assert_exact, made, stored_logits
from torch_bridge import linear_distillation, linear_log_probs, vocab_parallel_distillation

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
N, H, TEACHERS, V = 7, 6, 9, 31


def sizes(n: int, h: int, teachers: int, v: int) -> dict[str, tuple[int, ...]]:
    return {
        "input": (n, h), "linear_weight": (v, h), "teacher_input": (n, teachers), "teacher_weight": (v, teachers),
        "linear_bias": (v,), "teacher_bias": (v,), "logit_scale": (), "teacher_logit_scale": (), "token_weights": (n,),
        "temperature": (n,), "up": (v, 2), "down": (2, h),
    }  # fmt: skip


SIZES = sizes(N, H, TEACHERS, V)
HEADS = list(SIZES)[:4]


def stored_divergence(given: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """The divergence of stored logits."""
    p, q = (stored_logits(given, options, side).log_softmax(-1) for side in ("", "teacher_"))
    beta = options.get("beta", 0.5)
    m = torch.logaddexp(np.log(beta) + q, np.log(1 - beta) + p)
    terms = {
        "forward_kl": q.exp() * (q - p),
        "reverse_kl": p.exp() * (p - q),
        "jsd": beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m),
    }
    target, counts = options.get("target"), options.get("row_mask", torch.ones(len(p), dtype=torch.bool))
    counts = counts if target is None else counts & (target >= 0) & (target < p.shape[-1])
    weights = torch.where(counts, given.get("token_weights", torch.ones(len(p)).double()), 0)
    each = weights * terms[options["divergence"]].sum(-1)
    if options.get("reduction") == "none":
        return each
    over = 1.0 if options.get("reduction") == "sum" else options.get("normalizer", weights.sum().clamp(min=1e-30))
    return each.sum() / over


@hypothesis.given(
    further=st.sets(st.sampled_from([*list(SIZES)[4:10], "up down"])),
    options=st.fixed_dictionaries(
        {"divergence": st.sampled_from(DIVERGENCES), "reduction": st.sampled_from(["mean", "sum", "none"]),
         "vocab_size": st.sampled_from([V, 20]), "beta": st.just(0.3)},
        optional={"row_mask": st.just(torch.arange(N) != 4),
                  "target": st.just(torch.tensor([0, 3, -100, 19, 5, V, 1]))},
    ),
    caps=st.sampled_from([(None, None), (3.0, None), (4.0, 2.0)]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_it_is_the_divergence_of_stored_logits(
    further: Any, options: dict[str, Any], caps: Any, transposed: bool, seed: int
) -> None:
    given = made(SIZES, seed, *HEADS, *" ".join(sorted(further)).split())
    if transposed:
        given["linear_weight"] = given["linear_weight"].T.contiguous().T
    options = options | {"logit_softcap": caps[0], "teacher_logit_softcap": caps[1]}
    options |= {} if "temperature" in further else {"temperature": 1.3}
    # Off by roundings of a row's divergence, which may be 60.
    assert_exact(linear_distillation, stored_divergence, given, options, slopes=(2e-4, 1e-4))


def test_a_teacher_of_more_entries_is_cut_where_it_is_named() -> None:
    given = made(SIZES, 0, *HEADS)
    longer = given | {"teacher_weight": torch.cat([given["teacher_weight"], torch.ones(9, TEACHERS)])}
    assert linear_distillation(**longer, vocab_size=V).equal(linear_distillation(**given))


def of_page(start: str) -> str:
    """The block of docs/post_training.md that starts so."""
    page = (Path(__file__).parents[2] / "docs" / "post_training.md").read_text(encoding="utf-8")
    (lines,) = re.findall(rf"```python\n({start}.*?)```", page, re.DOTALL)
    return str(lines)


def test_the_losses_of_other_frameworks_by_the_teachers_ids() -> None:
    """The lines of docs/post_training.md, beside the same of stored logits, whose gradients are the same too."""
    torch.manual_seed(0)
    states, of_teacher = torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 48)
    head, teacher = torch.nn.Linear(32, 500, bias=False), torch.nn.Linear(48, 500)
    page: dict[str, Any] = {"states": states, "of_teacher": of_teacher, "head": head, "teacher": teacher}
    exec(of_page("teacher_logits, "), page | {"torch_log_probs": linear_log_probs}, page)
    log_q = teacher(of_teacher).detach().log_softmax(-1)
    top, ids = log_q.topk(16)
    z = head(states)
    log_p = z.log_softmax(-1).gather(-1, ids)
    want = [(top.exp() * (top - log_p)).sum(-1)]
    log_p, top = z.gather(-1, ids).log_softmax(-1), top.log_softmax(-1)
    want.append(0.5 * (top.exp() * (top - log_p) + log_p.exp() * (log_p - top)).sum(-1))
    for x, y in zip((page["verl_losses"], page["nemo_rl_losses"]), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        pair = [torch.autograd.grad(each.sum(), states, retain_graph=True)[0] for each in (x, y)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


def test_leading_axes_and_low_precision() -> None:
    given = {name: x.bfloat16() for name, x in made(SIZES, 0, *HEADS).items()}
    folded = {name: x[:6].reshape(2, 3, -1) if name.endswith("input") else x for name, x in given.items()}
    each = linear_distillation(**given, reduction="none")
    assert each.dtype == torch.float32
    torch.testing.assert_close(
        linear_distillation(**folded, reduction="none"), each[:6].reshape(2, 3), rtol=1e-6, atol=1e-6
    )


CUTS = (0, 7, V)
TARGET = torch.tensor([0, 30, -100, 8, 31, 7, 6])
# Names of further tensors, and options.
PARTS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("linear_bias", "teacher_bias", "up", "down", "token_weights"),
        {"divergence": "forward_kl", "logit_softcap": 3.0, "validate_parts": True},
    ),
    (
        ("logit_scale", "teacher_logit_scale", "temperature"),
        {"divergence": "jsd", "beta": 0.1, "reduction": "none", "teacher_logit_softcap": 4.0},
    ),
    ((), {"divergence": "reverse_kl", "reduction": "sum", "target": TARGET, "row_mask": torch.arange(N) != 4}),
    ((), {"divergence": "reverse_kl", "row_mask": torch.zeros(N, dtype=torch.bool)}),
)


def compare_drawn_parts_with_float64(rank: int) -> None:
    """Both processes draw the same."""
    draw, numbers = random.Random(0), torch.Generator().manual_seed(0)
    for seed in range(4):
        n, v = draw.randint(1, 9), draw.randint(2, 40)
        of_case, cuts = sizes(n, draw.randint(1, 8), draw.randint(1, 8), v), (0, draw.randint(1, v - 1), v)
        further = draw.sample([*list(SIZES)[4:10], "up down"], draw.randint(0, 4))
        options = {name: draw.choice(values) for name, values in {
            "divergence": DIVERGENCES, "reduction": ("mean", "sum", "none"), "beta": (0.1, 0.5, 0.8),
            "logit_softcap": (None, 3.0), "teacher_logit_softcap": (None, 4.0),
            "row_mask": (torch.ones(n) > 0, torch.rand(n, generator=numbers) > 0.3),
            "target": (None, torch.randint(-1, v + 1, (n,), generator=numbers)),
        }.items()}  # fmt: skip
        options["vocab_size"] = v
        function = functools.partial(vocab_parallel_distillation, vocab_start=cuts[rank])
        given = made(of_case, seed, *HEADS, *" ".join(further).split())
        assert_exact(function, stored_divergence, given, options, slice(*cuts[rank : rank + 2]), slopes=(2e-4, 1e-4))


def compare_parts_with_float64(rank: int, _: str) -> None:
    """`test_vocab_parallel.py` runs it, in its two processes."""
    mine, place = slice(*CUTS[rank : rank + 2]), {"vocab_start": CUTS[rank], "vocab_size": V}
    function = functools.partial(vocab_parallel_distillation, vocab_start=CUTS[rank])
    for seed, (names, options) in enumerate(PARTS):
        given = made(SIZES, seed, *HEADS, *names)
        assert_exact(function, stored_divergence, given, {"vocab_size": V, **options}, mine)
    page: dict[str, Any] = {}
    exec(of_page("import torch.distributed"), page)

    def by_equal_parts(**given: Any) -> Tensor:
        """The page's function of parts that are filled up to 16 rows."""
        weights = given.pop("linear_weight"), given.pop("teacher_weight")
        head, teacher = (torch.nn.functional.pad(x, (0, 0, 0, 16 - len(x)), value=9.0) for x in weights)
        del given["divergence"], given["reduction"]
        found: Tensor = page["divergences"](given.pop("input"), head, given.pop("teacher_input"), teacher, V, **given)
        return found

    options = {"divergence": "forward_kl", "reduction": "none", "temperature": 1.7, "row_mask": torch.arange(N) != 4}
    rows = slice(16 * rank, 16 * rank + 16)
    assert_exact(by_equal_parts, stored_divergence, made(SIZES, 9, *HEADS), options, rows)
    given = made(SIZES, 0, *HEADS)
    short = given | {name: given[name][mine] for name in ("linear_weight", "teacher_weight")} | place
    for wrong, message in (
        ({"teacher_weight": given["teacher_weight"]}, r"teacher_weight has shape \(31, 9\) and linear_we"),
        ({"implementation": "reference"}, "'reference' does not know parts of a vocabulary"),
        ({"divergence": "kl"}, "divergence='kl' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            vocab_parallel_distillation(**short | wrong)
