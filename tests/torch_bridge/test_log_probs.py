"""`linear_log_probs` on tensors: against log-softmax in float64, and through autograd, compilation and autocast."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import torch

import pallas_ce
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import Problem, make, statistics_problems
from tests.torch_bridge import reference
from torch_bridge import linear_log_probs, linear_row_statistics

NAMES = {"hidden": "input", "weight": "linear_weight", "bias": "linear_bias"}
LOG_5 = 1.6094379
ALL = {"return_entropy": True, "return_sum_sq_probs": True, "return_hit": True}


def tensors(p: Problem, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in p.arrays.items()}


def options(p: Problem, dtype: torch.dtype) -> dict[str, Any]:
    return {k: torch.tensor(x, dtype=dtype) if isinstance(x, np.ndarray) else x for k, x in p.options.items()}


def bridged(p: Problem, arrays: dict[str, torch.Tensor], **further: Any) -> Any:
    given = {NAMES.get(name, name): x for name, x in arrays.items()}
    if p.vocab_axis == 1:  # a transposed view of contiguous memory
        given["linear_weight"] = given["linear_weight"].t().contiguous().t()
    dtype = arrays["hidden"].dtype
    return linear_log_probs(target=torch.tensor(p.labels).long(), **given, **options(p, dtype), **further)


def stored(p: Problem, arrays: dict[str, torch.Tensor], ignore_index: int | None) -> pallas_ce.LogProbs:
    """The same from stored logits."""
    z, temperature = reference.logits(arrays, p.options), options(p, torch.float64).get("temperature", 1.0)
    z = z / (temperature[:, None] if isinstance(temperature, torch.Tensor) and temperature.ndim else temperature)
    target = torch.tensor(p.labels).long()
    real = (target >= 0) & (target < z.shape[1]) & (target != (-100 if ignore_index is None else ignore_index))
    several = target.ndim > 1
    counts = real.any(1) if several else real
    log_p = torch.log_softmax(z, dim=1)
    safe = torch.where(real, target, 0)
    found = log_p.gather(1, safe if several else safe[:, None]).reshape(target.shape)
    largest = z.argmax(1)[:, None] if several else z.argmax(1)
    return pallas_ce.LogProbs(
        torch.where(real, found, 0),  # type: ignore[arg-type]
        torch.where(counts, -(log_p.exp() * log_p).sum(1), 0),  # type: ignore[arg-type]
        torch.where(counts, (2 * log_p).exp().sum(1), 0),  # type: ignore[arg-type]
        real & (target == largest),  # type: ignore[arg-type]
    )


def total(found: Any) -> Any:
    """Everything returned, with weights of its own; those of what is ignored must not matter."""
    return sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in found[:3])


def results(found: Any, arrays: dict[str, torch.Tensor]) -> Any:
    gradients = torch.autograd.grad(total(found), list(arrays.values()))
    return [x.detach().numpy() for x in found[:3]], [g.numpy() for g in gradients]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@hypothesis.given(p=statistics_problems(), ignore_index=st.sampled_from([-100, 0, None]))
@hypothesis.settings(max_examples=4)
def test_everything_returned_agrees_with_stored_logits_and_so_do_gradients(
    implementation: str, p: Problem, ignore_index: int | None
) -> None:
    arrays, exact = tensors(p, torch.float32), tensors(p, torch.float64)
    got = bridged(p, arrays, ignore_index=ignore_index, implementation=implementation, **ALL)
    want = stored(p, exact, ignore_index)
    assert_close(results(got, arrays), results(want, exact), 1e-5, floor=1e-5)
    assert not got.hit.requires_grad
    assert got.hit.shape == p.labels.shape
    # Where two logits are equal in float32 alone, which one is largest is not decided.
    z = reference.logits(exact, p.options)
    top = torch.topk(z, min(2, z.shape[1]), dim=1).values
    decided = torch.ones(len(top), dtype=torch.bool) if top.shape[1] < 2 else top[:, 0] - top[:, 1] > 1e-5
    assert torch.equal(got.hit[decided], torch.as_tensor(want.hit)[decided])


@pytest.mark.parametrize("ways", [{}, {"return_hit": True}, {"return_sum_sq_probs": True}])
def test_only_what_is_asked_for_is_returned(ways: dict[str, bool]) -> None:
    hidden, weight, target = torch.ones(2, 2, 3), torch.zeros(5, 3), torch.tensor([[0, 1], [-100, 4]])
    found = linear_log_probs(hidden, weight, target, **ways)
    log_probs = found.log_probs if ways else found
    torch.testing.assert_close(log_probs, -LOG_5 * (target >= 0))
    if ways:
        assert {f"return_{name}" for name, x in found._asdict().items() if x is not None} == {
            "return_log_probs",
            *ways,
        }


@pytest.mark.parametrize("leading", [(), (0,), (2, 3), (2, 0)])
@pytest.mark.parametrize("targets", [(), (3,)])
def test_any_leading_shape(leading: tuple[int, ...], targets: tuple[int, ...]) -> None:
    hidden = torch.ones((*leading, 3), requires_grad=True)
    target = torch.zeros((*leading, *targets), dtype=torch.int64)
    found = linear_log_probs(
        hidden, torch.zeros(5, 3), target, temperature=torch.full(leading, 2.0), return_entropy=True
    )
    torch.testing.assert_close(found.log_probs.detach(), torch.full(target.shape, -LOG_5))
    torch.testing.assert_close(found.entropy.detach(), torch.full(leading, LOG_5))
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape


def compilations(run: Any) -> int:
    """How many programs JAX compiles for `run()`."""
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return len(compiled)


def test_neither_token_counts_nor_temperatures_in_tensors_compile_again() -> None:
    weight = torch.randn(29, 4, requires_grad=True)

    def run() -> None:
        for tokens in (3, 50, 200, 7):
            hidden = torch.randn(tokens, 4, requires_grad=True)
            found = linear_log_probs(
                hidden, weight, torch.randint(0, 29, (tokens,)), temperature=torch.tensor(tokens / 10)
            )
            found.sum().backward()
            assert hidden.grad is not None

    assert compilations(run) == 2  # forward and backward


def test_padded_rows_leak_into_nothing() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(5, 6) * 0.1).requires_grad_(), (torch.randn(9, 6) * 0.1).requires_grad_()
    target, temperature = torch.randint(0, 9, (5, 2)), torch.rand(5) + 0.5
    found = linear_log_probs(hidden, weight, target, temperature=temperature, return_entropy=True)
    log_p = torch.log_softmax(hidden @ weight.T / temperature[:, None], 1)
    want = log_p.gather(1, target), -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(tuple(found[:2]), want)
    got_gradients = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), (hidden, weight))
    torch.testing.assert_close(
        got_gradients, torch.autograd.grad(want[0].sum() + want[1].sum(), (hidden, weight)), rtol=1e-4, atol=1e-6
    )


def problem(tokens: int = 12) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    return hidden, weight, torch.randint(0, 40, (tokens,)), torch.rand(tokens) + 0.5


def policy(hidden: Any, weight: Any, target: Any, temperature: Any) -> Any:
    found = linear_log_probs(torch.tanh(hidden), weight, target, temperature=temperature, return_entropy=True)
    return -(found.log_probs * torch.cos(target.float())).mean() - 0.01 * found.entropy.mean()


def gradients(function: Any, hidden: Any, weight: Any, *others: Any) -> Any:
    value = function(hidden, weight, *others)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


@pytest.mark.parametrize("number", [False, True])
def test_a_compiled_policy_loss_is_the_eager_one_at_any_token_count(number: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(policy, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (12, 7, 300):
            given = problem(tokens)
            given = (*given[:3], 0.7) if number else given  # type: ignore[assignment]
            for got, want in zip(gradients(compiled, *given), gradients(policy, *given), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_a_compiled_function_serves_every_temperature_that_is_a_number() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(policy, fullgraph=True, backend="aot_eager")
    for temperature in (0.7, 1.0, 1.3, 1.7):
        given = (*problem()[:3], temperature)
        torch.testing.assert_close(compiled(*given), policy(*given), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("differentiated", [0, 3])
@pytest.mark.parametrize("several", [False, True])
def test_the_operator_passes_torchs_own_checks(differentiated: int, several: bool) -> None:
    hidden, weight, target, temperature = problem()
    tensors = [x.detach().requires_grad_(differentiated > 0) for x in (hidden, weight)]
    target = torch.stack([target] * 3, 1) if several else target
    static = (differentiated, "float32", True, True, True, -100, None, None, None, None, 1.0)
    arguments = (*tensors, target.int(), None, None, temperature, *static)
    torch.library.opcheck(torch.ops.pallas_ce.linear_log_probs.default, arguments)


def test_autocast_computes_products_in_its_dtype_and_master_weights_keep_their_own() -> None:
    hidden, weight, target, temperature = problem()
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_log_probs(hidden, weight, target, temperature=temperature)
    want = linear_log_probs(hidden.bfloat16(), weight.bfloat16(), target, temperature=temperature)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert not torch.equal(got, linear_log_probs(hidden, weight, target, temperature=temperature))
    (gradient,) = torch.autograd.grad(got.sum(), weight)
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())


def test_float64_is_computed_in_float64() -> None:
    p = make(3, 20, 7, 50)
    p.options = {"logit_softcap": 3.0, "temperature": np.linspace(0.5, 2, 20)}
    with jax.enable_x64(True):
        arrays = tensors(p, torch.float64)
        got, want = bridged(p, arrays, **ALL), stored(p, arrays, -100)
        assert got.log_probs.dtype == torch.float64
        assert_close(results(got, arrays), results(want, arrays), 1e-12, floor=1e-13)


def test_a_frozen_weight_gets_no_gradient_and_a_temperature_none_either() -> None:
    hidden, weight, target, temperature = problem()
    temperature.requires_grad_()
    found = linear_log_probs(hidden, weight.detach(), target, temperature=temperature)
    for_hidden, for_temperature = torch.autograd.grad(found.sum(), (hidden, temperature), allow_unused=True)
    want = torch.log_softmax(hidden @ weight.T / temperature.detach()[:, None], 1).gather(1, target[:, None]).sum()
    torch.testing.assert_close(for_hidden, torch.autograd.grad(want, hidden)[0], rtol=1e-4, atol=1e-6)
    assert for_temperature is None


def test_row_statistics_take_several_targets_and_temperatures_too() -> None:
    hidden, weight, target, temperature = problem()
    targets = torch.stack([target, target.roll(1), target], 1)
    names = ("log_prob", "lse", "entropy")
    row = linear_row_statistics(hidden, weight, targets, statistics=names, temperature=temperature)
    z = hidden @ weight.T / temperature[:, None]
    torch.testing.assert_close(row.log_prob, torch.log_softmax(z, 1).gather(1, targets))
    torch.testing.assert_close(row.lse, torch.logsumexp(z, 1))
    by_number = linear_row_statistics(hidden, weight, targets, statistics=names, temperature=0.5)
    torch.testing.assert_close(by_number.lse, torch.logsumexp(2 * (hidden @ weight.T), 1))


BAD = {
    r"target has shape \(3, 1, 2\); it must be \(3,\), or that with K >= 1": {"target": torch.zeros(3, 1, 2).long()},
    "K >= 1 targets": {"target": torch.zeros(3, 0, dtype=torch.int64)},
    "target has dtype": {"target": torch.zeros(3)},
    "temperature=0 must be a finite number above 0": {"temperature": 0.0},
    r"temperature has shape \(2,\).*leading shape \(3,\)": {"temperature": torch.ones(2)},
    "temperature has dtype torch.int64": {"temperature": torch.ones(3, dtype=torch.int64)},
    "temperature is a ndarray; it must be a number or a torch.Tensor": {"temperature": np.ones(3)},
    "ignore_index=0.5 must be a Python int": {"ignore_index": 0.5},
    "K=2": {
        "target": torch.zeros(3, 2).long(), "implementation": "mosaic_gpu",
        "input": torch.ones(3, 4).bfloat16(), "linear_weight": torch.ones(7, 4).bfloat16(),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    good = {"input": torch.ones(3, 4), "linear_weight": torch.ones(7, 4), "target": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises((ValueError, TypeError), match=message):
        linear_log_probs(**{**good, **BAD[message]})  # type: ignore[arg-type]
