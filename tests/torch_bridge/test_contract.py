"""The whole contract through PyTorch, against `torch.nn.functional.cross_entropy` in float64."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import torch

import pallas_ce
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import Problem, make, problems
from tests.torch_bridge import reference
from torch_bridge import linear_cross_entropy, linear_row_statistics

WAYS = [("xla", "recompute"), ("xla", "in_forward"), (None, "auto")]
NAMES = {"hidden": "input", "weight": "linear_weight", "bias": "linear_bias"}


def tensors(p: Problem, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in p.arrays.items()}


def options(p: Problem, dtype: torch.dtype) -> dict[str, Any]:
    return {k: torch.tensor(x, dtype=dtype) if isinstance(x, np.ndarray) else x for k, x in p.options.items()}


def bridged(p: Problem, arrays: dict[str, torch.Tensor], **further: Any) -> torch.Tensor:
    given = {NAMES.get(name, name): x for name, x in arrays.items()}
    if p.vocab_axis == 1:  # a transposed view of contiguous memory
        given["linear_weight"] = given["linear_weight"].t().contiguous().t()
    dtype = arrays["hidden"].dtype
    return linear_cross_entropy(target=torch.tensor(p.labels).long(), **given, **{**options(p, dtype), **further})


def gradients(loss: torch.Tensor, arrays: dict[str, torch.Tensor], upstream: Any = None) -> dict[str, np.ndarray]:
    found = torch.autograd.grad(loss, list(arrays.values()), upstream)
    return {name: g.numpy() for name, g in zip(arrays, found, strict=True)}


def assert_agrees(p: Problem, way: tuple[Any, Any], bound: float = 1e-5) -> None:
    arrays, exact = tensors(p, torch.float32), tensors(p, torch.float64)
    got = bridged(p, arrays, implementation=way[0], backward=way[1])
    want = reference.loss(exact, torch.tensor(p.labels).long(), options(p, torch.float64))
    upstream = None
    if p.options.get("reduction") == "none":
        upstream = torch.linspace(-1, 1, want.numel(), dtype=torch.float64)
    assert_close(got.detach().numpy(), want.detach().numpy(), bound, floor=3e-6)
    got_gradients = gradients(got, arrays, None if upstream is None else upstream.float())
    assert_close(got_gradients, gradients(want, exact, upstream), bound, floor=3e-6)


@pytest.mark.parametrize("way", WAYS)
@hypothesis.given(p=problems())
@hypothesis.settings(max_examples=4)
def test_loss_and_every_gradient_agree_for_any_options(way: Any, p: Problem) -> None:
    assert_agrees(p, way)


@hypothesis.given(p=problems(), recompute=st.booleans())
@hypothesis.settings(max_examples=4)
def test_losses_of_single_tokens_agree_with_any_upstream(p: Problem, recompute: bool) -> None:
    p.options.pop("normalizer", None)
    p.options["reduction"] = "none"
    assert_agrees(p, ("xla", "recompute") if recompute else (None, "auto"))


def test_float64_is_computed_in_float64() -> None:
    p = make(3, 20, 7, 50)
    with jax.enable_x64(True):
        arrays = tensors(p, torch.float64)
        got = bridged(p, arrays, z_loss=0.1)
        p.options["z_loss"] = 0.1
        want = reference.loss(arrays, torch.tensor(p.labels).long(), options(p, torch.float64))
        assert_close(gradients(got, arrays), gradients(want, arrays), 1e-12, floor=1e-14)
    assert got.dtype == torch.float64


@pytest.mark.parametrize("way", WAYS)
def test_leading_axes_and_no_tokens_at_all(way: Any) -> None:
    weight = torch.randn(11, 4, requires_grad=True)
    hidden = torch.randn(0, 3, 4, requires_grad=True)
    loss = linear_cross_entropy(
        hidden, weight, torch.zeros(0, 3, dtype=torch.int64), implementation=way[0], backward=way[1]
    )
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 3, 4)
    assert not weight.grad.any()


@pytest.mark.parametrize("shape", [(256, 256), (300, 256), (256, 300)])
def test_a_vocabulary_or_width_as_large_as_a_padded_batch_is_not_taken_for_rows(shape: tuple[int, int]) -> None:
    vocabulary, width = shape
    assert_agrees(make(1, 5, width, vocabulary, scale=0.3), ("xla", "in_forward"), 2e-5)
    assert_agrees(make(1, 5, width, vocabulary, scale=0.3), ("xla", "recompute"), 2e-5)


def test_metrics_are_those_of_the_library_and_carry_no_gradient() -> None:
    p = make(5, 40, 8, 60)
    arrays = tensors(p, torch.float32)
    loss, metrics = bridged(p, arrays, z_loss=1e-2, return_metrics=True)
    _, want = pallas_ce.linear_cross_entropy(
        p.arrays["hidden"], p.arrays["weight"], p.labels, z_loss=1e-2, return_metrics=True
    )
    assert loss.requires_grad
    for name in want._fields:
        got = getattr(metrics, name)
        assert not got.requires_grad
        np.testing.assert_allclose(got.numpy(), getattr(want, name), rtol=1e-6)


def test_a_loss_written_in_torch_on_the_statistics_trains() -> None:
    p = make(7, 30, 9, 70)
    labels = torch.tensor(p.labels).long().clamp(min=0)
    mask = torch.tensor(p.labels) >= 0

    def focal(log_prob: Any, entropy: Any) -> Any:
        return (-((1 - log_prob.exp()) ** 2) * log_prob - 0.1 * entropy)[mask].sum()

    arrays, exact = tensors(p, torch.float32), tensors(p, torch.float64)
    names = ("argmax", "log_prob", "entropy", "max_logit")
    row = linear_row_statistics(arrays["hidden"], arrays["weight"], labels, statistics=names, row_mask=mask)
    log_p = torch.log_softmax(reference.logits(exact, {}), dim=1)
    want = focal(log_p[torch.arange(30), labels], -(log_p.exp() * log_p).sum(1))
    got = focal(row.log_prob, row.entropy)
    assert torch.equal(row.argmax[mask].long(), log_p.argmax(1)[mask])
    assert not row.argmax[~mask].any()
    assert row.lse is None
    assert_close(gradients(got, arrays), gradients(want, exact), 1e-5, floor=3e-6)


@pytest.mark.parametrize("name", [n for n in pallas_ce.RowStatistics._fields if n != "argmax"])
def test_each_statistic_alone_has_its_gradient(name: str) -> None:
    p = make(11, 12, 5, 33)
    labels = torch.tensor(p.labels).long()
    arrays = tensors(p, torch.float32)
    hidden, weight = arrays.values()
    found = getattr(linear_row_statistics(hidden, weight, labels, statistics=(name,)), name)
    found.backward(torch.linspace(-1, 1, 12))

    def library(hidden: Any, weight: Any) -> Any:
        row = pallas_ce.linear_row_statistics(hidden, weight, p.labels, statistics=(name,))
        return (getattr(row, name) * np.linspace(-1, 1, 12)).sum()

    want = jax.grad(library, argnums=(0, 1))(*p.arrays.values())
    assert_close([hidden.grad.numpy(), weight.grad.numpy()], [np.asarray(x) for x in want], 1e-5)


BAD = {
    "input has shape": {"input": torch.ones(3, 5)},
    "linear_weight has shape": {"linear_weight": torch.ones(7)},
    "linear_weight has dtype": {"linear_weight": torch.ones(7, 4, dtype=torch.int32)},
    "target has shape": {"target": torch.zeros(4, dtype=torch.int64)},
    "target has dtype": {"target": torch.zeros(3)},
    "linear_bias has shape": {"linear_bias": torch.ones(6)},
    "token_weights has shape": {"token_weights": torch.ones(2)},
    "class_weights has shape": {"class_weights": torch.ones(2)},
    "vocab_size=9": {"vocab_size": 9},
    "label_smoothing=1.5": {"label_smoothing": 1.5},
    "reduction='avg'": {"reduction": "avg"},
    "backward='both'": {"backward": "both"},
    "normalizer is given": {"normalizer": 3.0, "reduction": "sum"},
    "logit_scale has shape": {"logit_scale": torch.ones(2)},
    "linear_weight lies on meta": {"linear_weight": torch.ones(7, 4, device="meta")},
    "implementation='fast'": {"implementation": "fast"},
    "logit_softcap=-1": {"logit_softcap": -1.0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    good = {"input": torch.ones(3, 4), "linear_weight": torch.ones(7, 4), "target": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises((ValueError, TypeError), match=message.replace("[", r"\[")):
        linear_cross_entropy(**{**good, **BAD[message]})
