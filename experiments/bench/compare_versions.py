"""Two versions of the package timed in turn, in one process: `python -m experiments.bench compare_versions OTHER`.

OTHER is the import name of another version of `pallas_ce`, say `pallas_ce_old`: a copy whose own imports say that name.
At each point of the paper's grid, at published heads and with options, every program is timed as this version and the
other have it by default, one right after the other, so that both meet the same clocks; what is written is the ratio of
the two. Points come in a mixed order.
"""

import argparse
import functools
import importlib
import random
import statistics
from typing import Any

import jax

import pallas_ce
from experiments.bench import timing
from experiments.bench.gpu_head import GRID, HEADS, OPTIONS_SHAPE
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
    """All points, the one with options first."""
    other = importlib.import_module(options.other)
    shapes: dict[str, Shape] = {f"{n}x{v}": (n, v, h) for n, v, h in GRID} | HEADS | {"options": OPTIONS_SHAPE}
    order = sorted(random.Random(1).sample(list(shapes), len(shapes)), key=lambda name: name != "options")

    def measured(name: str) -> Record:
        shape = dry(shapes[name]) if options.dry_run else shapes[name]
        return measure(shape, other, options.rounds, with_options=name == "options")

    points = [Point(name, functools.partial(measured, name)) for name in order]
    return [ResultFile("compare_versions", points, f"compare_versions {options.other}")]


def programs_of(package: Any, *, with_options: bool) -> dict[str, Program]:
    """The programs of one version."""

    def loss(**given: Any) -> Program:
        return functools.partial(package.linear_cross_entropy, **given)

    found = {"forward": loss()} | {mode: both(loss(backward=mode)) for mode in ("in_forward", "recompute")}
    if with_options:
        found |= {f"{mode} with options": both(loss(backward=mode, **_OPTIONS)) for mode in ("in_forward", "recompute")}
        found["in_forward frozen weight"] = jax.value_and_grad(loss(backward="in_forward"))
        found["forward statistics"] = functools.partial(package.linear_row_statistics, statistics=_STATISTICS)
    return found


def measure(shape: Shape, other: Any, rounds: int, *, with_options: bool = False) -> Record:
    """Of each program at one shape: milliseconds of both versions, and the median of the rounds' ratios."""
    versions = {"this": pallas_ce, "other": other}
    made = {version: programs_of(package, with_options=with_options) for version, package in versions.items()}
    # One right after the other.
    programs = {f"{name}|{version}": made[version][name] for name in made["this"] for version in made}
    found = timing.compiled_in_turn(programs, dict.fromkeys(programs, inputs(*shape)), rounds, timing.back_to_back)
    results = {}
    for name in made["this"]:
        this, before = found[f"{name}|this"], found[f"{name}|other"]
        ratios = [a / b for a, b in zip(this["samples"], before["samples"], strict=True)]
        results[name] = {"this_ms": this["ms"], "other_ms": before["ms"], "ratio": statistics.median(ratios)}
    return {"n": shape[0], "v": shape[1], "h": shape[2], "results": results}
