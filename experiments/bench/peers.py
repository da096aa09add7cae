"""Other libraries' losses on a GPU, in PyTorch, beside bare matrix products: `python -m experiments.bench peers`.

Each peer that is installed is checked against float32 first, then timed over the paper's grid and at published heads,
in turn with our programs on the same arrays; one that is missing, fails or is wrong is left out with the reason. Those
named by `--peers`, as need be where they cannot be installed beside each other, have a result file of their own.
"""

import argparse
import functools
import importlib
import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from experiments.bench import timing
from experiments.bench.gpu_head import GRID, HEADS, modes
from experiments.bench.programs import BARE, FORWARD, IN_FORWARD, THREE, Shape
from experiments.bench.results import Point, Record, ResultFile, versions
from experiments.bench.sections import CLOCK, sized
from experiments.bench.torch_timing import inputs, peak_bytes, synchronize

# Gradients are compared by the norm of their difference. bfloat16 rounds by 2^-9 of a number at most, and a gradient
# passes through about eight roundings on its way: logits, dlogits, sums. A loss may be read off bfloat16 logits.
GRADIENT_TOLERANCE = 2.0**-6
LOSS_TOLERANCE = 2.0**-7

_CHUNK = 1024

Loss = Callable[[Any, Any, Any], Any]


class Peer(NamedTuple):
    """A contender: its name, the module and distribution that it needs, and what imports it and makes the loss."""

    name: str
    module: str
    package: str
    make: Callable[[], Loss]

    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed (pip install --upgrade {self.package})"
        return None


def failure(error: Exception) -> str:
    """Why a peer has no results, in a line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _stored(wide: bool) -> Loss:
    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = hidden @ weight.T
        return torch.nn.functional.cross_entropy(logits.float() if wide else logits, labels)

    return loss


def _compiled() -> Loss:
    torch.compiler.reset()  # after 8 shapes it would compile no more, and after the first its sizes would be dynamic
    return torch.compile(_stored(wide=True))


def _imported(path: str, **options: Any) -> Callable[[], Any]:
    """What imports a loss of that path, with options."""
    module, _, name = path.rpartition(".")
    return lambda: functools.partial(getattr(importlib.import_module(module), name), **options)


def _torch_chunked() -> Loss:
    default = _imported("torch.nn.LinearCrossEntropyOptions")()
    return _imported("torch.nn.functional.linear_cross_entropy", options=default())()


def _liger_cute_streamed() -> Loss:
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90

    # Its check of the labels would wait for the GPU, which no other contender does.
    os.environ[fused_scaled_cross_entropy_sm90.VALIDATE_TARGETS_ENV] = "0"
    losses = fused_scaled_cross_entropy_sm90.LigerFusedScaledCrossEntropySM90Function
    return lambda hidden, weight, labels: losses.apply(hidden, weight, labels).mean()


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        # Version 0.6.5 refuses a chunk that equals the width, and 4096 is its default.
        chunk = 2048 if hidden.shape[-1] != 2048 else 4096
        return chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=chunk)

    return loss


_OF_CCE, _CCE = ("cut_cross_entropy", "cut-cross-entropy"), "cut_cross_entropy.linear_cross_entropy"
_OF_LIGER, _OF_CUTE = ("liger_kernel", "liger-kernel"), ("cutlass", "nvidia-cutlass-dsl")
_LIGER = "liger_kernel.transformers.functional.liger_fused_linear_cross_entropy"
_LIGER_CUTE = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90.liger_fused_linear_cross_entropy_sm90"
PEERS = (
    Peer("torch, bfloat16 logits", "torch", "torch", lambda: _stored(wide=False)),
    Peer("torch, float32 logits", "torch", "torch", lambda: _stored(wide=True)),
    Peer("torch.compile", "torch", "torch", _compiled),
    Peer("torch, chunked", "torch.nn.modules.linear_cross_entropy", "torch", _torch_chunked),
    Peer("CCE", *_OF_CCE, _imported(_CCE, impl="cce", filter_eps="auto")),
    Peer("CCE, exact gradients", *_OF_CCE, _imported(_CCE, impl="cce", filter_eps=None)),
    # What chunks of logits may take, in units of the memory of the hidden states.
    Peer("Liger", *_OF_LIGER, _imported(_LIGER, chunk_mem_const=1)),
    Peer("Liger, C 16", *_OF_LIGER, _imported(_LIGER, chunk_mem_const=16)),
    Peer("Liger CuTe, stored logits", *_OF_CUTE, _imported(_LIGER_CUTE)),
    Peer("Liger CuTe, streamed", *_OF_CUTE, _liger_cute_streamed),
    Peer("quack", "quack", "quack-kernels", _quack),
)

# The loss, and the gradients of hidden and weight.
Exact = tuple[float, Any, Any]


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


def of_ours(given: tuple[Any, Any, Any]) -> dict[str, Callable[[], Any]]:
    """Our forward and in_forward, compiled, on the same arrays."""
    hidden, weight, labels = given
    arrays = [jnp.from_dlpack(x.detach()) for x in (hidden, weight, labels.int())]
    programs = {name: jax.jit(modes(None)[name]) for name in (FORWARD, IN_FORWARD)}
    return {name: functools.partial(run.lower(*arrays).compile(), *arrays) for name, run in programs.items()}


def measure(shape: Shape, peers: list[Peer], rounds: timing.Rounds, device: str) -> Record:
    """Each peer's forward and forward+backward at one shape, ours and the bare products, in turn.

    `peak_mib` is above the inputs; `left_out` says of every peer that has no results why.
    """
    n, v, h = shape
    given = inputs(shape, device)
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
    logits = torch.randn(n, v, device=device, dtype=torch.bfloat16)
    runs |= mine | {
        BARE: lambda: bare @ free.T,
        "for_hidden": lambda: logits @ free,
        "for_weight": lambda: logits.T @ bare,
    }
    found = timing.in_turn(runs, functools.partial(timing.per_launch, wait=synchronize), rounds)
    timing.with_ratios(found)
    for name, run in runs.items():
        if name in mine:  # JAX's memory is not PyTorch's to count
            continue
        if device == "cuda":
            found[name]["peak_mib"] = peak_bytes(run) / 2**20
        if name not in THREE:
            found[name]["errors"] = errors[name.removeprefix("forward ")]
    return {"n": n, "v": v, "h": h, "results": found, "left_out": left_out}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which peers."""
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in PEERS], default=None)


def files(options: argparse.Namespace) -> list[ResultFile]:
    """Grid and heads; peers that are named have a file of their own."""
    words = ["peers"] if options.peers is None else ["peers", "--peers", *options.peers]
    chosen = [peer for peer in PEERS if options.peers is None or peer.name in options.peers]
    shapes: dict[str, Shape] = {f"{n}x{v}": (n, v, h) for n, v, h in GRID} | HEADS
    points = [
        Point(name, functools.partial(measure, sized(shape, options), chosen, options.rounds, options.device))
        for name, shape in shapes.items()
    ]
    packages = versions(sorted({peer.package for peer in PEERS} | {"triton"}))
    name = re.sub(r"\W+", "_", "_".join([words[0], *words[2:]]))
    return [ResultFile(name, points, shlex.join(words), {**CLOCK, **packages})]
