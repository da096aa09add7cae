"""The paper's experiment, its Table 2, on this GPU: `python -m experiments.paper_table`.

Time and memory of the loss at all 20 points, N x V at H 4096 in bfloat16, forward as in the paper, and forward and
backward, which the paper leaves out:

    canonical float32   stored float32 logits, as the paper's canonical column has them
    canonical bfloat16  stored bfloat16 logits, the fastest of the plain ways
    proposed            `linear_cross_entropy` with its defaults, in a dry run, too

Everything is timed on the device, in one process, in turn. Each point is written to `paper_table.json` under
`experiments/results/` when it is measured; run the command again to go on. A program that the GPU's memory does not
suffice for is left out, with the reason. `paper_table.md` and `paper_table.png`, made from that file after each run, or
with `--report` alone, have the paper's ratios beside these.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import paper, timing
from experiments.bench.command import Point, measure_and_report, point_options, run_points
from experiments.bench.programs import Program, Shape, both, canonical, canonical_float32, ours
from pallas_ce import explain
from pallas_ce.backends.protocol import Implementation


def programs(_: Implementation, __: Shape) -> dict[str, Program]:
    """The losses, and the losses with both gradients; ours by default, whatever serves a point."""
    losses = {paper.FLOAT32: canonical_float32, paper.BFLOAT16: canonical, paper.PROPOSED: ours(None)}
    return {
        kind + name: make(loss)
        for kind, make in ((paper.FORWARD, lambda loss: loss), (paper.BOTH, both))
        for name, loss in losses.items()
    }


def measure(shape: Shape, *given: Any) -> dict[str, Any]:
    """Also by which implementation, and in which backward mode, ours was computed."""
    n, v, h = shape
    arrays = jax.ShapeDtypeStruct((n, h), jnp.bfloat16), jax.ShapeDtypeStruct((v, h), jnp.bfloat16)
    forward, whole = explain(*arrays, differentiate=()), explain(*arrays)
    how = f"forward by {forward.implementation}, forward and backward by {whole.implementation}, {whole.backward}"
    return timing.measure(shape, *given) | {"proposed": how}


POINTS = {paper.name_of(n, v): Point((n, v, paper.H), programs, measure) for n, v in paper.TABLE}


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each point as it goes, then the report; returns the exit status."""
    files = {paper.NAME: (f"python -m experiments.{paper.NAME}", POINTS)}
    measure_points = functools.partial(run_points, files)
    return measure_and_report(point_options(__doc__), words, measure_points, paper.write)


if __name__ == "__main__":
    sys.exit(main())
