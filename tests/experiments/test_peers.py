"""Peers are checked before they are timed: against float32, by bounds that bfloat16 explains."""

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch_timing = pytest.importorskip("experiments.bench.torch_timing")

from experiments.bench import peers  # noqa: E402

SHAPE = (40, 300, 64)


@pytest.fixture
def given() -> tuple[Any, Any, Any]:
    return torch_timing.inputs(SHAPE, "cpu")


def test_the_exact_gradients_are_those_of_float32_logits(
    given: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_timing, "_CHUNK", 16)
    hidden, weight, labels = (x.detach().float().requires_grad_() if x.is_floating_point() else x for x in given)
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    want = torch.autograd.grad(loss, (hidden, weight))
    found, *gradients = torch_timing.exact(*given)
    assert found == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(tuple(gradients), want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("wide", [False, True])
def test_plain_losses_in_bfloat16_are_right(given: tuple[Any, Any, Any], wide: bool) -> None:
    errors, reason = torch_timing.wrong(peers._stored(wide), given, torch_timing.exact(*given))
    assert reason is None
    assert set(errors) == {"loss", "hidden", "weight"}


def test_torch_compile_compiles_for_the_sizes_of_each_of_many_points(monkeypatch: pytest.MonkeyPatch) -> None:
    symbolic = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        symbolic.append(any(isinstance(x, torch.SymInt) for x in inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for rows in range(2, 12):
        peers._compiled()(*torch_timing.inputs((rows, 8, 4), "cpu"))
    assert symbolic == 10 * [False]


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_loss_that_is_not_the_cross_entropy_is_found_out(given: tuple[Any, Any, Any], factor: float) -> None:
    stored = peers._stored(True)
    _, reason = torch_timing.wrong(lambda *x: factor * stored(*x), given, torch_timing.exact(*given))
    assert reason is not None
    assert reason.startswith("wrong by more than bfloat16 explains: loss")


def test_a_point_holds_what_was_measured_and_says_what_was_left_out(
    given: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mock.Mock(side_effect=RuntimeError("no such GPU\nand more"))
    monkeypatch.setattr(torch_timing, "inputs", lambda shape, device: given)
    monkeypatch.setattr(torch_timing, "milliseconds", lambda run: 2.0 if run() is not None else 0.0)
    monkeypatch.setattr(torch_timing, "peak_bytes", lambda run: 2**20)
    monkeypatch.setattr(torch_timing, "_DEVICE", "cpu")
    stored = peers._stored(True)
    chosen = [
        peers.Peer("right", "torch", "torch", lambda: stored),
        peers.Peer("wrong", "torch", "torch", lambda: lambda *x: 2 * stored(*x)),
        peers.Peer("broken", "torch", "torch", broken),
        peers.Peer("missing", "no_such_module", "no-such", broken),
    ]
    record = torch_timing.measure(SHAPE, chosen, 2)
    measured = {"bare", "for_hidden", "for_weight", "forward", "in_forward", "forward right", "right"}
    assert set(record["results"]) == measured
    assert record["results"]["right"]["ratio"] == pytest.approx(1 / 3)
    assert record["results"]["forward right"]["ratio"] == pytest.approx(1.0)
    assert record["left_out"]["wrong"].startswith("wrong by more than bfloat16 explains")
    assert record["left_out"]["broken"] == "RuntimeError: no such GPU"
    assert record["left_out"]["missing"] == "no_such_module is not installed (pip install no-such)"


def test_ours_are_timed_on_the_same_arrays_until_they_are_done(given: tuple[Any, Any, Any]) -> None:
    want, hidden, weight = torch_timing.exact(*given)
    runs = torch_timing.of_ours(given)
    assert float(runs["forward"]()) == pytest.approx(want, rel=torch_timing.LOSS_TOLERANCE)
    _, gradients = runs["in_forward"]()
    for got, exact in zip(gradients, (hidden, weight), strict=True):
        error = torch.tensor(np.asarray(got, np.float32)) - exact
        assert error.norm() <= torch_timing.GRADIENT_TOLERANCE * exact.norm()
    assert all(torch_timing.milliseconds(run) > 0 for run in runs.values())
