"""Trainings of a small Qwen3 of random weights, for the harness: in a plain loop, and by TRL's `SFTTrainer`.

By the model's own loss or TRL's (`plain`), and by `patch_causal_lm` (`fused`). A row has one token more than the
configuration says; all are inputs.
"""

import itertools
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers

import torch_bridge
from experiments.bench.huggingface_table import Setting, intervals, model_of, patch_of
from experiments.bench.results import Record
from experiments.bench.torch_timing import used_bytes
from experiments.bench.trainings import Training, batches, load_text
from experiments.lm.config import TrainConfig
from experiments.lm.data.packing import mean_loss
from experiments.lm.data.tokenizer import END_OF_TEXT

_LEARNING_RATE = 3e-4


def patched_model(config: TrainConfig, variant: str, device: str) -> Any:
    """The model with the variant's loss."""
    tokens, head_size = config.batch_size * (config.sequence_length + 1), config.width // config.attention_heads
    model = model_of(Setting(config.width, config.layers, tokens, config.vocab_size, head_size), device)
    patch_of(variant)(model)
    return model


def plain_training(config: TrainConfig, variant: str, device: str) -> Training:
    """A plain loop with AdamW at a constant rate, all in bfloat16."""
    (dataset, sizes), before = load_text(config), used_bytes(device)
    model = patched_model(config, variant, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def loss(rows: np.ndarray) -> Any:
        tokens = torch.from_numpy(rows).long().to(device)
        labels = tokens.clone()  # each is compared with what the token before it predicts
        labels[:, 1:][tokens[:, :-1] == dataset.end_of_text] = -100  # where a new document begins
        return model(input_ids=tokens, labels=labels).loss

    def run() -> tuple[list[float], list[float]]:
        rows, losses = iter(batches(dataset, config)), []

        def step() -> None:
            optimizer.zero_grad()
            value = loss(next(rows))
            value.backward()
            optimizer.step()
            losses.append(value.detach())

        samples = intervals(step, config.steps, device)
        return [value.item() for value in losses], samples[1:]

    def validate() -> float:
        model.eval()
        with torch.no_grad():
            return mean_loss(dataset, config.batch_size, loss)

    return Training(
        run, lambda: _memory(device, variant, before), validate, sizes | {"parameters": model.num_parameters()}
    )


def trl_training(config: TrainConfig, variant: str, device: str) -> Training:
    """The same by `SFTTrainer`, with its own defaults where these do not say otherwise; no label is ignored."""
    from datasets import Dataset as Rows
    from datasets import disable_progress_bars
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    ended: list[float] = []

    class Clock(transformers.TrainerCallback):
        """When steps ended; each has waited for the device, to log its loss."""

        def on_log(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    disable_progress_bars()
    (dataset, sizes), before = load_text(config), used_bytes(device)
    model = patched_model(config, variant, device)
    # Of rows that are there nothing is left to it but to say which token would fill them up.
    tokenizer = Tokenizer(models.WordLevel({END_OF_TEXT: dataset.end_of_text}, unk_token=END_OF_TEXT))
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),  # nothing is saved
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
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.PrinterCallback)

    def run() -> tuple[list[float], list[float]]:
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        # The last log is the training's summary.
        return losses, [1e3 * (end - start) for start, end in itertools.pairwise(ended[: config.steps])]

    def validate() -> float:
        return float(trainer.evaluate()["eval_loss"])

    return Training(
        run, lambda: _memory(device, variant, before), validate, sizes | {"parameters": model.num_parameters()}
    )


def _memory(device: str, variant: str, before: int) -> Record:
    """`peak_mib` of PyTorch's tensors, `jax_peak_mib` beside them, `driver_mib` of both pools, which only grow."""
    driver = used_bytes(device)
    if device == "cpu":
        return {"peak_mib": driver / 2**20}
    jax_peak = (torch_bridge.memory_usage().jax_peak or 0) if variant == "fused" else 0
    found = {"peak": torch.cuda.max_memory_allocated(), "jax_peak": jax_peak, "driver": driver - before}
    return {f"{name}_mib": count / 2**20 for name, count in found.items()}
