"""Distillation on tensors, and on parts of a vocabulary: values and gradients beside float64."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from pallas_ce import LowRank
from torch_bridge import linear_distillation, linear_log_probs, vocab_parallel_distillation

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
N, H, TEACHERS, V, SCALE = 7, 6, 9, 31, 1.5
SIZES: dict[str, tuple[int, ...]] = {
    "input": (N, H), "linear_weight": (V, H), "teacher_input": (N, TEACHERS), "teacher_weight": (V, TEACHERS),
    "linear_bias": (V,), "teacher_bias": (V,), "logit_scale": (), "teacher_logit_scale": (), "token_weights": (N,),
    "temperature": (N,), "up": (V, 2), "down": (2, H),
}  # fmt: skip
POSITIVE = {"logit_scale", "teacher_logit_scale", "token_weights", "temperature"}


def tensors(seed: int, *names: str) -> dict[str, Tensor]:
    """A student's and a teacher's tensors, and of further names."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    made |= {name: made[name].abs() + 0.5 for name in POSITIVE}
    return {name: made[name] for name in (*list(SIZES)[:4], *names)}


NAMED = ("input", "weight", "bias")


def in_float64(given: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """The divergence of stored logits."""
    size = options.get("vocab_size", V)

    def log_softmax(side: str) -> Tensor:
        names = {"": ("input", "linear_weight", "linear_bias"), "teacher_": [f"teacher_{x}" for x in NAMED]}[side]
        hidden, weight = (given[name] for name in names[:2])
        if not side and "up" in given:
            weight = weight + SCALE * given["up"] @ given["down"]
        z = ((hidden @ weight.T + given.get(names[2], 0.0)) * given.get(side + "logit_scale", 1.0))[:, :size]
        cap = options.get(side + "logit_softcap")
        z = z if cap is None else cap * torch.tanh(z / cap)
        temperature = given.get("temperature", options.get("temperature", 1.0))
        return (z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)).log_softmax(-1)

    p, q, beta = log_softmax(""), log_softmax("teacher_"), options.get("beta", 0.5)
    m = torch.logaddexp(np.log(beta) + q, np.log(1 - beta) + p)
    terms = {
        "forward_kl": q.exp() * (q - p),
        "reverse_kl": p.exp() * (p - q),
        "jsd": beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m),
    }
    target, counts = options.get("target"), options.get("row_mask", torch.ones(N, dtype=torch.bool))
    counts = counts if target is None else counts & (target >= 0) & (target < size)
    weights = torch.where(counts, given.get("token_weights", torch.ones(N).double()), 0)
    each = weights * terms[options["divergence"]].sum(-1)
    if options.get("reduction") == "none":
        return each
    over = 1.0 if options.get("reduction") == "sum" else options.get("normalizer", weights.sum().clamp(min=1e-30))
    return each.sum() / over


def check(
    function: Any, whole: dict[str, Tensor], options: dict[str, Any], mine: slice = slice(None), atol: float = 2e-5
) -> None:
    """A divergence and the student's gradients, of a weight's rows that are `mine`, beside float64."""
    constants = {"temperature", *(name for name in whole if name.startswith("teacher"))}
    parts = ("linear_weight", "linear_bias", "up", "teacher_weight", "teacher_bias")
    exact = {name: x.double().requires_grad_(name not in constants) for name, x in whole.items()}
    given = {name: (x[mine] if name in parts else x).clone() for name, x in whole.items()}
    leaves = {name: x.requires_grad_() for name, x in given.items() if name not in constants}
    if "up" in given:
        given["linear_weight"] = LowRank(given["linear_weight"], given.pop("up"), given.pop("down"), SCALE)
    found, want = function(**given, **options), in_float64(exact, options)
    upstream = torch.linspace(-1, 1.5, N) if found.ndim else torch.tensor(-0.7)
    got = torch.autograd.grad(found, list(leaves.values()), upstream)
    needed = torch.autograd.grad(want, [exact[name] for name in leaves], upstream.double())
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-6)
    for name, x, y in zip(leaves, got, needed, strict=True):
        y = y[mine] if name in parts else y
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=atol, msg=f"{options} {name}")


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
    given = tensors(seed, *" ".join(sorted(further)).split())
    if transposed:
        given["linear_weight"] = given["linear_weight"].T.contiguous().T
    options = options | {"logit_softcap": caps[0], "teacher_logit_softcap": caps[1]}
    options |= {} if "temperature" in further else {"temperature": 1.3}
    check(linear_distillation, given, options, atol=1e-4)  # off by roundings of a row's divergence, which may be 60


def test_a_teacher_of_more_entries_is_cut_where_it_is_named() -> None:
    given = tensors(0)
    longer = given | {"teacher_weight": torch.cat([given["teacher_weight"], torch.ones(9, TEACHERS)])}
    assert linear_distillation(**longer, vocab_size=V).equal(linear_distillation(**given))


def of_page(start: str) -> str:
    """The block of docs/post_training.md that starts so."""
    page = (Path(__file__).parents[2] / "docs" / "post_training.md").read_text(encoding="utf-8")
    (lines,) = re.findall(rf"```python\n({start}.*?)```", page, re.DOTALL)
    return str(lines)


def test_the_losses_of_other_frameworks_by_the_teachers_ids() -> None:
    """The lines of docs/post_training.md, beside the same of stored logits, whose gradients are the same too."""
    lines = of_page("teacher_logits, ")
    torch.manual_seed(0)
    states, of_teacher = torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 48)
    head, teacher = torch.nn.Linear(32, 500, bias=False), torch.nn.Linear(48, 500)
    made: dict[str, Any] = {"states": states, "of_teacher": of_teacher, "head": head, "teacher": teacher}
    exec(lines, made | {"torch_log_probs": linear_log_probs}, made)
    log_q = teacher(of_teacher).detach().log_softmax(-1)
    top, ids = log_q.topk(16)
    z = head(states)
    log_p = z.log_softmax(-1).gather(-1, ids)
    want = [(top.exp() * (top - log_p)).sum(-1)]
    log_p, top = z.gather(-1, ids).log_softmax(-1), top.log_softmax(-1)
    want.append(0.5 * (top.exp() * (top - log_p) + log_p.exp() * (log_p - top)).sum(-1))
    for x, y in zip((made["verl_losses"], made["nemo_rl_losses"]), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        pair = [torch.autograd.grad(each.sum(), states, retain_graph=True)[0] for each in (x, y)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


def test_leading_axes_and_low_precision() -> None:
    given = {name: x.bfloat16() for name, x in tensors(0).items()}
    folded = {name: x[:6].reshape(2, 3, -1) if name.endswith("input") else x for name, x in given.items()}
    each = linear_distillation(**given, reduction="none")
    assert each.dtype == torch.float32
    torch.testing.assert_close(
        linear_distillation(**folded, reduction="none"), each[:6].reshape(2, 3), rtol=1e-6, atol=1e-6
    )


CUTS = (0, 7, V)
# Names of further tensors, and options; with each divergence in turn.
PARTS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("linear_bias", "teacher_bias", "token_weights"), {"reduction": "sum", "logit_softcap": 3.0}),
    (("logit_scale", "teacher_logit_scale", "temperature"), {"reduction": "none", "teacher_logit_softcap": 4.0}),
    (("linear_bias", "up", "down"), {"temperature": 1.7, "beta": 0.1}),
    (("token_weights",), {"normalizer": 3.0, "target": torch.tensor([0, 30, -100, 8, 31, 7, 6])}),
    ((), {"row_mask": torch.arange(N) != 4, "target": torch.tensor([0, 30, -100, 8, 31, 7, 6])}),
    ((), {"row_mask": torch.zeros(N, dtype=torch.bool)}),
)


def compare_parts_with_float64(rank: int, _: str) -> None:
    """`test_vocab_parallel.py` runs it, in its two processes."""
    mine, place = slice(*CUTS[rank : rank + 2]), {"vocab_start": CUTS[rank], "vocab_size": V}
    for seed, (divergence, (names, options)) in enumerate(zip(itertools.cycle(DIVERGENCES), PARTS, strict=False)):
        function = functools.partial(vocab_parallel_distillation, validate_parts=seed == 0, vocab_start=CUTS[rank])
        check(function, tensors(seed, *names), {"divergence": divergence, "vocab_size": V, **options}, mine)
    made: dict[str, Any] = {}
    exec(of_page("import torch.distributed"), made)

    def by_equal_parts(**given: Any) -> Tensor:
        """The page's function of parts that are filled up to 16 rows."""
        weights = given.pop("linear_weight"), given.pop("teacher_weight")
        head, teacher = (torch.nn.functional.pad(x, (0, 0, 0, 16 - len(x)), value=9.0) for x in weights)
        del given["divergence"], given["reduction"]
        found: Tensor = made["divergences"](given.pop("input"), head, given.pop("teacher_input"), teacher, V, **given)
        return found

    options = {"divergence": "forward_kl", "temperature": 1.7, "row_mask": torch.arange(N) != 4}
    check(by_equal_parts, tensors(9), options | {"reduction": "none"}, slice(16 * rank, 16 * rank + 16))
    given = tensors(0)
    short = given | {name: given[name][mine] for name in ("linear_weight", "teacher_weight")}
    for wrong, message in (
        (
            short | place | {"teacher_weight": given["teacher_weight"]},
            r"teacher_weight has shape \(31, 9\) and linear_we",
        ),
        (short | place | {"implementation": "reference"}, "'reference' does not know parts of a vocabulary"),
        (short | place | {"divergence": "kl"}, "divergence='kl' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            vocab_parallel_distillation(**wrong)
