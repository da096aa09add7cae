"""Tables and plots from the GPU benchmarks' result files: `python -m experiments.gpu_report`.

Reads `gpu_head_*.json`, `gpu_losses_*.json`, `torch_gpu.json`, `train_speed.json`, `huggingface_table.json`,
`peers*.json`, `ladder.json` and `gpu_scaling_*.json` in `experiments/results/`, and writes `gpu_report.md`,
`gpu_scaling.md` and plots beside them. With `--step "what changed"` the grid's figures are first added to the ladder of
versions.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.bench import ladder, report, scaling
from experiments.bench.results import FOLDER, ResultError
from experiments.command_line import parser_of


def main(words: Sequence[str] | None = None) -> int:
    """Writes the report; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where result files are")
    parser.add_argument("--step", default=None, metavar="TEXT", help="add the grid's figures to the ladder")
    options = parser.parse_args(words)
    try:
        if options.step is not None:
            grid = report.load(options.folder).get("grid", {"points": {}, "machine": {}})
            ladder.add(options.folder / ladder.FILE, ladder.step_from(grid, options.step))
        written = report.write(options.folder) + scaling.write(options.folder)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    if not written:
        print(f"{options.folder} holds no results: run `python -m experiments.gpu_head` first", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
