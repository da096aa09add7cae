"""One session of a run: the heads still to be trained, one after the other, then plots and the closing report."""

import argparse
import contextlib
import math
from pathlib import Path

import jax

from experiments.lm.config import TrainConfig
from experiments.lm.data.packing import Dataset
from experiments.lm.errors import RunError, Stopped
from experiments.lm.model.program import Program, TrainState, build
from experiments.lm.run import run_directory
from experiments.lm.run.checkpoint import Checkpoints
from experiments.lm.run.interrupt import stop_requests
from experiments.lm.run.loop import Trainer
from experiments.lm.run.memory import as_text
from experiments.lm.run.metrics import MetricsLog, read_records
from experiments.lm.run.plots import write_plots
from experiments.lm.run.processes import is_first, largest
from experiments.lm.run.report import report


def train_heads(config: TrainConfig, dataset: Dataset, run: Path, backend: str, command: argparse.Namespace) -> str:
    """Trains the run's loss heads and writes its files, as the command's `resume`, `overwrite` and `stop_after` say.

    The first head is compiled before the run's folder is made, so that a configuration that cannot be trained leaves
    nothing behind. A head whose summary is recorded was finished by an earlier session and is not trained again.

    Several processes train together; the first one writes all files but the checkpoints' arrays.

    Returns:
        The closing report; the first process's, others return nothing.

    Raises:
        UsageError: if the configuration cannot be trained, or the checkpoint to resume from does not fit it.
        RunError: if the training fails.
        Stopped: if it is ended early.
    """
    finished = _finished_heads(run) if command.resume else set()
    waiting = [head for head in config.loss_heads() if head not in finished]
    first = _build(config, waiting[0], dataset) if waiting else None
    budget = math.inf if command.stop_after is None else command.stop_after
    metrics = run_directory.metrics_path(run) if is_first() else None
    with contextlib.ExitStack() as stack:
        if is_first():
            stack.enter_context(run_directory.claimed(run))
            if not command.resume:
                run_directory.create(run, config, command.overwrite)
        stop_signal, log = stack.enter_context(stop_requests()), stack.enter_context(MetricsLog(metrics))
        for head in waiting:
            if budget == 0:
                raise Stopped(f"stopped before the {head} head; everything so far is saved", exit_code=0)
            program = first if first is not None and first.head == head else _build(config, head, dataset)
            checkpoints = Checkpoints[TrainState](run_directory.checkpoint_path(run, head))
            # A signal may reach the processes after different steps, or one only: all stop after the same one.
            trainer = Trainer(program, config, dataset, checkpoints, log, lambda: largest(stop_signal()), budget)
            budget -= _run(trainer, command.resume)
    if metrics is None:
        return ""
    records = list(read_records(metrics))
    write_plots(records, dataset.unigram_entropy, run)
    return report(records, backend, run)


def _run(trainer: Trainer, resume: bool) -> int:
    try:
        return trainer.run(resume)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            f"training the {trainer.program.head} head does not fit the device's memory; "
            "lower --batch-size, --sequence-length or --width"
        ) from error


def _build(config: TrainConfig, head: str, dataset: Dataset) -> Program:
    program = build(config, head, dataset.end_of_text)
    temporaries, seconds = as_text(program.facts["step_temporary_bytes"]), program.facts["compile_seconds"]
    print(
        f"{head}: {program.facts['parameters']:,} parameters, compiled in {seconds:.1f} s; "
        f"a step needs {temporaries} of temporaries",
        flush=True,
    )
    return program


def _finished_heads(run: Path) -> set[str]:
    path = run_directory.metrics_path(run)
    return {record["head"] for record in read_records(path) if record["kind"] == "summary"} if path.is_file() else set()
