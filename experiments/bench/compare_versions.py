"""Two versions of the package timed in turn, in one process: `python -m experiments.bench compare_versions OTHER`.

OTHER is the import name of another version of `pallas_ce`, say `pallas_ce_old`: a copy whose own imports say that name.
At each point of the paper's grid, at published heads and with options, every program is timed as this version and the
other have it by default, one right after the other, so that both meet the same clocks; the file has the ratio of
the two.
"""

import argparse
import functools
import importlib
import statistics
from typing import Any

import jax

import pallas_ce
from experiments.bench import timing
from experiments.bench.gpu_head import GRID, HEADS
from experiments.bench.programs import Program, Shape, both, inputs
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.sections import dry

# Statistics of the forward with all that a kernel can be asked for, and the cross entropy's options.
_STATISTICS = ("log_prob", "entropy", "sum_sq_probs", "mean_logit")
_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "logit_softcap": 30.0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The other version."""
    parser.add_argument("other", help="import name of the other version")


def files(options: argparse.Namespace) -> list[ResultFile]:
    """All points."""
    other = importlib.import_module(options.other)
    shapes: dict[str, Shape] = {f"{n}x{v}": (n, v, h) for n, v, h in GRID} | HEADS
    sizes = {name: dry(shape) if options.dry_run else shape for name, shape in shapes.items()}
    points = [Point(name, functools.partial(measure, shape, other, options.rounds)) for name, shape in sizes.items()]
    return [ResultFile("compare_versions", points, f"compare_versions {options.other}")]


def programs_of(package: Any) -> dict[str, Program]:
    """The programs of one version."""
    loss = package.linear_cross_entropy
    found = {
        "forward": loss,
        "forward statistics": functools.partial(package.linear_row_statistics, statistics=_STATISTICS),
    }
    for mode in ("in_forward", "recompute"):
        found[mode] = both(functools.partial(loss, backward=mode))
        found[f"{mode} with options"] = both(functools.partial(loss, backward=mode, **_OPTIONS))
    found["in_forward frozen weight"] = jax.value_and_grad(functools.partial(loss, backward="in_forward"))
    return found


def measure(shape: Shape, other: Any, rounds: int) -> Record:
    """Of each program at one shape: milliseconds of both versions, and the median of the rounds' ratios."""
    this, before = programs_of(pallas_ce), programs_of(other)
    # One right after the other.
    programs = {(name, version): made[name] for name in this for version, made in (("this", this), ("other", before))}
    found = timing.compiled_in_turn(programs, dict.fromkeys(programs, inputs(*shape)), rounds)
    results = {}
    for name in this:
        pair = found[name, "this"], found[name, "other"]
        ratios = [a / b for a, b in zip(pair[0]["samples"], pair[1]["samples"], strict=True)]
        results[name] = {"this_ms": pair[0]["ms"], "other_ms": pair[1]["ms"], "ratio": statistics.median(ratios)}
    return {**dict(zip("nvh", shape, strict=True)), "results": results}
