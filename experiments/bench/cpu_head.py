"""Time and temporary memory of the head on a CPU: `python -m experiments.bench cpu_head`.

Loss and gradients at N 2048, H 512, V 32768 in float32, ours beside stored logits (`canonical`) of the same process.
"""

import argparse

import jax.numpy as jnp

from experiments.bench.programs import both, canonical, inputs, ours
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.sections import sized
from experiments.bench.timing import compiled_in_turn

SHAPE = (2048, 32768, 512)


def measure(options: argparse.Namespace) -> Record:
    """Medians, temporary memory, and the ratio of times to the canonical loss's."""
    n, v, h = sized(SHAPE, options)
    losses = {"canonical": canonical} | {mode: ours("xla", backward=mode) for mode in ("in_forward", "recompute")}
    programs = {name: both(loss) for name, loss in losses.items()}
    data = inputs(n, v, h, jnp.float32)
    found = compiled_in_turn(programs, dict.fromkeys(programs, data), options.rounds)
    for result in found.values():
        result["ratio"] = result["ms"] / found["canonical"]["ms"]
    return {"n": n, "v": v, "h": h, "results": found}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """One point."""
    return [ResultFile("cpu_head", [Point("cpu_head", lambda: measure(options))], "cpu_head")]
