"""Measures, or makes pages of what was measured: `python -m experiments.bench NAME`.

NAME is a module of `experiments.bench` that measures; `NAME --help` prints what it measures, and its options. Each
point is written to a JSON file under `experiments/results/` when it is measured; the same command goes on where one
ended. `gpu_report` makes tables and plots of all result files beside them, `site` the documentation's, and `check`
tells whether the head is worse on this GPU than the files say.
"""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from experiments.bench import check, report, results, sections
from experiments.bench.processes import apart
from experiments.bench.timing import Rounds

MEASURING = (
    *("gpu_head", "gpu_losses", "gpu_scaling", "cpu_head", "paper_table", "peers"),
    *("torch_gpu", "huggingface_table", "train_speed", "training_evidence"),
)
PAGES = {"gpu_report": report.write, "site": report.write_site}
OF_FILES = {**PAGES, "check": check.run}


def positive(word: str) -> int:
    """An int above 0, for `argparse`."""
    if not (word.isascii() and word.isdigit() and int(word)):
        raise argparse.ArgumentTypeError(f"{word!r} is no positive int")
    return int(word)


def main(words: Sequence[str] | None = None) -> int:
    """Carries out the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        "experiments.bench", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*MEASURING, *OF_FILES)
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("options", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    try:
        return (_read if given.name in OF_FILES else _measure)(given.name, given.options)
    except results.ResultError as error:
        print(error, file=sys.stderr)
        return 2


def _read(name: str, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(f"experiments.bench {name}", description=OF_FILES[name].__doc__)
    parser.add_argument("--folder", type=Path, default=results.FOLDER, help="where result files are")
    folder = parser.parse_args(words).folder
    if name not in PAGES:
        return check.run(folder)
    print("\n".join(map(str, PAGES[name](folder))))
    return 0


def _measure(name: str, words: Sequence[str]) -> int:
    try:
        module = importlib.import_module(f"experiments.bench.{name}")
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        print(f"{name} needs the package {package}, which is missing: pip install {package}", file=sys.stderr)
        return 2
    options = _options(name, module, words)
    # A process that measures others in processes of their own starts no framework itself: their pools would stay.
    machine = apart(results.describe) if getattr(module, "APART", False) else results.describe()
    options.device = "cpu" if machine["device"] == "cpu" else "cuda"
    if options.device == "cpu" and not options.dry_run and name != "cpu_head":
        print(f"{name} measures a GPU and JAX finds none; --dry-run shows on a CPU that it works", file=sys.stderr)
        return 2
    if options.dry_run:
        print("DRY RUN: sizes are shrunk; these are not the published measurements", file=sys.stderr)
        machine |= {results.DRY: True}
    machine["rounds"] = options.rounds
    if options.half_width < math.inf:
        machine["half_width"] = options.half_width
    options.rounds = Rounds(options.rounds, options.half_width, time.monotonic() + 60 * options.minutes)
    files = module.files(options) if hasattr(module, "files") else sections.files(name, module.SECTIONS, options)
    results.run(files, machine, options)
    return 0


def _options(name: str, module: ModuleType, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"experiments.bench {name}", None, module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=7, help="times each program of a point is timed")
    parser.add_argument("--half-width", type=float, default=math.inf, help="more rounds, until means are known to it")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no point or round that may end later")
    parser.add_argument("--again", action="store_true", help="measure points that the results already hold")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="small sizes by XLA, to see that the command works")
    if sections := getattr(module, "SECTIONS", None):
        parser.add_argument("sections", nargs="*", metavar="SECTION", default=list(sections), help=", ".join(sections))
    if name.startswith("train"):
        parser.add_argument("--data", default="", help="text file or folder, as for train_lm")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    parser.set_defaults(usage_error=parser.error)
    options = parser.parse_args(words)
    if options.dry_run and options.out is None:
        parser.error("--dry-run needs --out: its results are not of the published sizes")
    return options


if __name__ == "__main__":
    sys.exit(main())
