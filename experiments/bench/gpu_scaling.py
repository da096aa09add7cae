"""How the head scales over the GPUs of one host: `python -m experiments.bench gpu_scaling`.

Layouts, each with both backward modes and beside the canonical loss, which XLA splits over the same mesh by itself:

    one       N rows on the first GPU, the others idle: what scaling is measured by
    tensor    the vocabulary split, the same N: strong scaling, t(one) / (gpus · t)
    sequence  the rows split, too: its time beside tensor's, at 1/gpus of the hidden states' memory
    data      the rows split, N each: weak scaling, t(one) / t, with the gradients' all-reduce
    fsdp      as data, with the weight's width split: it is gathered, and its gradient scattered
    apart     as data, without any exchange: what GPUs lose by working at the same time

Forward and backward, for both gradients, in bfloat16. Times are of the wall clock, of calls one after the other. Each
number of GPUs has a result file, and a layout a point, in which it takes turns with `one`, since clocks drift by more
than the differences, and sequence with tensor, too. `efficiency` is a share of the first GPU's rate times the GPUs,
`to_tensor` sequence's time by tensor's, `to_canonical` ours by the canonical loss's of the same layout.
"""

import argparse
import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import programs
from experiments.bench.programs import Program, Shape, bare, both, ours
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.sections import sized
from experiments.bench.timing import Rounds, in_turn, of_series

# Reductions inside the NVLink switch (multicast) stay off: machines of the same GPUs differ in whether they allow them.
os.environ["NCCL_NVLS_ENABLE"] = "0"

SHAPE = (16384, 262144, 4096)
_LAUNCHES = 3  # of a round


class Layout(NamedTuple):
    """How the arrays lie on the mesh's one axis: hidden states and labels, and the weight.

    `more_rows`: each GPU brings N rows of its own; `alone`: the mesh is the first GPU's; `apart`: each has a loss and
    gradients of its own.
    """

    hidden: P
    weight: P
    more_rows: bool = False
    alone: bool = False
    apart: bool = False


LAYOUTS = {
    "one": Layout(P(), P(), alone=True),
    "tensor": Layout(P(), P("gpu")),
    "sequence": Layout(P("gpu"), P("gpu")),
    "data": Layout(P("gpu"), P(), more_rows=True),
    "fsdp": Layout(P("gpu"), P(None, "gpu"), more_rows=True),
    "apart": Layout(P("gpu"), P(), more_rows=True, apart=True),
}


def canonical(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of stored bfloat16 logits; the target's is picked by a sum, which needs no gather of the logits."""
    wide = bare(hidden, weight, labels).astype(jnp.float32)
    chosen = jnp.arange(weight.shape[0]) == labels[:, None]
    return jnp.mean(jax.nn.logsumexp(wide, axis=1) - jnp.sum(jnp.where(chosen, wide, 0), axis=1))


LOSSES: dict[str, Program] = {mode: ours(None, backward=mode) for mode in ("in_forward", "recompute")}
LOSSES["canonical"] = canonical


def measure(gpus: int, layouts: tuple[str, ...], shape: Shape, rounds: Rounds) -> Record:
    """Some layouts on that number of GPUs: of each loss how long it takes, and memory of one GPU."""
    n, v, h = shape
    compiled: dict[tuple[str, str], Any] = {}
    data: dict[str, tuple[jax.Array, ...]] = {}
    for name in layouts:
        layout = LAYOUTS[name]
        devices = jax.devices()[: 1 if layout.alone else gpus]
        mesh = jax.make_mesh((len(devices),), ("gpu",), axis_types=(AxisType.Auto,), devices=devices)
        hidden, weight, whole = (NamedSharding(mesh, spec) for spec in (layout.hidden, layout.weight, P()))
        make = functools.partial(programs.inputs, n * mesh.size if layout.more_rows else n, v, h)
        data[name] = jax.jit(make, out_shardings=(hidden, weight, hidden))()  # where they lie
        for loss_name, loss in LOSSES.items():
            program = _apart(both(loss), mesh) if layout.apart else both(loss)
            jitted = jax.jit(program, out_shardings=(whole, (hidden, hidden if layout.apart else weight)))
            # One after the other: XLA chooses among cuBLAS's products by timing them.
            compiled[name, loss_name] = jitted.lower(*data[name]).compile()
    runs = {key: functools.partial(program, *data[key[0]]) for key, program in compiled.items()}
    clock = functools.partial(of_series, wait=jax.block_until_ready, launches=_LAUNCHES)
    found: dict[tuple[str, str], Record] = {}
    for (name, key), timed in in_turn(runs, clock, rounds).items():
        plan = compiled[name, key].memory_analysis()
        kinds = {"inputs": "argument", "outputs": "output", "temporary": "temp"}
        sizes = {f"{to}_mib": getattr(plan, f"{of}_size_in_bytes") / 2**20 for to, of in kinds.items()}
        found[name, key] = timed | {"loss": float(runs[name, key]()[0])} | sizes
    return {"n": n, "v": v, "h": h, "gpus": gpus, "results": with_ratios(found, gpus)}


def _apart(program: Program, mesh: Mesh) -> Program:
    """The program of each device's rows and the whole weight: the mean of their losses, the gradients as they are."""

    def of_one(*mine: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[1:]), program(*mine))

    def run(*given: jax.Array) -> tuple[jax.Array, Any]:
        specs = P("gpu"), P(), P("gpu")
        losses, gradients = jax.shard_map(of_one, mesh=mesh, in_specs=specs, out_specs=P("gpu"), check_vma=False)(
            *given
        )
        return losses.mean(), gradients

    return run


def with_ratios(found: dict[tuple[str, str], Record], gpus: int) -> dict[str, Record]:
    """The results by layout and loss in a word, with what follows from one another; see the module's docstring."""
    for (name, loss), record in found.items():
        layout, canonical = LAYOUTS[name], found[name, "canonical"]
        if not math.isclose(record["loss"], canonical["loss"], rel_tol=2**-8):
            raise RuntimeError(f"{name} on {gpus} GPUs: {loss} is {record['loss']}, canonical {canonical['loss']}")
        if not layout.alone:
            record["efficiency"] = found["one", loss]["ms"] / ((1 if layout.more_rows else gpus) * record["ms"])
        if name == "sequence":
            record["to_tensor"] = record["ms"] / found["tensor", loss]["ms"]
        if loss != "canonical":
            record["to_canonical"] = record["ms"] / canonical["ms"]
    return {", ".join(key): record for key, record in found.items()}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """A file for 2, 4 and 8 GPUs, as many as there are."""
    there = jax.device_count()
    if there < 2:
        options.usage_error(f"there is {there} device; scaling needs at least 2")
    beside = {name: ("one", name) for name in LAYOUTS if name != "one"} | {"sequence": ("one", "tensor", "sequence")}
    made = []
    for gpus in (x for x in (2, 4, 8) if x <= there):
        given = sized(SHAPE, options), options.rounds
        points = [Point(name, functools.partial(measure, gpus, layouts, *given)) for name, layouts in beside.items()]
        made.append(ResultFile(f"gpu_scaling_{gpus}", points, "gpu_scaling"))
    return made
