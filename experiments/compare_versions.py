"""Two versions of the package timed in turn, in one process: `python -m experiments.compare_versions OTHER`.

OTHER is the import name of another version of `pallas_ce`, say `pallas_ce_old`: a copy whose own imports say that name.
At each point of the paper's grid, at published heads and with options, every program is timed as this version and the
other have it by default, one right after the other, so that both meet the same clocks; what is written is the ratio of
the two. Points come in a mixed order, and each is written when it is measured; run the command again to go on.
"""

import functools
import importlib
import random
import statistics
from collections.abc import Sequence
from typing import Any

import jax

import pallas_ce
from experiments.bench import timing
from experiments.bench.points import GRID, HEADS, OPTIONS_SHAPE
from experiments.bench.programs import Program, Shape, both, inputs
from experiments.bench.results import ResultFile, add_options, describe, run
from experiments.command_line import parser_of

# Statistics of the forward with all that a kernel can be asked for, and the cross entropy's options.
_STATISTICS = ("log_prob", "entropy", "sum_sq_probs", "mean_logit")
_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "logit_softcap": 30.0}


def programs_of(package: Any, *, options: bool) -> dict[str, Program]:
    """The programs of one version."""

    def loss(**given: Any) -> Program:
        return functools.partial(package.linear_cross_entropy, **given)

    found = {"forward": loss()} | {mode: both(loss(backward=mode)) for mode in ("in_forward", "recompute")}
    if options:
        found |= {f"{mode} with options": both(loss(backward=mode, **_OPTIONS)) for mode in ("in_forward", "recompute")}
        found["in_forward frozen weight"] = jax.value_and_grad(loss(backward="in_forward"))
        found["forward statistics"] = functools.partial(package.linear_row_statistics, statistics=_STATISTICS)
    return found


def measure(shape: Shape, other: Any, rounds: int, *, options: bool = False) -> dict[str, Any]:
    """Of each program at one shape: milliseconds of both versions, and the median of the rounds' ratios."""
    versions = {"this": programs_of(pallas_ce, options=options), "other": programs_of(other, options=options)}
    # One right after the other.
    programs = {f"{name}|{version}": versions[version][name] for name in versions["this"] for version in versions}
    found = timing.compiled_in_turn(programs, dict.fromkeys(programs, inputs(*shape)), rounds, timing.back_to_back)
    results = {}
    for name in versions["this"]:
        this, before = found[f"{name}|this"], found[f"{name}|other"]
        ratios = [a / b for a, b in zip(this["samples"], before["samples"], strict=True)]
        results[name] = {"this_ms": this["ms"], "other_ms": before["ms"], "ratio": statistics.median(ratios)}
    return {"n": shape[0], "v": shape[1], "h": shape[2], "results": results}


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each point as it goes; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("other", help="import name of the other version")
    add_options(parser)
    options = parser.parse_args(words)
    other = importlib.import_module(options.other)
    shapes: dict[str, Shape] = {f"{n}x{v}": (n, v, h) for n, v, h in GRID} | HEADS | {"options": OPTIONS_SHAPE}
    order = sorted(random.Random(1).sample(list(shapes), len(shapes)), key=lambda name: name != "options")
    points = {
        name: functools.partial(measure, shapes[name], other, options.rounds, options=name == "options")
        for name in order
    }
    return run(
        [ResultFile("compare_versions", "python -m experiments.compare_versions", points)],
        describe() | {"rounds": options.rounds},
        lambda _, record: str({name: round(result["ratio"], 4) for name, result in record["results"].items()}),
        options,
    )


if __name__ == "__main__":
    raise SystemExit(main())
