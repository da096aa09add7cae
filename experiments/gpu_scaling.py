"""How the head scales over the GPUs of one host: `python -m experiments.gpu_scaling`.

Layouts, each with both backward modes and beside the canonical loss, which XLA splits over the same mesh by itself:

    tensor    the vocabulary split, the same N: strong scaling, t(1) / (gpus · t(gpus))
    sequence  the rows split, too: its time beside tensor's, at 1/gpus of the hidden states' memory
    data      the rows split, N each: weak scaling, t(1) / t(gpus), with the gradients' all-reduce

Forward and backward, for both gradients, in bfloat16, at H 4096, V 262144, N 16384 by default. Times are of the wall
clock, of calls one after the other, the contenders in turn. One JSON file under `experiments/results/`, with the
machine and versions, is written after each point; `--resume` goes on where a budget of time ended.
"""

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.gpu.results import FOLDER, write_atomically
from experiments.gpu.scaling import FILE
from experiments.machine import describe
from pallas_ce import linear_cross_entropy

RESULTS = FOLDER / FILE
# Reductions inside the NVLink switch (multicast) stay off: machines of the same GPUs differ in whether they allow them.
_NCCL = {"NCCL_NVLS_ENABLE": "0"}


class Layout(NamedTuple):
    """How the arrays lie on the mesh's one axis, and whether each GPU brings N rows of its own."""

    hidden: P
    weight: P
    more_rows: bool


LAYOUTS = {
    "tensor": Layout(P(), P("gpu"), False),
    "sequence": Layout(P("gpu"), P("gpu"), False),
    "data": Layout(P("gpu"), P(), True),
}
BASELINE = "one"
Point = tuple[str, int]


class Shape(NamedTuple):
    """N tokens (of each GPU, for `data`), V vocabulary entries, H features."""

    n: int
    v: int
    h: int


def canonical(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of stored bfloat16 logits; the target's is picked by a sum, which needs no gather of the logits."""
    logits = jax.lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=hidden.dtype)
    wide = logits.astype(jnp.float32)
    chosen = jnp.arange(weight.shape[0]) == labels[:, None]
    return jnp.mean(jax.nn.logsumexp(wide, axis=1) - jnp.sum(jnp.where(chosen, wide, 0), axis=1))


def contenders(implementation: Any) -> dict[str, Callable[..., jax.Array]]:
    """The losses compared."""
    return {
        "in_forward": lambda h, w, t: linear_cross_entropy(
            h, w, t, backward="in_forward", implementation=implementation
        ),
        "recompute": lambda h, w, t: linear_cross_entropy(h, w, t, backward="recompute", implementation=implementation),
        "canonical": canonical,
    }


def inputs(shape: Shape, layout: Layout, mesh: Mesh) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal hidden states and weight, for logits of standard deviation 1, and random labels, made where they lie."""
    n = shape.n * mesh.size if layout.more_rows else shape.n
    places = tuple(NamedSharding(mesh, spec) for spec in (layout.hidden, layout.weight, layout.hidden))

    def make() -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (n, shape.h), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (shape.v, shape.h), jnp.bfloat16) / jnp.bfloat16(shape.h**0.5)
        return hidden, weight, jax.random.randint(keys[2], (n,), 0, shape.v)

    made: tuple[jax.Array, jax.Array, jax.Array] = jax.jit(make, out_shardings=places)()
    return made


def measure(point: Point, shape: Shape, rounds: int, iterations: int, implementation: Any = None) -> dict[str, Any]:
    """Median milliseconds of a call of each contender, and the memory that one GPU needs for it.

    Raises:
        RuntimeError: if the contenders' losses differ by more than the rounding of bfloat16 logits.
    """
    name, gpus = point
    layout = LAYOUTS["tensor" if name == BASELINE else name]
    mesh = jax.make_mesh((gpus,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:gpus])
    data = inputs(shape, layout, mesh)
    places = (NamedSharding(mesh, P()), (data[0].sharding, data[1].sharding))

    def compiled(loss: Callable[..., jax.Array]) -> Any:
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), out_shardings=places).lower(*data).compile()

    losses_of = contenders(implementation)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = dict(zip(losses_of, pool.map(compiled, losses_of.values()), strict=True))
    seconds: dict[str, list[float]] = {contender: [] for contender in programs}
    losses: dict[str, float] = {}
    for repeat in range(rounds + 1):
        for contender, program in programs.items():
            start = time.perf_counter()
            for _ in range(iterations if repeat else 1):
                result = program(*data)
            jax.block_until_ready(result)
            if repeat:  # The first round warms up.
                seconds[contender].append((time.perf_counter() - start) / iterations)
            losses[contender] = float(result[0])
            del result
    if not all(math.isclose(loss, losses["canonical"], rel_tol=2**-8) for loss in losses.values()):
        raise RuntimeError(f"{name} on {gpus} GPUs: the losses differ: {losses}")
    return {
        contender: {"ms": 1e3 * statistics.median(seconds[contender]), "loss": losses[contender]} | _memory(program)
        for contender, program in programs.items()
    }


def _memory(program: Any) -> dict[str, float]:
    """MiB on one GPU, as the compiler planned them."""
    plan = program.memory_analysis()
    sizes = {"inputs": plan.argument_size_in_bytes, "outputs": plan.output_size_in_bytes}
    sizes["temporary"] = plan.temp_size_in_bytes
    return {f"{name}_mib": size / 2**20 for name, size in sizes.items()}


def with_ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with what follows from others measured so far; see the module's docstring.

    `efficiency` is of the linear one, `to_tensor` sequence's time by tensor's on as many GPUs, `to_canonical` ours by
    the canonical loss's of the same point.
    """
    by_point = {(record["layout"], record["gpus"]): record["results"] for record in records}
    one = by_point.get((BASELINE, 1), {})
    completed = []
    for record in records:
        layout, gpus = record["layout"], record["gpus"]
        tensor = by_point.get(("tensor", gpus), {}) if layout == "sequence" else {}
        results = {}
        for name, found in record["results"].items():
            ms, ratios = found["ms"], {}
            if name in one and layout in ("tensor", "sequence"):
                ratios["efficiency"] = one[name]["ms"] / (gpus * ms)
            elif name in one and layout == "data":
                ratios["efficiency"] = one[name]["ms"] / ms
            if name in tensor:
                ratios["to_tensor"] = ms / tensor[name]["ms"]
            if name != "canonical":
                ratios["to_canonical"] = ms / record["results"]["canonical"]["ms"]
            results[name] = found | ratios
        completed.append(record | {"results": results})
    return completed


def points(gpus: Sequence[int]) -> Iterator[Point]:
    """What is measured, in order: one GPU first, which all others are compared with."""
    yield BASELINE, 1
    for count in gpus:
        for layout in LAYOUTS:
            yield layout, count


def _counts(asked: Sequence[int] | None, parser: argparse.ArgumentParser) -> list[int]:
    there = jax.device_count()
    if asked is None:
        asked = [count for count in (2, 4, 8) if count <= there]
        if not asked:
            parser.error(f"there is {there} device; scaling needs at least 2")
    for count in asked:
        if not 2 <= count <= there:
            parser.error(f"--gpus asks for {count} devices; it must be at least 2, and there are {there}")
    return sorted(set(asked))


def _check_divides(shape: Shape, gpus: Sequence[int], parser: argparse.ArgumentParser) -> None:
    for name, size in (("N", shape.n), ("V", shape.v)):
        for count in gpus:
            if size % count:
                parser.error(f"--shape has {name} {size}, which does not divide evenly over {count} GPUs")


def _earlier(path: Path, document: dict[str, Any], parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The records of an earlier run that this one goes on with."""
    if not path.is_file():
        return []
    stored = json.loads(path.read_text())
    for name in sorted(set(document) - {"command", "date", "records", "left_out"}):
        if stored.get(name) != document[name]:
            parser.error(f"{path} was measured with {name} {stored.get(name)}, now it is {document[name]}")
    return list(stored["records"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes point by point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", metavar="COUNT", help="default: 2, 4, 8, as many as there are")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("N", "V", "H"), default=(16384, 262144, 4096))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=3, help="calls of a round, one after the other")
    parser.add_argument("--implementation", help="default: chosen from the platform")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no point after these")
    parser.add_argument("--resume", action="store_true", help="keep the points that the file holds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    start = time.monotonic()
    for name, value in _NCCL.items():
        if os.environ.setdefault(name, value) != value:
            parser.error(f"{name} is {os.environ[name]}; these measurements are made with {name}={value}")
    gpus, shape = _counts(options.gpus, parser), Shape(*options.shape)
    _check_divides(shape, gpus, parser)
    made_by = {"gpus": gpus, "shape": shape, "rounds": [options.rounds], "iterations": [options.iterations]}
    words = [f"--{name} {' '.join(map(str, values))}" for name, values in made_by.items()]
    document: dict[str, Any] = {
        "command": " ".join(["python -m experiments.gpu_scaling", *words]),
        **describe(),
        "environment": {name: os.environ.get(name, "") for name in (*_NCCL, "XLA_FLAGS")},
        **shape._asdict(),
        "implementation": options.implementation,
    }
    # Through JSON, as the stored ones have been.
    records = _earlier(options.out, json.loads(json.dumps(document)), parser) if options.resume else []
    done = {(record["layout"], record["gpus"]) for record in records}
    waiting = [point for point in points(gpus) if point not in done]
    while waiting and time.monotonic() - start < options.budget:
        layout, count = point = waiting.pop(0)
        found = measure(point, shape, options.rounds, options.iterations, options.implementation)
        records = with_ratios([*records, {"layout": layout, "gpus": count, "results": found}])
        left_out = [f"{name} on {number}" for name, number in waiting]
        text = json.dumps(document | {"records": records, "left_out": left_out}, indent=2)
        write_atomically(options.out, f"{text}\n")
        for contender, numbers in records[-1]["results"].items():
            shown = "  ".join(f"{name} {number:.4g}" for name, number in numbers.items() if name != "loss")
            print(f"[{time.monotonic() - start:5.0f}s] {layout} on {count}: {contender:10}  {shown}", flush=True)
    if waiting:
        print(f"the budget of {options.budget:g} s is spent; --resume measures the other {len(waiting)} points")


if __name__ == "__main__":
    main()
