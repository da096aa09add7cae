"""One harness for trainings: N steps, their losses, time and peak memory, and the largest batch that fits.

Each function that trains is called in a process of its own: pools of memory only grow. PyTorch is imported within:
`torch_bridge` then leaves the device's memory to it, in that process and in no other.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from experiments.bench.processes import apart
from experiments.bench.results import Record
from experiments.lm.config import TrainConfig
from experiments.lm.data.dataset import load_dataset
from experiments.lm.data.packing import Dataset, mean_loss, training_batch
from experiments.lm.data.tokenizer import TooFewEntriesError
from experiments.lm.loop import WARM_UP
from experiments.lm.model.program import build
from experiments.lm.records import peak_bytes
from experiments.train_lm import start_jax

# By family, the variant with our loss and the one without.
FAMILIES = {"train_lm": ("fused", "canonical"), "Hugging Face": ("fused", "plain"), "TRL": ("fused", "plain")}
LARGEST = ", largest batch"
DRY = TrainConfig(vocab_size=300, width=16, layers=1, attention_heads=2, mlp_width=32, sequence_length=16)

_STEPS_OF_A_TRIAL = 3
_OUT_OF_MEMORY = ("out of memory", "RESOURCE_EXHAUSTED", "ALLOC_FAILED")
# The largest batch is known to one in this number of its rows; a dry run on a CPU has this limit.
_FINE = 16
_DRY_LIMIT = 8


class Training(NamedTuple):
    """A training that is ready to run.

    `run` takes all steps and returns their losses and the milliseconds of each but the first; `memory` says the MiB
    that it has taken, `validate` the final validation loss, `facts` the sizes.
    """

    run: Callable[[], tuple[list[float], list[float]]]
    memory: Callable[[], Record]
    validate: Callable[[], float]
    facts: Record


def train(family: str, config: TrainConfig, variant: str, device: str) -> Record:
    """Trains to the end: losses of every step, validation loss, memory, median `ms` of a step behind the warm-up."""
    training = _maker(family)(config, variant, device)
    losses, samples = training.run()
    memory = training.memory()
    return {
        **training.facts,
        "ms": statistics.median(samples[WARM_UP - 1 :]),
        **memory,
        "validation_loss": training.validate(),
        "losses": losses,
    }


def largest(family: str, config: TrainConfig, variant: str, device: str) -> Record:
    """The largest batch that trains for a few steps: doubled until one fails, then halved in between."""
    ms: dict[int, float | None] = {}

    def fits(batch: int) -> bool:
        trial = dataclasses.replace(config, batch_size=batch, steps=_STEPS_OF_A_TRIAL)
        ms[batch] = apart(_trial, family, trial, variant, device)
        return ms[batch] is not None

    low, high = 0, config.batch_size
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // _FINE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise RuntimeError(f"no batch of {family}, {variant} could be run; tried {sorted(ms)}")
    sizes = {"sequence": config.sequence_length, "vocabulary": config.vocab_size, "batch": low, "ms": ms[low]}
    return sizes | {"tried": {str(batch): found is not None for batch, found in sorted(ms.items())}}


def _trial(family: str, config: TrainConfig, variant: str, device: str) -> float | None:
    """Milliseconds of the last of a few steps, or None where memory does not suffice."""
    if device == "cpu" and config.batch_size > _DRY_LIMIT:
        return None
    try:
        _, samples = _maker(family)(config, variant, device).run()
    except RuntimeError as error:  # of either framework
        if not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        return None
    return samples[-1]


def _maker(family: str) -> Callable[[TrainConfig, str, str], Training]:
    if family == "train_lm":
        return lm_training
    from experiments.bench import causal_lm

    return causal_lm.plain_training if family == "Hugging Face" else causal_lm.trl_training


def load_text(config: TrainConfig) -> tuple[Dataset, Record]:
    """The dataset, and sizes; the tokeniser has fewer entries than the vocabulary where the text supports no more."""
    entries = config.vocab_size
    try:
        dataset = load_dataset(config)
    except TooFewEntriesError as error:
        entries = error.entries
        dataset = load_dataset(dataclasses.replace(config, vocab_size=entries))
    sizes = {"batch": config.batch_size, "sequence": config.sequence_length, "vocabulary": config.vocab_size}
    return dataset, sizes | {"tokenizer_entries": entries}


def batches(dataset: Dataset, config: TrainConfig) -> list[np.ndarray]:
    """The rows of every step."""
    return [training_batch(dataset.training, config.seed, step, config.batch_size) for step in range(config.steps)]


def lm_training(config: TrainConfig, head: str, device: str) -> Training:
    """`train_lm`'s model and compiled step."""
    del device
    start_jax()
    dataset, sizes = load_text(config)
    program = build(config, head, dataset.end_of_text)
    state = program.initial_state(config.seed)

    def run() -> tuple[list[float], list[float]]:
        nonlocal state
        numbers, ended = [], []
        for rows in [program.placed(rows) for rows in batches(dataset, config)]:
            state, found = program.train(state, rows)
            numbers.append(found.loss)
            # The device has its next step before it while the host waits for the one before.
            jax.block_until_ready(numbers[-2:][0])
            ended.append(time.perf_counter())
        losses = [float(number) for number in numbers]
        ended.append(time.perf_counter())
        return losses, [1e3 * (end - start) for start, end in itertools.pairwise(ended[1:])]

    def memory() -> Record:
        return {"peak_mib": peak_bytes() / 2**20, "step_temporary_mib": program.facts["step_temporary_bytes"] / 2**20}

    def validate() -> float:
        return mean_loss(dataset, config.batch_size, lambda rows: program.validate(state.params, program.placed(rows)))

    return Training(run, memory, validate, sizes | {"parameters": program.facts["parameters"]})
