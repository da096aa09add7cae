"""`linear_distillation` on tensors: values and gradients beside the library's own."""

import itertools
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import pallas_ce
from pallas_ce import LowRank
from tests.torch_bridge import processes
from torch_bridge import linear_distillation, linear_log_probs, vocab_parallel_distillation

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
N, H, TEACHERS, V, SCALE = 7, 6, 9, 31, 1.5
SIZES: dict[str, tuple[int, ...]] = {
    "input": (N, H), "linear_weight": (V, H), "teacher_input": (N, TEACHERS), "teacher_weight": (V, TEACHERS),
    "linear_bias": (V,), "teacher_bias": (V,), "logit_scale": (), "teacher_logit_scale": (), "token_weights": (N,),
    "temperature": (N,), "up": (V, 2), "down": (2, H),
}  # fmt: skip
NAMES = {"input": "hidden", "linear_weight": "weight", "linear_bias": "bias", "teacher_input": "teacher_hidden"}
POSITIVE = {"logit_scale", "teacher_logit_scale", "token_weights", "temperature"}


def tensors(seed: int, *names: str) -> dict[str, Tensor]:
    """A student's and a teacher's tensors, and of further names."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    made |= {name: made[name].abs() + 0.5 for name in POSITIVE}
    return {name: made[name] for name in (*list(SIZES)[:4], *names)}


def with_term(given: dict[str, Any], weight: str) -> dict[str, Any]:
    """The low-rank term in its weight."""
    given = dict(given)
    if "up" in given:
        given[weight] = LowRank(given[weight], given.pop("up"), given.pop("down"), SCALE)
    return given


NAMED = ("input", "weight", "bias")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("implementation", [None, "reference"])
@hypothesis.given(
    divergence=st.sampled_from(DIVERGENCES),
    further=st.sets(st.sampled_from([*list(SIZES)[4:10], "term"])),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    masks=st.sets(st.sampled_from(["target", "row_mask"])),
    size=st.sampled_from([V, 20]),
    caps=st.sampled_from([(None, None), (3.0, None), (4.0, 2.0)]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_librarys_divergence_of_stored_logits(
    divergence: Any, further: Any, reduction: Any, masks: Any, size: int, caps: Any, transposed: bool, seed: int,
    implementation: Any,
) -> None:  # fmt: skip
    given = tensors(seed, *sorted(further - {"term"}), *(["up", "down"] if "term" in further else []))
    if transposed:
        given["linear_weight"] = given["linear_weight"].T.contiguous().T
    trained = [name for name in given if name != "temperature" and not name.startswith("teacher")]
    for name in trained:
        given[name].requires_grad_()
    target = torch.tensor([0, 3, -100, 19, 5, V, 1]) if "target" in masks else None
    row_mask = torch.arange(N) != 4 if "row_mask" in masks else None
    options: dict[str, Any] = {"divergence": divergence, "beta": 0.3, "reduction": reduction, "vocab_size": size}
    options |= {"logit_softcap": caps[0], "teacher_logit_softcap": caps[1]}
    options |= {} if "temperature" in further else {"temperature": 1.3}
    found = linear_distillation(
        target=target, row_mask=row_mask, implementation=implementation, **with_term(given, "linear_weight"), **options
    )
    upstream = torch.linspace(-1, 1.5, N) if reduction == "none" else torch.tensor(-0.7)
    got = torch.autograd.grad(found, [given[name] for name in trained], upstream)

    arrays = {name: jnp.asarray(x.detach().numpy()) for name, x in given.items()}
    options |= {name: None if x is None else x.numpy() for name, x in (("labels", target), ("row_mask", row_mask))}

    def weighted(chosen: dict[str, Any]) -> Any:
        x = with_term({NAMES.get(name, name): y for name, y in (arrays | chosen).items()}, "weight")
        loss = pallas_ce.linear_distillation(**x, implementation="reference", **options)
        return jnp.sum(loss * upstream.numpy()), loss

    (_, want), needed = jax.value_and_grad(weighted, has_aux=True)({name: arrays[name] for name in trained})
    np.testing.assert_allclose(found.detach(), want, rtol=2e-5, atol=2e-6)
    for name, x in zip(trained, got, strict=True):  # off by roundings of a row's divergence, which may be 60
        np.testing.assert_allclose(x, needed[name], rtol=2e-4, atol=1e-4)


def test_a_teacher_of_more_entries_is_cut_where_it_is_named() -> None:
    given = tensors(0)
    longer = given | {"teacher_weight": torch.cat([given["teacher_weight"], torch.ones(9, TEACHERS)])}
    assert linear_distillation(**longer, vocab_size=V).equal(linear_distillation(**given))


def test_the_losses_of_other_frameworks_by_the_teachers_ids() -> None:
    """The lines of docs/post_training.md, beside the same of stored logits, whose gradients are the same too."""
    page = (Path(__file__).parents[2] / "docs" / "post_training.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(teacher_logits, .*?)```", page, re.DOTALL)
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


def in_float64(given: dict[str, Tensor], divergence: str, options: dict[str, Any]) -> Tensor:
    """The divergence of stored logits."""

    def log_softmax(side: str) -> Tensor:
        names = {"": ("input", "linear_weight", "linear_bias"), "teacher_": [f"teacher_{x}" for x in NAMED]}[side]
        hidden, weight = (given[name] for name in names[:2])
        if not side and "up" in given:
            weight = weight + 1.5 * given["up"] @ given["down"]
        z = (hidden @ weight.T + given.get(names[2], 0.0)) * given.get(side + "logit_scale", 1.0)
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
    counts = counts if target is None else counts & (target >= 0) & (target < V)
    weights = torch.where(counts, given.get("token_weights", torch.ones(N).double()), 0)
    each = weights * terms[divergence].sum(-1)
    if options.get("reduction") == "none":
        return each
    over = 1.0 if options.get("reduction") == "sum" else options.get("normalizer", weights.sum().clamp(min=1e-30))
    return each.sum() / over


def compare_parts_with_float64(rank: int, _: str) -> None:
    mine, of_columns = slice(*CUTS[rank : rank + 2]), ("linear_weight", "linear_bias", "up")
    place = {"vocab_start": CUTS[rank], "vocab_size": V}
    for seed, (divergence, (names, options)) in enumerate(zip(itertools.cycle(DIVERGENCES), PARTS, strict=False)):
        whole = tensors(seed, *names)
        constants = {"temperature", *(name for name in whole if name.startswith("teacher"))}
        exact = {name: x.double().requires_grad_(name not in constants) for name, x in whole.items()}
        parts = (*of_columns, "teacher_weight", "teacher_bias")
        given = {name: (x[mine] if name in parts else x).clone() for name, x in whole.items()}
        leaves = [x.requires_grad_() for name, x in given.items() if name not in constants]
        asked: dict[str, Any] = dict(given)
        if "up" in asked:
            asked["linear_weight"] = LowRank(asked["linear_weight"], asked.pop("up"), asked.pop("down"), 1.5)
        found = vocab_parallel_distillation(
            **asked, **options, divergence=divergence, validate_parts=seed == 0, **place
        )
        want = in_float64(exact, divergence, options)
        upstream = torch.linspace(-1, 1.5, N) if found.ndim else torch.tensor(-0.7)
        got = torch.autograd.grad(found, leaves, upstream)
        needed = torch.autograd.grad(want, [x for x in exact.values() if x.requires_grad], upstream.double())
        torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-6)
        named = [name for name in given if name not in constants]
        for name, x, y in zip(named, got, needed, strict=True):
            y = y[mine] if name in of_columns else y
            torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-5, msg=f"{divergence} {options} {name}")
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


@pytest.mark.slow
def test_two_parts_have_the_divergence_and_gradients_of_the_whole() -> None:
    processes.run(compare_parts_with_float64)
