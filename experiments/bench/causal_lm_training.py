"""Trainings of a Hugging Face model, in a plain loop and by TRL; each function is called in a process of its own.

PyTorch is imported within them: torch_bridge then leaves the device's memory to it, in that process and those that it
starts, and in no other.
"""

import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.bench.largest_batch import bracket, mib_by_batch, search
from experiments.bench.lm_training import load_text
from experiments.bench.processes import forked
from experiments.bench.results import Record
from experiments.lm.config import TrainConfig
from experiments.lm.data.packing import Dataset, training_batch, validation_batches
from experiments.lm.data.tokenizer import END_OF_TEXT
from experiments.lm.run.loop import WARM_UP

if TYPE_CHECKING:
    from experiments.bench.huggingface import Setting

# The model's own loss, or TRL's, and that of `patch_causal_lm`.
PLAIN, FUSED = VARIANTS = ("plain", "fused")

_IMPORTED = ("transformers.models.qwen3.modeling_qwen3", "torch_bridge.integrations.huggingface", __name__)
_STEPS_OF_A_TRIAL = 3
_LEARNING_RATE = 3e-4
_OUT_OF_MEMORY = ("out of memory", "RESOURCE_EXHAUSTED", "ALLOC_FAILED")

# On a CPU, whose memory no dry run should fill, each row of a batch stands for a MiB of so many.
_DRY_LIMIT = 20 * 2**20


def setting_of(config: TrainConfig) -> "Setting":
    """The model, and a step's tokens: a row has one more than the configuration says, all of which are inputs."""
    from experiments.bench.huggingface import Setting

    return Setting(
        width=config.width,
        layers=config.layers,
        tokens=config.batch_size * (config.sequence_length + 1),
        vocabulary=config.vocab_size,
        head_size=config.width // config.attention_heads,
    )


def train(config: TrainConfig, variant: str, device: str) -> Record:
    """Trains in a plain loop with AdamW at a constant rate, all in bfloat16.

    Returns:
        `losses` of every step, the final `validation_loss`, `ms` of a step (the median behind the warm-up), the sizes,
        and the memory of `_memory`.
    """
    import torch

    from experiments.bench import huggingface

    (dataset, entries), before = load_text(config), _driver_bytes(device)
    model = huggingface.model_of(setting_of(config), device)
    huggingface.patch_of(variant)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    numbers = range(config.steps)
    batches = [_batch(training_batch(dataset.training, config.seed, step, config.batch_size)) for step in numbers]
    batches = [(rows.to(device), _labels(rows, dataset).to(device)) for rows in batches]
    losses: list[torch.Tensor] = []

    def step() -> None:
        rows, labels = batches[len(losses)]
        losses.append(_step(model, optimizer, rows, labels))

    samples = huggingface.intervals(step, config.steps, device)
    memory = _memory(device, variant, before)
    total, count = 0.0, 0
    model.eval()
    for batch in validation_batches(dataset.validation, config.batch_size, dataset.end_of_text):
        labels = _labels(rows := _batch(batch), dataset)
        counted = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = model(input_ids=rows.to(device), labels=labels.to(device)).loss.item() if counted else 0.0
        total, count = total + loss * counted, count + counted
    return {
        **_sizes(config, entries, model),
        "ms": statistics.median(samples[WARM_UP:]),
        **memory,
        "validation_loss": total / count,
        "losses": [loss.item() for loss in losses],
    }


def largest(config: TrainConfig, variant: str, device: str) -> Record:
    """The largest batch that trains for a few steps; each trial has a process of its own.

    Returns:
        `batch` and its `ms`; `used_mib` by batch, the driver's count, None where memory ran out; `limit_mib`.
    """
    import torch

    limit = _DRY_LIMIT if device == "cpu" else torch.cuda.mem_get_info()[1]
    ms: dict[int, float] = {}

    def needs(batches: Sequence[int]) -> dict[int, float]:
        found: dict[int, float] = {}
        for batch in batches:
            trial = dataclasses.replace(config, batch_size=batch)
            found[batch], ms[batch] = forked(_IMPORTED, run_steps, trial, variant, device)
            if found[batch] > limit:
                break
        return found

    found = search(needs, limit, 2 * config.batch_size)
    batch, _ = bracket(found, limit)
    if not batch:
        raise RuntimeError(f"no batch of {variant} could be run: {sorted(found)} do not fit")
    return {
        "sequence": config.sequence_length + 1,
        "vocabulary": config.vocab_size,
        "batch": batch,
        "ms": ms[batch],
        "used_mib": mib_by_batch(found),
        "limit_mib": limit / 2**20,
    }


def run_steps(config: TrainConfig, variant: str, device: str) -> tuple[float, float]:
    """Steps of random tokens: the device's bytes then in use, and the last step's milliseconds.

    Where the device's memory does not suffice, infinity and NaN.
    """
    import torch

    from experiments.bench import huggingface

    try:
        model = huggingface.model_of(setting_of(config), device)
        huggingface.patch_of(variant)(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
        rows = torch.randint(config.vocab_size, (config.batch_size, config.sequence_length + 1), device=device)
        samples = huggingface.intervals(lambda: _step(model, optimizer, rows, rows), _STEPS_OF_A_TRIAL, device)
    except RuntimeError as error:  # of either framework
        if not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        return math.inf, math.nan
    return (config.batch_size * 2**20 if device == "cpu" else _driver_bytes(device)), samples[-1]


def train_by_trl(config: TrainConfig, variant: str, device: str) -> Record:
    """The same by `SFTTrainer`, with its own defaults where these do not say otherwise; returns what `train` does.

    Its own loss is the fused head that TRL puts in the place of the model's forward; no label is ignored.
    """
    import transformers
    from datasets import Dataset as Rows
    from datasets import disable_progress_bars
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    from experiments.bench import huggingface

    class Clock(transformers.TrainerCallback):
        """When steps ended; each has waited for the device, to log its loss."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_log(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    disable_progress_bars()
    (dataset, entries), before = load_text(config), _driver_bytes(device)
    model = huggingface.model_of(setting_of(config), device)
    huggingface.patch_of(variant)(model)
    # Of rows that are there nothing is left to it but to say which token would fill them up.
    tokenizer = Tokenizer(models.WordLevel({END_OF_TEXT: dataset.end_of_text}, unk_token=END_OF_TEXT))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=config.batch_size,
            max_length=config.sequence_length + 1,
            learning_rate=_LEARNING_RATE,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=Rows.from_dict({"input_ids": dataset.training.tolist()}),
            eval_dataset=Rows.from_dict({"input_ids": dataset.validation.tolist()}),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, unk_token=END_OF_TEXT
            ),
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        memory = _memory(device, variant, before)
        times = clock.times[WARM_UP - 1 : config.steps]  # the last log is the training's summary
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        validation_loss = trainer.evaluate()["eval_loss"]
    return {
        **_sizes(config, entries, model),
        "ms": 1e3 * statistics.median(end - start for start, end in itertools.pairwise(times)),
        **memory,
        "validation_loss": validation_loss,
        "losses": losses,
    }


def _step(model: Any, optimizer: Any, rows: Any, labels: Any) -> Any:
    """A training step; the loss, still on the device."""
    optimizer.zero_grad()
    loss = model(input_ids=rows, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def _batch(rows: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(rows).long()


def _labels(rows: Any, dataset: Dataset) -> Any:
    """The rows, -100 where a new document begins; the model compares each with what the token before it predicts."""
    labels = rows.clone()
    labels[:, 1:][rows[:, :-1] == dataset.end_of_text] = -100
    return labels


def _sizes(config: TrainConfig, entries: int, model: Any) -> Record:
    return {
        "batch": config.batch_size,
        "sequence": config.sequence_length + 1,
        "vocabulary": config.vocab_size,
        "tokenizer_entries": entries,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _driver_bytes(device: str) -> int:
    """Bytes of the GPU in use, a framework that has only started included; nothing of a CPU's."""
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _memory(device: str, variant: str, before: int) -> Record:
    """`peak_mib` of PyTorch's tensors, `jax_peak_mib` beside them, `driver_mib` of both pools; of a CPU the process's.

    Neither framework's pool has given anything back.
    """
    import torch

    import torch_bridge
    from experiments.bench.used import used_bytes

    if device == "cpu":
        return {"peak_mib": used_bytes(device) / 2**20}
    jax_peak = (torch_bridge.memory_usage().jax_peak or 0) if variant == FUSED else 0
    return {
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
        "jax_peak_mib": jax_peak / 2**20,
        "driver_mib": (_driver_bytes(device) - before) / 2**20,
    }
