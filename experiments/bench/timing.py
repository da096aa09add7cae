"""Timing on the device: programs compiled beforehand, launched back to back, in turn with the bare products.

A launch's own cost hides behind the previous launch; the first one's, and the last synchronisation's, are one or
two thousandths of a series. The clocks that a GPU's power allows drift by several per cent within seconds, more than
most differences that matter. Hence many short rounds go through all programs of a point, in either direction in turn
and each time beginning with another: each meets the clocks that the others meet. Only ratios within a point are
compared. A first round, not counted, warms a GPU that has rested.
"""

import collections
import concurrent.futures
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.programs import BARE, FORWARD, THREE, Program, Shape, bare, for_hidden, for_weight, inputs

# Programs whose compilation is timed differ by this number of vocabulary entries. With other steps, or by rows, their
# kernels would be others than the shape's own.
_COMPILED_STEP = 256
_UNTUNED = {"xla_gpu_autotune_level": 0}

# Each program is launched for about this long in a round, and no oftener than this.
_BURST_MILLISECONDS = 100.0
_MOST_LAUNCHES = 250

# Where samples still spread after these, more of them would not tell the mean.
_MOST_ROUNDS = 150

# Arrays as large as the logits that compiling one program may take.
_LOGITS_OF_A_COMPILATION = 6

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Rounds(NamedTuple):
    """How often the programs of a point are timed: `least` times, then until each mean is known to `half_width`.

    `end`, by `time.monotonic`, ends that too.
    """

    least: int
    half_width: float = math.inf
    end: float = math.inf


def half_width(samples: Sequence[float]) -> float:
    """Of the interval of the samples' mean, as a share of it: two standard errors. One sample does not tell it."""
    return (
        math.inf
        if len(samples) < 2
        else 2 * statistics.stdev(samples) / (math.sqrt(len(samples)) * statistics.fmean(samples))
    )


def of_series(run: Callable[[], Any], wait: Callable[[Any], Any], launches: int) -> float:
    """Milliseconds of one of several `run()` in a row, after which `wait(the last result)` waits for the device."""
    start = time.perf_counter()
    for _ in range(launches):
        last = run()
    wait(last)
    return 1e3 * (time.perf_counter() - start) / launches


def per_launch(run: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Milliseconds of one `run()` among as many in a row as a round takes."""
    once = of_series(run, wait, 1)
    if once >= _BURST_MILLISECONDS:
        return once
    # The shorter of two, unless the host was held up in both.
    launches = min(_MOST_LAUNCHES, math.ceil(_BURST_MILLISECONDS / min(once, of_series(run, wait, 1))))
    return of_series(run, wait, launches)


def back_to_back(program: Any, arguments: tuple[Any, ...]) -> float:
    """Milliseconds of one launch among many."""
    jax.block_until_ready(arguments)
    return per_launch(lambda: program(*arguments), jax.block_until_ready)


def temporary_mib(program: Any) -> float:
    """What a compiled program needs beside inputs and outputs, as the compiler planned it."""
    return float(program.memory_analysis().temp_size_in_bytes / 2**20)


def _compiled_at_once(logits_bytes: int) -> int | None:
    """How many programs: XLA chooses their products by timing some, on arrays as large as the logits of its own."""
    bound = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if bound is None else max(1, bound // (_LOGITS_OF_A_COMPILATION * logits_bytes))


def in_turn[Name, Run](
    runs: Mapping[Name, Run], milliseconds: Callable[[Run], float], rounds: Rounds
) -> dict[Name, dict[str, Any]]:
    """Times each program so often by `milliseconds`: of each its median `ms`, all `samples`, their mean's `half_width`.

    Rounds go in either direction in turn. Two rounds on, the next program is the first: one that was always first would
    also be the last of the round before, and be slowed by its own heat, by up to 7 % on an H200. A first round, not
    counted, warms up.
    """
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    order = collections.deque(runs)
    for number in itertools.count():
        for name in order:
            samples[name].append(milliseconds(runs[name]))
        order.reverse()
        order.rotate(number % 2)
        counted = {name: taken[1:] for name, taken in samples.items()}
        over = number >= _MOST_ROUNDS or time.monotonic() >= rounds.end
        if number >= rounds.least and (over or all(half_width(x) <= rounds.half_width for x in counted.values())):
            break
    found: dict[Name, dict[str, Any]] = {}
    for name, taken in counted.items():
        found[name] = {"ms": statistics.median(taken), "samples": taken}
        if len(taken) > 1:
            found[name]["half_width"] = half_width(taken)
    return found


def compiled_in_turn[Name](
    programs: Mapping[Name, Program],
    arguments: Mapping[Name, tuple[Any, ...]],
    rounds: Rounds,
    at_once: int | None = None,
    left_out: dict[Name, str] | None = None,
) -> dict[Name, dict[str, Any]]:
    """`in_turn` of compiled programs, and the `temporary_mib` of each.

    At most `at_once` are compiled together. A program that the device's memory does not suffice for is an error, or is
    named in `left_out` with the reason.
    """

    def compiled(name: Name) -> Any:
        return jax.jit(programs[name]).lower(*arguments[name]).compile()

    def fits(name: Name, step: Callable[[Name], Any]) -> Any:
        """What the step makes of the name; None where memory does not suffice."""
        try:
            return step(name)
        except jax.errors.JaxRuntimeError as error:
            if left_out is None or _OUT_OF_MEMORY not in str(error):
                raise
            left_out[name] = str(error).splitlines()[0]
            return None

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        made = pool.map(lambda name: fits(name, compiled), programs)
        ready: dict[Name, Any] = {name: one for name, one in zip(programs, made, strict=True) if one is not None}

    def launched(name: Name) -> bool:
        jax.block_until_ready(ready[name](*arguments[name]))
        return True

    # A first launch of each sets up what later ones find.
    ready = {name: program for name, program in ready.items() if fits(name, launched)}
    found = in_turn({name: (ready[name], arguments[name]) for name in ready}, lambda run: back_to_back(*run), rounds)
    for name, program in ready.items():
        found[name]["temporary_mib"] = temporary_mib(program)
    return found


def floor(program: str) -> tuple[str, ...]:
    """The bare products that a program is compared with: one where its name begins with "forward", else three."""
    return (BARE,) if program.startswith(FORWARD) else THREE


def ratios(found: Mapping[str, Mapping[str, Any]], program: str) -> list[float]:
    """The program's ratio to its bare products in each round, whose clocks they share."""
    bare = zip(*(found[name]["samples"] for name in floor(program)), strict=True)
    return [taken / sum(products) for taken, products in zip(found[program]["samples"], bare, strict=True)]


def with_ratios(found: dict[str, dict[str, Any]]) -> None:
    """Adds each program's `ratio` to its bare products."""
    for name, result in found.items():
        if name not in THREE:
            result["ratio"] = result["ms"] / sum(found[bare]["ms"] for bare in floor(name))


def measure(shape: Shape, extra: dict[str, Program], rounds: Rounds, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """The bare products and `extra` programs at one shape, of operands of `dtype`.

    Of each program what `compiled_in_turn` finds, and the `ratio` to its bare products; `left_out` says of those
    that memory does not suffice for why they have no results.
    """
    n, v, h = shape
    data = inputs(n, v, h, dtype)
    logits = jax.random.normal(jax.random.key(3), (n, v), dtype)
    programs: dict[str, Program] = {BARE: bare, "for_hidden": for_hidden, "for_weight": for_weight, **extra}
    arguments = {name: (*data[:2], logits) if name in THREE[1:] else data for name in programs}
    left_out: dict[str, str] = {}
    found = compiled_in_turn(programs, arguments, rounds, _compiled_at_once(logits.nbytes), left_out)
    for name in THREE:
        if name in left_out:
            raise RuntimeError(f"{name}, a bare product, cannot be measured at {n} x {v} x {h}: {left_out[name]}")
    with_ratios(found)
    return {"n": n, "v": v, "h": h, "results": found, "left_out": left_out}


def compile_seconds(shape: Shape, programs: dict[str, Program], _: Rounds) -> dict[str, Any]:
    """Seconds to trace, lower and compile each program, one after the other, in a process that has compiled before.

    Each has a vocabulary of its own, so that it finds neither kernels nor autotuning results of those before it.
    Where there is a GPU, XLA chooses its own products by compiling and timing dozens; `untuned_seconds` is without.
    """
    n, v, h = shape
    numbers = itertools.count()

    def seconds(program: Program, options: dict[str, Any] | None = None) -> float:
        given = jax.eval_shape(lambda: inputs(n, v - _COMPILED_STEP * next(numbers), h))
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(program).lower(*given).compile(options)
        return time.perf_counter() - start

    first = seconds(next(iter(programs.values())))  # starts the compilers, which a process does once
    found: dict[str, dict[str, float]] = {}
    for name, program in programs.items():
        found[name] = {"compile_seconds": seconds(program), "untuned_seconds": seconds(program, _UNTUNED)}
    return {"n": n, "v": v, "h": h, "first_seconds": first, "results": found}
