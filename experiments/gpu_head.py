"""Time and memory of the head on a GPU beside bare matrix products: `python -m experiments.gpu_head`.

Sections, each a JSON file under `experiments/results/` with the machine and versions:

    compile  seconds to compile one call, at about N 8192, V 131072
    grid     the paper's grid, N × V at H 4096: forward and forward+backward of stored logits and of ours
    heads    heads of published models, N 8192
    options  ignored rows, frozen weight, entropy, half the scratch, at N 16384, V 131072
    masked   none, 0.1, 5 and 30 % of the rows ignored
    implementations  every pass by every implementation
    triton   the grid by Triton
    pointers the same with the tiles of Ampere, which load by pointers
    ampere   the same with those and Ampere's instructions, which newer GPUs run, too
    targets  K labels a row, and row temperatures, by default
    float32  TF32 and full float32, beside products of that precision
    low_rank a frozen weight with a low-rank term that is trained
    microbatches  four parts of a batch, their gradients added in place

Everything is timed on the device, in one process, in turn, and reported as a ratio: forwards to the bare product
`hidden·weightᵀ`, forward+backward to that and the two gradient products ("three products"). Each point is written when
it is measured; run the command again to go on. `python -m experiments.gpu_report` makes tables and plots.
"""

import sys
from collections.abc import Sequence

from experiments.bench.command import run_sections
from experiments.bench.points import SECTIONS


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each section as it goes; returns the exit status."""
    return run_sections("gpu_head", __doc__, SECTIONS, words)


if __name__ == "__main__":
    sys.exit(main())
