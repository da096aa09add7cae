"""`linear_distillation` on tensors: values and gradients beside the library's own."""

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
from torch_bridge import linear_distillation

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
    for name, x in zip(trained, got, strict=True):
        np.testing.assert_allclose(x, needed[name], rtol=2e-4, atol=2e-5)


def test_leading_axes_and_low_precision() -> None:
    given = {name: x.bfloat16() for name, x in tensors(0).items()}
    folded = {name: x[:6].reshape(2, 3, -1) if name.endswith("input") else x for name, x in given.items()}
    each = linear_distillation(**given, reduction="none")
    assert each.dtype == torch.float32
    torch.testing.assert_close(
        linear_distillation(**folded, reduction="none"), each[:6].reshape(2, 3), rtol=1e-6, atol=1e-6
    )
