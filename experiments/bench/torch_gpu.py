"""What PyTorch callers pay on a GPU beyond the same call in JAX: `python -m experiments.bench torch_gpu`.

Kinds of points, all but the first for each backward mode:

    given   bandwidth of losses of stored logits, forward and backward, by a copy's
    host    time until a call returns, of several in a row while the device is busy, at a tiny and a usual size
    device  time of forward and backward, in turn in one process
    done    time from an idle device until forward and backward are done, of few rows, beside PyTorch's own loss
    memory  of a process by the driver's count, one process for each caller

All callers compute loss and gradients of the same bfloat16 head, by the same implementation and backward mode.
"""

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

import torch_bridge
from experiments.bench import timing
from experiments.bench.processes import apart
from experiments.bench.programs import Shape, both, ours
from experiments.bench.programs import inputs as inputs_in_jax
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.sections import sized
from experiments.bench.torch_timing import inputs, peak_bytes, synchronize, used_bytes, used_peaks
from torch_bridge.memory import SHARING

_TINY, _SMALL, _USUAL = (256, 256, 64), (4096, 32768, 4096), (8192, 131072, 4096)
_FEW_ROWS = (1024, 151936, 1024)
_STORED = ((8192, 131072, 0), (16384, 32768, 0))
_CALLS_TIMED = 100  # whose host time is taken

# Some 15 ms on a GPU: longer than the host takes to launch a call.
_QUEUED_CYCLES = 25_000_000
_CALLS_FOR_MEMORY = 3
_CALLS_ALONE = 10

# Calls that follow each other, as a training step's microbatches do. Some thirty exchanges ahead of the
# device, four to eight calls, the host waits for it: that is the device's time, and is not to be counted.
_IN_A_ROW = 4

# Each call, and whether it differentiates. The first calls compile and fill pools.
_CALLS = {"forward": False, "forward+backward": True}
_WARM_CALLS = 3


class Setting(NamedTuple):
    """How both call the library, and where."""

    implementation: Any
    mode: Any
    device: str


def made(caller: str, setting: Setting, differentiate: bool) -> Callable[..., Any]:
    """`(hidden, weight, labels) -> loss`, or loss and gradients, of that caller.

    All take tensors, but "native", which is compiled and takes arrays; `backward` is as a training step calls it.
    """
    options = {"implementation": setting.implementation, "backward": setting.mode}
    if caller == "native":
        compiled: Callable[..., Any] = jax.jit(both(ours(**options)) if differentiate else ours(**options))
        return compiled
    losses: dict[str, Callable[..., Any]] = {
        "bridge": functools.partial(torch_bridge.linear_cross_entropy, **options),
        "torch": lambda hidden, weight, labels: torch.nn.functional.cross_entropy(hidden @ weight.T, labels),
    }
    loss = losses[caller]

    def forward_and_backward(hidden: Any, weight: Any, labels: Any) -> Any:
        hidden.grad = weight.grad = None
        value = loss(hidden, weight, labels)
        value.backward()
        return value, (hidden.grad, weight.grad)

    return forward_and_backward if differentiate else torch.no_grad()(loss)


def given(caller: str, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors, or their memory as arrays, ready when work that PyTorch has queued is done."""
    if caller.partition(" ")[0] != "native":
        return tensors
    hidden, weight, labels = tensors
    return tuple(torch_bridge.to_jax(x) for x in (hidden, weight, labels.int()))


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds until `run` returns, and what it returns."""
    start = time.perf_counter()
    result = run()
    return 1e6 * (time.perf_counter() - start), result


def host_time(shape: Shape, setting: Setting, calls: int) -> Record:
    """Microseconds until a call returns, of several in a row, while the device is busy with work queued before them."""
    tensors = inputs(shape, setting.device)
    runs = {
        f"{caller} {name}": made(caller, setting, differentiate)
        for name, differentiate in _CALLS.items()
        for caller in ("bridge", "native")
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + -(-calls // _IN_A_ROW)):
        for name, run in runs.items():
            arguments = given(name, tensors)
            if setting.device == "cuda" and number:
                torch.cuda._sleep(_QUEUED_CYCLES)
            for _ in range(_IN_A_ROW if number else _WARM_CALLS):
                us, result = _timed(functools.partial(run, *arguments))
                samples[name].append(us)
            synchronize(result)
    counted = {name: taken[_WARM_CALLS:] for name, taken in samples.items()}
    found = {name: {"us": statistics.median(taken), "samples": taken} for name, taken in counted.items()}
    return {**dict(zip("nvh", shape, strict=True)), "results": found}


def alone(run: Callable[[], Any]) -> float:
    """Milliseconds from an idle device until all is done."""
    return statistics.median(_timed(lambda: synchronize(run()))[0] for _ in range(_CALLS_ALONE)) / 1e3


def compared(
    shape: Shape, setting: Setting, rounds: timing.Rounds, other: str, clock: Callable[[Any], float]
) -> Record:
    """Milliseconds of forward and backward by the clock, in turn, and the bridge's `ratio` to the other's."""
    tensors = inputs(shape, setting.device)
    runs = {
        caller: functools.partial(made(caller, setting, True), *given(caller, tensors)) for caller in ("bridge", other)
    }
    for run in runs.values():
        synchronize(run())
    # Pools grow in the first round.
    found = timing.in_turn(runs, clock, rounds)
    ratio = found["bridge"]["ms"] / found[other]["ms"]
    return {**dict(zip("nvh", shape, strict=True)), "results": found, "ratio": ratio}


def memory(shape: Shape, setting: Setting) -> Record:
    """Memory of each caller in its own process, by the driver's count and by both allocators' (`in_use_mib`)."""
    # Preallocation is off in both frameworks, as `torch_bridge` sets JAX; else the driver's count shows only the pools.
    # One GPU only: JAX's own function for PyTorch may leave results on another.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = SHARING | {"CUDA_VISIBLE_DEVICES": first}
    found: dict[str, dict[str, float]] = {}
    for caller in ("bridge", "native"):
        before = used_bytes(setting.device) if setting.device == "cuda" else 0
        driver, in_use = apart(peak_of, caller, shape, setting, **environment)
        found[caller] = {"driver_mib": (driver - before) / 2**20, "in_use_mib": in_use / 2**20}
    ratio = found["bridge"]["driver_mib"] / found["native"]["driver_mib"]
    return {**dict(zip("nvh", shape, strict=True)), "results": found, "ratio": ratio}


def peak_of(caller: str, shape: Shape, setting: Setting) -> tuple[int, int]:
    """`used_peaks` of a few calls; in a fresh process."""
    # The native call's process has no tensors.
    arguments = inputs_in_jax(*shape) if caller == "native" else inputs(shape, setting.device)
    run = made(caller, setting, True)

    def calls() -> None:
        for _ in range(_CALLS_FOR_MEMORY):
            synchronize(run(*arguments))

    # JAX without the bridge has CUDA take back unused memory after each.
    return used_peaks(setting.device, calls)


# Passes over the logits that a loss and its gradient take at least, and a copy.
_PASSES, _COPY_PASSES = 3, 2
COPY = "copy"


def stored_losses(shape: tuple[int, int, int], device: str, rounds: timing.Rounds) -> Record:
    """Losses and gradients of bfloat16 logits `[N, V]`: their `share` of a copy's bandwidth, for three passes."""
    n, v, _ = shape
    stored = torch.randn(n, v, device=device).bfloat16().requires_grad_()
    labels = torch.randint(0, v, (n,), device=device)
    target = torch.empty_like(stored)

    def differentiated(loss: Callable[[Any, Any], Any]) -> Any:
        logits = stored.view(n, v)  # no leaf, so that it may be overwritten
        return torch.autograd.grad(loss(logits, labels), logits)[0]

    def copied() -> Any:
        with torch.no_grad():
            return target.copy_(stored)

    losses: dict[str, Callable[[Any, Any], Any]] = {
        "in place": functools.partial(torch_bridge.cross_entropy, inplace_backward=True),
        "kept": torch_bridge.cross_entropy,
        "torch": torch.nn.functional.cross_entropy,
        "selective": lambda logits, labels: torch_bridge.selective_log_softmax(logits, labels).mean(),
        "torch selective": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[:, None]).mean(),
    }
    if device == "cuda":
        losses["torch.compile selective"] = torch.compile(losses["torch selective"], dynamic=False)
    runs: dict[str, Callable[[], Any]] = {COPY: copied}
    runs |= {name: functools.partial(differentiated, loss) for name, loss in losses.items()}
    peaks = {name: peak_bytes(run) / 2**20 for name, run in runs.items() if name != COPY and device == "cuda"}
    found = timing.in_turn(runs, functools.partial(timing.per_launch, wait=synchronize), rounds)
    for name, result in found.items():
        if name in peaks:
            result["peak_mib"] = peaks[name]
        if name != COPY:
            result["share"] = _PASSES * found[COPY]["ms"] / (_COPY_PASSES * result["ms"])
    return {"n": n, "v": v, "results": found}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """All points, cheap ones first."""
    implementation, device, rounds = ("xla" if options.dry_run else "mosaic_gpu"), options.device, options.rounds
    calls = 2 if options.dry_run else _CALLS_TIMED
    launches = functools.partial(timing.per_launch, wait=synchronize)
    kinds: dict[str, tuple[list[Shape], Callable[..., Record]]] = {
        "host": ([_TINY, _SMALL], functools.partial(host_time, calls=calls)),
        "device": ([_SMALL, _USUAL], functools.partial(compared, rounds=rounds, other="native", clock=launches)),
        "done": ([_FEW_ROWS], functools.partial(compared, rounds=rounds, other="torch", clock=alone)),
        "memory": ([_USUAL], memory),
    }
    points = [
        Point(f"given {n}x{v}", functools.partial(stored_losses, sized((n, v, h), options), device, rounds))
        for n, v, h in _STORED
    ]
    for kind, (shapes, measure) in kinds.items():
        for shape, mode in itertools.product(shapes, ("in_forward", "recompute")):
            setting = Setting(implementation, mode, device)
            name = f"{kind} {'x'.join(map(str, shape))} {mode}"
            points.append(Point(name, functools.partial(measure, sized(shape, options), setting)))
    facts = {"torch": torch.__version__, "implementation": implementation, "calls": calls}
    return [ResultFile("torch_gpu", points, "torch_gpu", facts)]
