"""Speed of `train_lm`'s loop beside its compiled step launched back to back: `python -m experiments.bench train_speed`.

Trains `train_lm`'s default model of the device through the fused head and through stored logits, in turn, with all that
the loop does but validations and checkpoints, and launches the compiled step of each as often in between. Of each the
milliseconds of both, the loop's `ratio` (the step's milliseconds over the loop's), the fused loop's rate over that with
stored logits (`fused_to_canonical`), and what a `start` of `train_lm` takes in processes of its own.
"""

import argparse
import contextlib
import dataclasses
import functools
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from experiments.bench import timing, trainings
from experiments.bench.processes import apart
from experiments.bench.results import Point, Record, ResultFile
from experiments.lm.config import TrainConfig, default_config
from experiments.lm.data.dataset import load_dataset
from experiments.lm.data.packing import Dataset, training_batch
from experiments.lm.loop import WARM_UP, Trainer
from experiments.lm.model.program import Program, TrainState, build
from experiments.lm.programs_kept import programs_kept
from experiments.lm.records import MetricsLog, read_records
from experiments.train_lm import start_jax

HEADS = trainings.FAMILIES["train_lm"]
_STEPS, _DRY_STEPS = 100, 6  # of a loop, and of a series of launches


def files(options: argparse.Namespace) -> list[ResultFile]:
    """One point."""
    config = trainings.DRY if options.dry_run else default_config(start_jax())
    steps = _DRY_STEPS if options.dry_run else _STEPS
    config = dataclasses.replace(config, data=options.data, steps=steps + WARM_UP)
    return [ResultFile("train_speed", [Point("defaults", lambda: measure(config, options.rounds))], "train_speed")]


def loop_milliseconds(program: Program, config: TrainConfig, dataset: Dataset) -> float:
    """Of a step in the training loop, its warm-up left out."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(MetricsLog(folder / "metrics.jsonl"))
        Trainer(program, config, dataset, log).run()
        (summary,) = [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "summary"]
    return 1e3 * config.batch_size * config.sequence_length / float(summary["tokens_per_second"])


def step_milliseconds(program: Program, config: TrainConfig, dataset: Dataset) -> float:
    """Of the compiled step among as many launched back to back, on one batch that is there."""
    state = program.initial_state(config.seed)
    rows = program.placed(training_batch(dataset.training, config.seed, 0, config.batch_size))

    def launched(state: TrainState, launches: int) -> TrainState:
        for _ in range(launches):
            state, _ = program.train(state, rows)
        return jax.block_until_ready(state)

    state = launched(state, WARM_UP)
    started = time.perf_counter()
    launched(state, config.steps - WARM_UP)
    return 1e3 * (time.perf_counter() - started) / (config.steps - WARM_UP)


def measure(config: TrainConfig, rounds: timing.Rounds) -> Record:
    """Both heads' loops and steps of `train_lm` in turn."""
    dataset = load_dataset(config)
    dataset = dataclasses.replace(dataset, validation=dataset.validation[: config.batch_size])
    config = dataclasses.replace(config, validate_every=config.steps, checkpoint_every=config.steps)
    programs = {head: build(config, head, dataset.end_of_text) for head in HEADS}
    timed = {"loop": loop_milliseconds, "step": step_milliseconds}
    runs = {(head, kind): functools.partial(timed[kind], programs[head]) for head in HEADS for kind in timed}
    found = timing.in_turn(runs, lambda milliseconds: milliseconds(config, dataset), rounds)
    tokens = config.batch_size * config.sequence_length
    results = {}
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process may hold the pool that JAX takes of a GPU
    for head in HEADS:
        with tempfile.TemporaryDirectory() as folder:  # the first finds no program kept, the second the first's
            start = {when: apart(_start, config, head, folder, **environment) for when in ("before", "after")}
        loop, step = found[head, "loop"], found[head, "step"]
        speeds = {"ratio": step["ms"] / loop["ms"], "tokens_per_second": 1e3 * tokens / loop["ms"]}
        results[head] = {"loop": loop, "step": step, "start": start, **speeds}
    rates = found["canonical", "loop"]["ms"] / found["fused", "loop"]["ms"]
    return {"steps": config.steps - WARM_UP, "results": results, "fused_to_canonical": rates}


def _start(config: TrainConfig, head: str, folder: str) -> Record:
    """Starts a training up to the end of its first step: seconds to compile, of that step, and in JAX's backend.

    The backend's are a sum over programs; several are compiled at a time.
    """
    start_jax()
    in_backend = []

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            in_backend.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)
    with programs_kept(Path(folder), anyway=True):
        program = build(config, head, end_of_text=0)
        started = time.perf_counter()
        rows = program.placed(np.zeros((config.batch_size, config.sequence_length + 1), np.int32))
        jax.block_until_ready(program.train(program.initial_state(config.seed), rows))
        first = time.perf_counter() - started
    return {
        "compile_seconds": program.facts["compile_seconds"],
        "first_step_seconds": first,
        "backend_seconds": sum(in_backend),
    }
