"""Time and memory of the head on a GPU beside bare matrix products: `python -m experiments.gpu_head`.

Sections, each a JSON file under `experiments/results/` with the machine and versions:

    compile  seconds to compile one call, at about N 8192, V 131072
    grid     the paper's grid, N × V at H 4096: forward and forward+backward of stored logits and of ours
    heads    heads of published models, N 8192
    options  ignored rows, frozen weight, entropy, half the scratch, at N 16384, V 131072
    windows  the forward with given numbers of vocabulary windows, at N 1024, V 262144

Everything is timed on the device, in one process, in turn, and reported as a ratio: forwards to the bare product
`hidden·weightᵀ`, forward+backward to that and the two gradient products ("three products"). Each point is written when
it is measured; run the command again to go on. `python -m experiments.gpu_report` makes tables and plots.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.gpu import timing
from experiments.gpu.points import Point, Setting, sections, standard
from experiments.gpu.results import FOLDER, Budget, ResultError, Results, run_points
from experiments.machine import describe

COMPILE = "compile"
_COMPILE_SHAPE = (8192, 131072, 4096)
_DRY_DIVISOR = 64


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each section as it goes; returns the exit status."""
    names = [COMPILE, *sections(Setting())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=5, help="times each program of a point is timed")
    parser.add_argument("--clock", choices=timing.CLOCKS, default="launches", help="back-to-back launches or profiler")
    parser.add_argument("--minutes", type=float, default=None, help="begin no point that may end later")
    parser.add_argument("--again", action="store_true", help="measure points that the files already hold")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="small sizes by XLA, to see that the commands work")
    options = parser.parse_args(words)
    if unknown := [name for name in options.sections if name not in names]:
        parser.error(f"there is no section {unknown[0]!r}; choose from {', '.join(names)}")
    if options.dry_run and options.out is None:
        parser.error("--dry-run needs --out: its results are not those of the paper's sizes")
    setting = Setting("xla", _DRY_DIVISOR) if options.dry_run else Setting()
    clock = timing.CLOCKS[options.clock]
    start = time.monotonic()
    budget = Budget(None if options.minutes is None else 60 * options.minutes, time.monotonic)
    compiled_shape = Point(COMPILE, setting.shape(_COMPILE_SHAPE), lambda: standard(setting))

    def measure(point: Point) -> dict[str, Any]:
        if point is compiled_shape:
            return timing.compile_seconds(point.shape, point.programs())
        return timing.measure(point.shape, point.programs(), options.rounds, clock)

    def told(name: str, record: dict[str, Any]) -> None:
        shown = {k: round(r.get("ratio", r.get("compile_seconds", 0)), 3) for k, r in record["results"].items()}
        shown = {k: number for k, number in shown.items() if number}
        print(
            f"[{time.monotonic() - start:5.0f}s] {section} {name} N {record['n']} V {record['v']}: {shown}", flush=True
        )

    left = 0
    for section in options.sections:
        points = [compiled_shape] if section == COMPILE else sections(setting)[section]
        if not points:
            print(f"{section}: left out, implementation {setting.implementation!r} has no such thing")
            continue
        path = (options.out or FOLDER) / f"gpu_head_{section}.json"
        machine = describe() | {"clock": options.clock, "rounds": options.rounds}
        try:
            results = Results(path, f"python -m experiments.gpu_head {section}", machine, options.again)
        except ResultError as error:
            print(error, file=sys.stderr)
            return 2
        left += run_points(points, lambda point: point.name, measure, results, budget, told)
    if left:
        print(f"time is up with {left} points left; run the same command again to go on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
