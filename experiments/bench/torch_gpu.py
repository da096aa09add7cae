"""What PyTorch callers pay on a GPU beyond the same call in JAX: `python -m experiments.bench torch_gpu`.

Kinds of points, all but the first for each backward mode:

    given   bandwidth of losses of stored logits, forward and backward, by that of a copy
    host    time until a call returns, of several in a row while the device is busy, at a tiny and a usual size
    device  time of forward and backward, in turn in one process
    done    time from an idle device until forward and backward are done, of few rows, beside PyTorch's own loss
    memory  of a process by the driver's count, one process for each caller

All callers compute loss and gradients of the same bfloat16 head, by the same implementation and backward mode. Beside
bridge and native call stand, where they can, the bridge told that every row counts; on the host also a function of
PyTorch's that computes nothing.
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
import jax.numpy as jnp
import torch

import torch_bridge
from experiments.bench import timing
from experiments.bench.processes import apart
from experiments.bench.programs import Shape, both, ours
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.sections import dry
from experiments.bench.torch_timing import (
    allocated_peak_bytes,
    inputs,
    peak_bytes,
    synchronize,
    used_bytes,
    used_peak_bytes,
)
from torch_bridge.memory import SHARING

_TINY, _SMALL, _USUAL = (256, 256, 64), (4096, 32768, 4096), (8192, 131072, 4096)
_FEW_ROWS = (1024, 151936, 1024)
_STORED = ((8192, 131072, 0), (16384, 32768, 0))
_CALLS_TIMED = 100  # whose host time is taken

# Some 15 ms on a GPU: longer than the host takes to launch a call.
_QUEUED_CYCLES = 25_000_000
_CALLS_FOR_MEMORY = 3
_CALLS_ALONE = 10

# Calls that follow each other, as those of a training step's microbatches do. Some thirty exchanges ahead of the
# device, four to eight calls, the host waits for it: that is the device's time, and is not to be counted.
_IN_A_ROW = 4

# What is called, and whether it differentiates. The first calls compile and fill pools.
_CALLS = {"forward": False, "forward+backward": True}
_WARM_CALLS = 3


class Setting(NamedTuple):
    """How both call the library, and where.

    Attributes:
        implementation: of the loss.
        mode: "in_forward" or "recompute".
        device: "cuda", or "cpu" to see that the commands work.
    """

    implementation: Any
    mode: Any
    device: str


def callers(setting: Setting) -> tuple[str, ...]:
    """Those that the setting has."""
    alone = setting == Setting("mosaic_gpu", "in_forward", "cuda")
    return ("bridge", "native", "unmasked") if alone else ("bridge", "native")


def made(caller: str, setting: Setting, differentiate: bool) -> Callable[..., Any]:
    """`(hidden, weight, labels) -> loss`, or loss and gradients, of that caller.

    All take tensors, but "native", which is compiled and takes arrays; `backward` is as a training step calls it.
    """
    implementation, mode, _ = setting
    if caller == "native":
        native = ours(implementation, backward=mode)
        compiled: Callable[..., Any] = jax.jit(both(native) if differentiate else native)
        return compiled
    bridged = functools.partial(torch_bridge.linear_cross_entropy, backward=mode, implementation=implementation)
    losses: dict[str, Callable[..., Any]] = {
        "bridge": bridged,
        "unmasked": functools.partial(bridged, ignore_index=None),
        "torch": lambda hidden, weight, labels: torch.nn.functional.cross_entropy(hidden @ weight.T, labels),
        "nothing": lambda hidden, weight, _: _Nothing.apply(hidden, weight),  # type: ignore[no-untyped-call]
    }
    loss = losses[caller]

    def forward_and_backward(hidden: Any, weight: Any, labels: Any) -> Any:
        hidden.grad = weight.grad = None
        value = loss(hidden, weight, labels)
        value.backward()
        return value, (hidden.grad, weight.grad)

    return forward_and_backward if differentiate else torch.no_grad()(loss)


class _Nothing(torch.autograd.Function):
    """What PyTorch's own engine costs: memory for the results, and two of its threads that tell each other."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        del upstream
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def as_arrays(hidden: Any, weight: Any, labels: Any) -> tuple[Any, ...]:
    """The tensors' memory as arrays, ready when work that PyTorch has queued is done."""
    return tuple(torch_bridge.to_jax(x) for x in (hidden, weight, labels.int()))


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds until `run` returns, and what it returns."""
    start = time.perf_counter()
    result = run()
    return 1e6 * (time.perf_counter() - start), result


def host_time(shape: Shape, setting: Setting, calls: int) -> dict[str, Any]:
    """Microseconds until a call returns, of several in a row, while the device is busy with work queued before them.

    Returns:
        `{"n", "v", "h", "results", "overhead_us", "exchange_us"}`: medians `us` and all `samples` by caller, without
        and with the backward; what the bridge takes beyond the jitted call in JAX; what a tensor takes each way.
    """
    n, v, h = shape
    tensors = inputs(shape, setting.device)
    runs = {
        f"{caller} {name}": made(caller, setting, differentiate)
        for name, differentiate in _CALLS.items()
        for caller in (*callers(setting), "nothing")
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + -(-calls // _IN_A_ROW)):
        for name, run in runs.items():
            given = as_arrays(*tensors) if name.startswith("native") else tensors
            if setting.device == "cuda" and number:
                torch.cuda._sleep(_QUEUED_CYCLES)
            for _ in range(min(calls, _IN_A_ROW) if number else _WARM_CALLS):
                us, result = _timed(functools.partial(run, *given))
                samples[name].append(us)
            synchronize(result)
    found: dict[str, dict[str, Any]] = {
        name: {"us": statistics.median(taken[_WARM_CALLS:]), "samples": taken[_WARM_CALLS:]}
        for name, taken in samples.items()
    }
    overhead = {name: found[f"bridge {name}"]["us"] - found[f"native {name}"]["us"] for name in _CALLS}
    array = torch_bridge.to_jax(tensors[0])
    exchanges = {"to_jax": lambda: torch_bridge.to_jax(tensors[0]), "to_torch": lambda: torch_bridge.to_torch(array)}
    exchange = {name: statistics.median(_timed(run)[0] for _ in range(calls)) for name, run in exchanges.items()}
    return {"n": n, "v": v, "h": h, "results": found, "overhead_us": overhead, "exchange_us": exchange}


def device_time(shape: Shape, setting: Setting, rounds: int) -> dict[str, Any]:
    """Milliseconds of forward and backward, launched back to back, the callers in turn.

    Returns:
        `{"n", "v", "h", "results", "ratio"}`: medians `ms` and `samples` of each; the bridge's median over the native.
    """
    n, v, h = shape
    tensors = inputs(shape, setting.device)
    arrays = as_arrays(*tensors)
    runs: dict[str, Callable[[], Any]] = {
        caller: functools.partial(made(caller, setting, True), *(arrays if caller == "native" else tensors))
        for caller in callers(setting)
    }
    for run in runs.values():
        synchronize(run())
    # Pools grow in the first round.
    found = timing.in_turn(runs, functools.partial(timing.per_launch, wait=synchronize), rounds)
    return {"n": n, "v": v, "h": h, "results": found, "ratio": found["bridge"]["ms"] / found["native"]["ms"]}


def until_done(shape: Shape, setting: Setting, rounds: int) -> dict[str, Any]:
    """Milliseconds of forward and backward, from an idle device until all is done, beside PyTorch's own loss.

    Returns:
        `{"n", "v", "h", "results", "ratio"}`: medians `ms` and `samples` of each; the bridge's median over PyTorch's.
    """
    n, v, h = shape
    tensors = inputs(shape, setting.device)
    runs: dict[str, Callable[[], Any]] = {
        caller: functools.partial(made(caller, setting, True), *tensors) for caller in ("bridge", "torch")
    }
    for run in runs.values():
        synchronize(run())

    def milliseconds(run: Callable[[], Any]) -> float:
        return statistics.median(_timed(lambda: synchronize(run()))[0] for _ in range(_CALLS_ALONE)) / 1e3

    found = timing.in_turn(runs, milliseconds, rounds)
    return {"n": n, "v": v, "h": h, "results": found, "ratio": found["bridge"]["ms"] / found["torch"]["ms"]}


def memory(shape: Shape, setting: Setting) -> dict[str, Any]:
    """Memory of each caller in a process of its own, which the driver counts whole: context, code and both pools.

    Returns:
        `{"n", "v", "h", "results", "ratio"}`: of each `driver_mib`, and `in_use_mib`, the sum of both allocators' own
        peaks; the bridge's over the native call's in the driver's count.
    """
    n, v, h = shape
    # Neither may take its memory beforehand, or nothing could be told from the driver's count: JAX's settings are those
    # that `torch_bridge` makes. One GPU only: JAX's own function for PyTorch may leave results on another.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = SHARING | {"CUDA_VISIBLE_DEVICES": first}
    found: dict[str, dict[str, float]] = {}
    for caller in callers(setting):
        before = used_bytes(setting.device) if setting.device == "cuda" else 0
        driver, in_use = apart(peak_of, caller, shape, setting, **environment)
        found[caller] = {"driver_mib": (driver - before) / 2**20, "in_use_mib": in_use / 2**20}
    ratio = found["bridge"]["driver_mib"] / found["native"]["driver_mib"]
    return {"n": n, "v": v, "h": h, "results": found, "ratio": ratio}


def peak_of(caller: str, shape: Shape, setting: Setting) -> tuple[int, int]:
    """`used_peak_bytes` and `allocated_peak_bytes` of a few calls; in a fresh process."""
    n, v, h = shape
    if caller != "native":
        matrices = [
            torch.zeros(size, h, device=setting.device, dtype=torch.bfloat16, requires_grad=True) for size in (n, v)
        ]
        given: list[Any] = [*matrices, torch.zeros(n, device=setting.device, dtype=torch.int64)]
    else:
        given = [jnp.zeros((n, h), jnp.bfloat16), jnp.zeros((v, h), jnp.bfloat16), jnp.zeros(n, jnp.int32)]
    run = made(caller, setting, True)

    def calls() -> None:
        for _ in range(_CALLS_FOR_MEMORY):
            synchronize(run(*given))

    # JAX without the bridge has CUDA take back what is not in use after each.
    return used_peak_bytes(setting.device, calls), allocated_peak_bytes(setting.device)


# Passes over the logits that a loss and its gradient take at least, and a copy.
_PASSES, _COPY_PASSES = 3, 2
COPY = "copy"


def losses_of_stored() -> dict[str, Callable[[Any, Any], Any]]:
    """`(logits, labels) -> loss`, by name."""
    ours = torch_bridge.cross_entropy
    return {
        "in place": functools.partial(ours, inplace_backward=True),
        "kept": ours,
        "torch": torch.nn.functional.cross_entropy,
        "selective": lambda logits, labels: torch_bridge.selective_log_softmax(logits, labels).mean(),
        "torch selective": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[:, None]).mean(),
    }


def stored_losses(shape: tuple[int, int, int], device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds and bandwidth of bfloat16 logits `[N, V]`, launched back to back, the contenders in turn.

    Returns:
        `{"n", "v", "results"}`: medians `ms` and `samples` of each; of losses the `share` of the copy's bandwidth that
        they reach for three passes, and the MiB allocated at the `peak_mib` by PyTorch beside logits.
    """
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

    runs: dict[str, Callable[[], Any]] = {COPY: copied}
    runs |= {name: functools.partial(differentiated, loss) for name, loss in losses_of_stored().items()}
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

    def sizes(shape: Shape) -> Shape:
        return dry(shape) if options.dry_run else shape

    points = [
        Point(f"given {n}x{v}", functools.partial(stored_losses, sizes((n, v, h)), device, rounds))
        for n, v, h in _STORED
    ]
    kinds: list[tuple[str, tuple[Shape, ...], Callable[..., Record]]] = [
        ("host", (_TINY, _SMALL), functools.partial(host_time, calls=calls)),
        ("device", (_SMALL, _USUAL), functools.partial(device_time, rounds=rounds)),
        ("done", (_FEW_ROWS,), functools.partial(until_done, rounds=rounds)),
        ("memory", (_USUAL,), memory),
    ]
    for kind, shapes, measure in kinds:
        for shape, mode in itertools.product(shapes, ("in_forward", "recompute")):
            setting = Setting(implementation, mode, device)
            name = f"{kind} {'x'.join(map(str, shape))} {mode}"
            points.append(Point(name, functools.partial(measure, sizes(shape), setting=setting)))
    facts = {"torch": torch.__version__, "implementation": implementation, "calls": calls}
    return [ResultFile("torch_gpu", points, "torch_gpu", facts)]
