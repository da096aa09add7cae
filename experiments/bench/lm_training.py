"""Trainings of `train_lm`'s model as benchmarks run them: in its loop, without checkpoints, each in its own process."""

import contextlib
import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench.largest_batch import FINE, bracket, mib_by_batch, search
from experiments.bench.processes import apart
from experiments.bench.results import Record
from experiments.lm.config import TrainConfig
from experiments.lm.data.dataset import load_dataset
from experiments.lm.data.packing import Dataset
from experiments.lm.errors import TooFewEntriesError
from experiments.lm.model.program import Program, TrainState, build
from experiments.lm.run.checkpoint import Checkpoints
from experiments.lm.run.loop import WARM_UP, Trainer
from experiments.lm.run.memory import peak_bytes
from experiments.lm.run.metrics import MetricsLog, curve, read_records
from experiments.lm.run.programs_kept import programs_kept
from experiments.train_lm import start_jax

HEADS = ("fused", "canonical")
DRY = TrainConfig(vocab_size=300, width=16, layers=1, attention_heads=2, mlp_width=32, sequence_length=16)

# The first batch whose memory is planned, in those of the training: small ones take another way through the head.
_FIRST = 4

# Smaller batches that are run where the plan of a larger one fits and running it does not.
_LESS = 3


class _Unsaved(Checkpoints[TrainState]):
    """Checkpoints that are not written."""

    def save(self, step: int, state: TrainState, description: dict[str, Any]) -> None:
        pass


def loop_records(program: Program, config: TrainConfig, dataset: Dataset) -> list[Record]:
    """What the training loop records from the first step to the last."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(MetricsLog(folder / "metrics.jsonl"))
        Trainer(program, config, dataset, _Unsaved(folder), log, lambda: lambda: 0).run(resume=False)
        return list(read_records(folder / "metrics.jsonl"))


def load_text(config: TrainConfig) -> tuple[Dataset, int]:
    """The dataset, and its tokeniser's entries: fewer than the vocabulary where the text supports no more."""
    try:
        return load_dataset(config), config.vocab_size
    except TooFewEntriesError as error:
        return load_dataset(dataclasses.replace(config, vocab_size=error.entries)), error.entries


def train(config: TrainConfig, head: str) -> Record:
    """Trains one head to the end; in a process that has done nothing else.

    Returns:
        `losses` of every step, the final `validation_loss`, `ms` of a step (the median behind the warm-up),
        `peak_mib` (JAX's count; the process's on a CPU), `step_temporary_mib` as planned, and the sizes.
    """
    start_jax()
    dataset, entries = load_text(config)
    config = dataclasses.replace(config, validate_every=config.steps, checkpoint_every=config.steps)
    program = build(config, head, dataset.end_of_text)
    records = loop_records(program, config, dataset)
    seconds = [record["seconds"] for record in records if record["kind"] == "train"][WARM_UP - 1 :]
    (summary,) = [record for record in records if record["kind"] == "summary"]
    return {
        "batch": config.batch_size,
        "sequence": config.sequence_length,
        "vocabulary": config.vocab_size,
        "tokenizer_entries": entries,
        "parameters": summary["parameters"],
        "ms": 1e3 * statistics.median(after - before for before, after in itertools.pairwise(seconds)),
        "peak_mib": summary["peak_bytes"] / 2**20,
        "step_temporary_mib": summary["step_temporary_bytes"] / 2**20,
        "compile_seconds": summary["compile_seconds"],
        "validation_loss": summary["validation_loss"],
        "losses": list(curve(records, "train", head).values()),
    }


def planned_bytes(config: TrainConfig, head: str, batches: Sequence[int]) -> dict[int, float]:
    """State, rows and temporaries of each batch's compiled step; nothing is run, and programs are kept.

    Infinity where the compiler, which tries out products, runs out of memory.
    """
    start_jax()

    def planned(batch: int) -> float:
        try:
            program = _build(config, head, batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return math.inf
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract_state))
        return state + 4 * batch * (config.sequence_length + 1) + program.facts["step_temporary_bytes"]

    with programs_kept(_programs(config)), ThreadPoolExecutor(len(batches)) as threads:
        return dict(zip(batches, threads.map(planned, batches), strict=True))


def run_steps(config: TrainConfig, head: str, batch: int) -> Record:
    """Two steps of that batch, of random tokens: `ms` of the second and `peak_mib`, or why it `failed`."""
    start_jax()
    try:
        with programs_kept(_programs(config)):
            program = _build(config, head, batch)
            state = program.initial_state(config.seed)
            rows = _random_rows(program, config, batch)
            state, _ = jax.block_until_ready(program.train(state, rows))
            started = time.perf_counter()
            jax.block_until_ready(program.train(state, rows))
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).splitlines()[0][:200]}
    return {"ms": 1e3 * (time.perf_counter() - started), "peak_mib": peak_bytes() / 2**20}


def largest(config: TrainConfig, head: str, limit: float) -> Record:
    """The largest batch whose planned memory is within the limit's bytes and that runs.

    Returns:
        `batch`, its `ms` and `peak_mib`; `planned_mib` by batch; `limit_mib`; `failed`: those that only the plan fits.
    """
    found = search(lambda batches: apart(planned_bytes, config, head, batches), limit, _FIRST * config.batch_size)
    batch, _ = bracket(found, limit)
    record: Record = {"sequence": config.sequence_length, "vocabulary": config.vocab_size}
    record |= {"limit_mib": limit / 2**20, "planned_mib": mib_by_batch(found)}
    failed: dict[str, str] = {}
    for _ in range(1 + _LESS):
        if batch < 1:
            break
        ran = apart(run_steps, config, head, batch)
        if "failed" not in ran:
            return record | {"batch": batch, **ran, "failed": failed}
        failed[str(batch)] = ran["failed"]
        batch -= max(1, batch // FINE)
    raise RuntimeError(f"no batch of {head} could be run: planned {record['planned_mib']} MiB, failed {failed}")


def starts(config: TrainConfig, head: str) -> dict[str, Record]:
    """`_start` in two fresh processes: "before", with no program kept, and "after", with those of the first."""
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, cache_dir=folder)
        # Whoever asks may hold the pool that JAX takes of a GPU.
        return {
            when: apart(_start, config, head, XLA_PYTHON_CLIENT_PREALLOCATE="false") for when in ("before", "after")
        }


def _start(config: TrainConfig, head: str) -> Record:
    """Starts a training up to the end of its first step.

    Returns:
        `compile_seconds` until its programs are there, `first_step_seconds` from then on, the state's making among
        them, and `backend_seconds`, in which JAX's backend compiled programs or loaded those that are kept: a sum over
        programs, of which several are compiled at a time.
    """
    start_jax()
    in_backend = []

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            in_backend.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        with programs_kept(_programs(config)):
            program = _build(config, head, config.batch_size)
            started = time.perf_counter()
            rows = _random_rows(program, config, config.batch_size)
            jax.block_until_ready(program.train(program.initial_state(config.seed), rows))
            first = time.perf_counter() - started
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    found = {"compile_seconds": program.facts["compile_seconds"], "first_step_seconds": first}
    return found | {"backend_seconds": sum(in_backend)}


def _random_rows(program: Program, config: TrainConfig, batch: int) -> jax.Array:
    shape = batch, config.sequence_length + 1
    return program.placed(np.random.default_rng(0).integers(config.vocab_size, size=shape, dtype=np.int32))


def _build(config: TrainConfig, head: str, batch: int) -> Program:
    return build(dataclasses.replace(config, batch_size=batch), head, end_of_text=0)


def _programs(config: TrainConfig) -> Path:
    return Path(config.cache_dir) / "programs"
