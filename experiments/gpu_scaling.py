"""How the head scales over the GPUs of one host: `python -m experiments.gpu_scaling`.

Layouts, each with both backward modes and beside the canonical loss, which XLA splits over the same mesh by itself:

    one       N rows on the first GPU, the others idle: what scaling is measured by
    apart     N rows on each GPU, which share nothing: how the GPUs differ, and what they heat each other
    tensor    the vocabulary split, the same N: strong scaling, t(one) / (gpus · t)
    sequence  the rows split, too: its time beside tensor's, at 1/gpus of the hidden states' memory
    data      the rows split, N each: weak scaling, t(one) / t, with the gradients' all-reduce

Forward and backward, for both gradients, in bfloat16, at H 4096, V 262144, N 16384 by default. Times are of the wall
clock, of calls one after the other. All layouts and losses of a number of GPUs take turns, in either direction, since
clocks drift by more than what is to be measured. Each number of GPUs has a JSON file under `experiments/results/`, with
the machine and versions; `--resume` goes on where a budget of time ended.
"""

import argparse
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import programs
from experiments.bench.programs import Program, Shape, bare, both, ours
from experiments.bench.results import FOLDER, describe
from experiments.bench.scaling import file_name
from experiments.bench.timing import in_turn, of_series
from experiments.command_line import parser_of, positive, write_record

# Reductions inside the NVLink switch (multicast) stay off: machines of the same GPUs differ in whether they allow them.
_NCCL = {"NCCL_NVLS_ENABLE": "0"}


class Layout(NamedTuple):
    """How the arrays lie on the mesh's one axis.

    Attributes:
        hidden: of hidden states and labels.
        weight: of the weight.
        more_rows: whether each GPU brings N rows of its own.
        apart: whether each GPU computes losses and gradients of its own.
        alone: whether the mesh is the first GPU's.
    """

    hidden: P
    weight: P
    more_rows: bool = False
    apart: bool = False
    alone: bool = False


LAYOUTS = {
    "one": Layout(P(), P(), alone=True),
    "apart": Layout(P("gpu"), P(), more_rows=True, apart=True),
    "tensor": Layout(P(), P("gpu")),
    "sequence": Layout(P("gpu"), P("gpu")),
    "data": Layout(P("gpu"), P(), more_rows=True),
}


def canonical(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of stored bfloat16 logits; the target's is picked by a sum, which needs no gather of the logits."""
    wide = bare(hidden, weight, labels).astype(jnp.float32)
    chosen = jnp.arange(weight.shape[0]) == labels[:, None]
    return jnp.mean(jax.nn.logsumexp(wide, axis=1) - jnp.sum(jnp.where(chosen, wide, 0), axis=1))


def contenders(implementation: Any) -> dict[str, Program]:
    """The losses compared."""
    modes = {mode: ours(implementation, backward=mode) for mode in ("in_forward", "recompute")}
    return modes | {"canonical": canonical}


def inputs(shape: Shape, layout: Layout, mesh: Mesh) -> tuple[jax.Array, ...]:
    """The inputs of every benchmark of the head, made where they lie."""
    n, v, h = shape
    places = tuple(NamedSharding(mesh, spec) for spec in (layout.hidden, layout.weight, layout.hidden))
    rows = n * mesh.size if layout.more_rows else n
    made: tuple[jax.Array, ...] = jax.jit(lambda: programs.inputs(rows, v, h), out_shardings=places)()
    return made


def _program(loss: Program, layout: Layout, mesh: Mesh) -> Callable[..., Any]:
    """Loss and both gradients; the mean of the losses where each GPU has its own."""
    step = both(loss)
    if not layout.apart:
        return step

    def of_one(*arrays: jax.Array) -> Any:
        value, gradients = step(*arrays)
        return value[None], gradients

    specs = (layout.hidden, layout.weight, layout.hidden)
    # Unchecked, as the kernels ask for it: whatever comes in, each GPU's results are its own.
    return jax.shard_map(of_one, mesh=mesh, in_specs=specs, out_specs=P("gpu"), check_vma=False)


def measure(gpus: int, shape: Shape, rounds: int, iterations: int, implementation: Any = None) -> list[dict[str, Any]]:
    """A record of each layout on so many GPUs.

    Of each loss it has the median milliseconds of a call, all samples, and the memory that one GPU needs for it.

    Raises:
        RuntimeError: if the losses of a layout differ by more than the rounding of bfloat16 logits.
    """
    losses_of = contenders(implementation)
    compiled: dict[tuple[str, str], Any] = {}
    data: dict[str, tuple[jax.Array, ...]] = {}
    for name, layout in LAYOUTS.items():
        devices = jax.devices()[: 1 if layout.alone else gpus]
        mesh = jax.make_mesh((len(devices),), ("gpu",), axis_types=(AxisType.Auto,), devices=devices)
        data[name] = inputs(shape, layout, mesh)
        places = None if layout.apart else (NamedSharding(mesh, P()), (data[name][0].sharding, data[name][1].sharding))
        for loss_name, loss in losses_of.items():
            jitted = jax.jit(_program(loss, layout, mesh), out_shardings=places)
            # One after the other: XLA chooses among cuBLAS's products by timing them.
            compiled[name, loss_name] = jitted.lower(*data[name]).compile()
    runs = {key: functools.partial(program, *data[key[0]]) for key, program in compiled.items()}
    losses = {key: float(jnp.mean(run()[0])) for key, run in runs.items()}
    clock = functools.partial(of_series, wait=jax.block_until_ready, launches=iterations)
    timed = in_turn(runs, clock, rounds)
    records = []
    for name in LAYOUTS:
        found = {key: losses[name, key] for key in losses_of}
        if not all(math.isclose(loss, found["canonical"], rel_tol=2**-8) for loss in found.values()):
            raise RuntimeError(f"{name} on {gpus} GPUs: the losses differ: {found}")
        results: dict[str, dict[str, Any]] = {}
        for key in losses_of:
            plan = compiled[name, key].memory_analysis()
            results[key] = {
                **timed[name, key],
                "loss": found[key],
                "inputs_mib": plan.argument_size_in_bytes / 2**20,
                "outputs_mib": plan.output_size_in_bytes / 2**20,
                "temporary_mib": plan.temp_size_in_bytes / 2**20,
            }
        records.append({"layout": name, "gpus": gpus, "results": results})
    return with_ratios(records)


def with_ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to the records of a number of GPUs what follows from one another; see the module's docstring.

    `efficiency` is of what so many times the first GPU would do, `to_tensor` sequence's time by tensor's,
    `to_canonical` ours by the canonical loss's of the same layout.
    """
    by_layout = {record["layout"]: record["results"] for record in records}
    for record in records:
        layout, results = LAYOUTS[record["layout"]], record["results"]
        for name, found in results.items():
            if not layout.alone:
                split = 1 if layout.more_rows else record["gpus"]
                found["efficiency"] = by_layout["one"][name]["ms"] / (split * found["ms"])
            if record["layout"] == "sequence":
                found["to_tensor"] = found["ms"] / by_layout["tensor"][name]["ms"]
            if name != "canonical":
                found["to_canonical"] = found["ms"] / results["canonical"]["ms"]
    return records


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


def _is_there(path: Path, document: dict[str, Any], parser: argparse.ArgumentParser) -> bool:
    """Whether an earlier run has written the file; one that measured something else is refused."""
    if not path.is_file():
        return False
    stored = json.loads(path.read_text())
    for name in sorted(set(document) - {"command", "date"}):
        if stored.get(name) != document[name]:
            parser.error(f"{path} was measured with {name} {stored.get(name)}, now it is {document[name]}")
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes, one number of GPUs after the other."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gpus", type=positive, nargs="+", metavar="COUNT", help="default: 2, 4, 8, as many as there are"
    )
    parser.add_argument("--shape", type=positive, nargs=3, metavar=("N", "V", "H"), default=(16384, 262144, 4096))
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--iterations", type=positive, default=3, help="calls of a round, one after the other")
    parser.add_argument("--implementation", help="default: chosen from the platform")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no number of GPUs after these"
    )
    parser.add_argument("--resume", action="store_true", help="leave out numbers of GPUs whose files are there")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the results")
    options = parser.parse_args(argv)
    start = time.monotonic()
    for name, value in _NCCL.items():
        if os.environ.setdefault(name, value) != value:
            parser.error(f"{name} is {os.environ[name]}; these measurements are made with {name}={value}")
    gpus, shape = _counts(options.gpus, parser), tuple(options.shape)
    for name, size in zip("NV", shape, strict=False):
        for count in gpus:
            if size % count:
                parser.error(f"--shape has {name} {size}, which does not divide evenly over {count} GPUs")
    facts: dict[str, Any] = {
        **describe(),
        "environment": {name: os.environ.get(name, "") for name in (*_NCCL, "XLA_FLAGS")},
        **dict(zip("nvh", shape, strict=True)),
        "implementation": options.implementation,
    }
    waiting = [
        count for count in gpus if not (options.resume and _is_there(options.out / file_name(count), facts, parser))
    ]
    while waiting and time.monotonic() - start < options.budget:
        count = waiting.pop(0)
        records = measure(count, shape, options.rounds, options.iterations, options.implementation)
        command = (
            f"python -m experiments.gpu_scaling --gpus {count} --shape {' '.join(map(str, shape))} "
            f"--rounds {options.rounds} --iterations {options.iterations}"
        )
        write_record(options.out / file_name(count), {"command": command, **facts, "records": records})
        for record in records:
            for contender, numbers in record["results"].items():
                shown = "  ".join(f"{k} {number:.4g}" for k, number in numbers.items() if k not in ("loss", "samples"))
                where = f"{record['layout']} on {record['gpus']}"
                print(f"[{time.monotonic() - start:5.0f}s] {where}: {contender:10}  {shown}", flush=True)
    if waiting:
        print(f"the budget of {options.budget:g} s is spent; --resume measures {waiting} GPUs")


if __name__ == "__main__":
    main()
