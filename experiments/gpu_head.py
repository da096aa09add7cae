"""Time and memory of the head on a GPU beside bare matrix products: `python -m experiments.gpu_head`.

Sections, each a JSON file under `experiments/results/` with the machine and versions:

    compile  seconds to compile one call, at about N 8192, V 131072
    grid     the paper's grid, N × V at H 4096: forward and forward+backward of stored logits and of ours
    heads    heads of published models, N 8192
    options  ignored rows, frozen weight, entropy, half the scratch, at N 16384, V 131072
    masked   none, 0.1, 5 and 30 % of the rows ignored
    windows  the forward with given numbers of vocabulary windows, at N 1024, V 262144

Everything is timed on the device, in one process, in turn, and reported as a ratio: forwards to the bare product
`hidden·weightᵀ`, forward+backward to that and the two gradient products ("three products"). Each point is written when
it is measured; run the command again to go on. `python -m experiments.gpu_report` makes tables and plots.
"""

import sys
from collections.abc import Sequence
from typing import Any

from experiments.bench import command, timing
from experiments.bench.command import Clocked, Section
from experiments.bench.points import Point, Setting, sections, standard

COMPILE = "compile"
_COMPILE_SHAPE = (8192, 131072, 4096)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each section as it goes; returns the exit status."""
    return command.run("gpu_head", __doc__, _sections, words)


def _sections(setting: Setting) -> dict[str, Section]:
    compiled = Point(COMPILE, setting.shape(_COMPILE_SHAPE), lambda: standard(setting))
    timed = {name: Section(points, _timed) for name, points in sections(setting).items()}
    return {COMPILE: Section([compiled], _compiled), **timed}


def _compiled(point: Point, how: Clocked) -> dict[str, Any]:
    del how
    return timing.compile_seconds(point.shape, point.programs())


def _timed(point: Point, how: Clocked) -> dict[str, Any]:
    return timing.measure(point.shape, point.programs(), *how) | point.facts()


if __name__ == "__main__":
    sys.exit(main())
