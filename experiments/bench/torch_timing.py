"""Timing of peers in PyTorch, beside our programs and the bare products, after a check against float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from experiments.bench import timing
from experiments.bench.peers import Loss, Peer, failure
from experiments.bench.points import modes
from experiments.bench.programs import BARE, FORWARD, IN_FORWARD, THREE, Shape

# Gradients are compared by the norm of their difference. bfloat16 rounds by 2^-9 of a number at most, and a gradient
# passes through about eight roundings on its way: logits, dlogits, sums. A loss may be read off bfloat16 logits.
GRADIENT_TOLERANCE = 2.0**-6
LOSS_TOLERANCE = 2.0**-7

_DEVICE = "cuda"
_CHUNK = 1024


# The loss, and the gradients of hidden and weight.
Exact = tuple[float, Any, Any]


def inputs(shape: Shape, device: str) -> tuple[Any, Any, Any]:
    """Normal hidden states and weight, for logits of standard deviation 1, and random labels."""
    n, v, h = shape
    torch.manual_seed(0)
    hidden = torch.randn(n, h, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(v, h, device=device, dtype=torch.bfloat16) * h**-0.5).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), device=device)


def synchronize(_: Any = None) -> None:
    """Waits until the GPU, where there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def exact(hidden: Any, weight: Any, labels: Any) -> Exact:
    """Loss and gradients from float32 logits, chunk by chunk of rows."""
    wide_hidden, wide_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    total = 0.0
    for rows, chunk in zip(wide_hidden.split(_CHUNK), labels.split(_CHUNK), strict=True):
        loss = torch.nn.functional.cross_entropy(rows @ wide_weight.T, chunk, reduction="sum") / len(labels)
        loss.backward()
        total += loss.item()
    return total, wide_hidden.grad, wide_weight.grad


def wrong(loss: Loss, given: tuple[Any, Any, Any], want: Exact) -> tuple[dict[str, float], str | None]:
    """The peer's errors, relative to the exact results, and which of them is too large; None where none is."""
    value = loss(*given)
    errors = {"loss": abs(value.item() - want[0]) / abs(want[0])}
    for name, got, exactly in zip(("hidden", "weight"), torch.autograd.grad(value, given[:2]), want[1:], strict=True):
        errors[name] = ((got.float() - exactly).norm() / exactly.norm()).item()
    bounds = {"loss": LOSS_TOLERANCE, "hidden": GRADIENT_TOLERANCE, "weight": GRADIENT_TOLERANCE}
    beyond = [f"{name} {errors[name]:.1e}" for name in errors if not errors[name] <= bounds[name]]
    return errors, f"wrong by more than bfloat16 explains: {', '.join(beyond)}" if beyond else None


def milliseconds(run: Callable[[], Any]) -> float:
    """Those of one launch among many, of PyTorch's or of ours."""

    def wait(last: Any) -> None:
        jax.block_until_ready(last)
        synchronize()

    return timing.per_launch(run, wait)


def of_ours(given: tuple[Any, Any, Any]) -> dict[str, Callable[[], Any]]:
    """Our forward and in_forward, compiled, on the same arrays."""
    hidden, weight, labels = given
    arrays = [jnp.from_dlpack(x.detach()) for x in (hidden, weight, labels.int())]
    programs = {name: jax.jit(modes(None)[name]) for name in (FORWARD, IN_FORWARD)}
    return {name: functools.partial(run.lower(*arrays).compile(), *arrays) for name, run in programs.items()}


def measure(shape: Shape, peers: list[Peer], rounds: int) -> dict[str, Any]:
    """Each peer's forward and forward+backward at one shape, ours and the bare products, in turn.

    Returns:
        `{"n", "v", "h", "results", "left_out"}`: results as `bench.timing.measure` has them, with peak memory
        above the inputs, but for ours; "left_out" says of every peer that has none why.
    """
    n, v, h = shape
    given = inputs(shape, _DEVICE)
    hidden, weight = given[:2]
    left_out: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    runs: dict[str, Any] = {}
    want = exact(*given)
    for peer in peers:
        reason = peer.missing()
        try:
            if reason is None:
                loss = peer.make()
                errors[peer.name], reason = wrong(loss, given, want)
        except Exception as error:  # whatever a library raises, the others are still measured
            reason = failure(error)
        if reason:
            left_out[peer.name] = reason
            continue
        runs[f"forward {peer.name}"] = functools.partial(torch.no_grad()(loss), *given)
        runs[peer.name] = lambda loss=loss: torch.autograd.grad(loss(*given), (hidden, weight))
    del want
    mine = of_ours(given)
    bare, free = hidden.detach(), weight.detach()
    logits = torch.randn(n, v, device=_DEVICE, dtype=torch.bfloat16)
    runs |= mine | {
        BARE: lambda: bare @ free.T,
        "for_hidden": lambda: logits @ free,
        "for_weight": lambda: logits.T @ bare,
    }
    found = timing.in_turn(runs, milliseconds, rounds)
    timing.with_ratios(found)
    for name, run in runs.items():
        if name in mine:  # JAX's memory is not PyTorch's to count
            continue
        found[name]["peak_mib"] = peak_bytes(run) / 2**20
        if name not in THREE:
            found[name]["errors"] = errors[name.removeprefix("forward ")]
    return {"n": n, "v": v, "h": h, "results": found, "left_out": left_out}


def peak_bytes(run: Any) -> int:
    """Peak memory on the GPU of one launch above what is there before it, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
