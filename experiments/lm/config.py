"""Everything a training run can be told: a dataclass, from which the command line comes."""

import argparse
import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What was asked for cannot be done; the message is one sentence that says what would work."""


def _option(default: str | int | float | bool, text: str, **facts: Any) -> Any:
    """A field.

    Args:
        default: on a CPU.
        text: for `--help`.
        facts: its default on an `accelerator` where that differs, the `least` and `most` it may be, `choices`.
    """
    return dataclasses.field(default=default, metadata={"help": text, **facts})


_DTYPES = ("float32", "bfloat16")
_LOSSES = ("fused_linear_cross_entropy", "cross_entropy", "chunked_cross_entropy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run; the class defaults are those for a CPU."""

    head: str = _option("fused", "loss head; both trains one after the other", choices=("fused", "canonical", "both"))
    data: str = _option("", "text file or folder; empty: the Python standard library's own source")
    vocab_size: int = _option(16384, "entries of the byte-level BPE", accelerator=32768, least=257)
    validation_fraction: float = _option(0.01, "share of the text kept for validation", least=1e-6, most=0.99)

    width: int = _option(192, "features of the hidden states", accelerator=768, least=1)
    layers: int = _option(3, "transformer blocks", accelerator=12, least=1)
    attention_heads: int = _option(3, "attention heads; must divide width", accelerator=12, least=1)
    mlp_width: int = _option(512, "features inside the SwiGLU block", accelerator=2048, least=1)
    tie_embeddings: bool = _option(False, "use the token embedding as the loss head's kernel")
    dtype: str = _option("float32", "compute dtype; weights stay float32", accelerator="bfloat16", choices=_DTYPES)
    remat: bool = _option(False, "recompute each block in the backward pass to save memory", accelerator=True)

    # The first five are what `pallas_ce.build_loss_fn` reads, too, of the `[train]` section of a file of options.
    loss_fn: str = _option(_LOSSES[0], "the loss: through the fused head, or on stored logits", choices=_LOSSES)
    ce_chunk_size: int = _option(0, "rows at a time of chunked_cross_entropy; 0: 4096", least=0)
    z_loss_weight: float = _option(0.0, "weight of the mean squared log-sum-exp, in training", least=0)
    label_smoothing: float = _option(0.0, "label smoothing, in training", least=0, most=1)
    logit_softcap: float = _option(0.0, "c of the logits' cap c·tanh(z/c); 0: none", least=0)
    backward: str = _option("auto", "backward mode of the fused loss", choices=("auto", "recompute", "in_forward"))
    implementation: str = _option("auto", "implementation of the fused loss, e.g. xla or reference")

    mesh: str = _option("", "how to split over devices, e.g. data=2,fsdp=2,tensor=2,sequence; may differ on --resume")

    optimizer: str = _option("adamw", "muon is for the blocks' matrices; AdamW has the rest", choices=("adamw", "muon"))
    steps: int = _option(200, "optimiser steps", accelerator=600, least=1)
    sequence_length: int = _option(128, "tokens per row", accelerator=1024, least=1)
    batch_size: int = _option(8, "rows per step", accelerator=16, least=1)
    learning_rate: float = _option(1e-3, "peak learning rate", accelerator=6e-4, least=0)
    final_learning_rate: float = _option(0.1, "learning rate at the end, as a share of the peak", least=0, most=1)
    warmup: float = _option(0.1, "share of the steps over which the learning rate rises", least=0, most=0.99)
    weight_decay: float = _option(0.1, "AdamW's decoupled weight decay, on matrices only", least=0)
    beta2: float = _option(0.95, "AdamW's second-moment decay", least=0, most=0.9999999)
    clip_norm: float = _option(1.0, "gradients are scaled down to this global norm", least=1e-9)
    seed: int = _option(0, "seed of the initial weights and of the data order", least=0, most=2**31 - 1)

    validate_every: int = _option(100, "steps between validations", accelerator=200, least=1)
    checkpoint_every: int = _option(100, "steps between checkpoints", accelerator=200, least=1)
    cache_dir: str = _option(".cache", "folder for trained tokenisers and compiled programs")

    def loss_heads(self) -> tuple[str, ...]:
        """The loss heads to train, in order; the fused one first, so that its peak memory is its own."""
        if self.head == "both":
            return ("fused", "canonical")
        return ("logits",) if self.head == "fused" and self.loss_fn != _LOSSES[0] else (self.head,)

    def without_regularisers(self) -> "TrainConfig":
        """The configuration of the validation loss, which is in nats a token."""
        return dataclasses.replace(self, z_loss_weight=0.0, label_smoothing=0.0)


OF_LOSS = ("loss_fn", "ce_chunk_size", "z_loss_weight", "label_smoothing", "logit_softcap")
OPTIONS = {field.name: field for field in dataclasses.fields(TrainConfig)}

# These may differ between a run and its resumption: they change where and when things are computed and written, and no
# number by more than the rounding of sums in another order.
FREE_ON_RESUME = frozenset({"data", "cache_dir", "validate_every", "checkpoint_every", "mesh"})


def default_config(backend: str) -> TrainConfig:
    """The defaults for a JAX backend: a small model for `"cpu"`, a larger one for anything faster."""
    larger = {name: f.metadata["accelerator"] for name, f in OPTIONS.items() if "accelerator" in f.metadata}
    return TrainConfig() if backend == "cpu" else TrainConfig(**larger)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every field; those that are not given leave no attribute."""
    for name, field in OPTIONS.items():
        text = f"{field.metadata['help']} (default: {field.default!r}".replace("%", "%%")
        text += f", on a GPU {field.metadata['accelerator']!r})" if "accelerator" in field.metadata else ")"
        given: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if isinstance(field.default, bool):
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": type(field.default), "choices": field.metadata.get("choices")}
            given["metavar"] = "|".join(field.metadata.get("choices", [type(field.default).__name__.upper()]))
        parser.add_argument(f"--{name.replace('_', '-')}", **given)


def merge(base: TrainConfig, values: dict[str, Any], source: str) -> TrainConfig:
    """`base` with `values` put over it, checked.

    Args:
        base: the configuration to start from.
        values: option names to values.
        source: where the values come from, for error messages.

    Raises:
        UsageError: naming the option, its value and what would work.
    """
    for name, value in values.items():
        if name not in OPTIONS:
            raise UsageError(f"{source} has the unknown key {name!r}; known keys: {', '.join(OPTIONS)}")
        wanted = type(OPTIONS[name].default)
        # bool is an int in Python, and TOML writes 1 where 1.0 is meant: only the second is a slip to forgive.
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise UsageError(f"{source} sets {name} to {value!r}, which must be of type {wanted.__name__}")
    config = dataclasses.replace(base, **values)
    _check(config)
    return config


def _check(config: TrainConfig) -> None:
    for name, field in OPTIONS.items():
        value, facts = getattr(config, name), field.metadata
        if value not in facts.get("choices", [value]):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(facts['choices'])}")
        if not isinstance(value, str) and not (facts.get("least", 0) <= value <= facts.get("most", math.inf)):
            most = f" and at most {facts['most']}" if "most" in facts else ""
            raise UsageError(f"{name} is {value}; it must be at least {facts['least']}{most}")
    special = config.loss_fn != _LOSSES[0] or config.z_loss_weight or config.label_smoothing or config.logit_softcap
    if config.head != "fused" and special:
        raise UsageError(
            f"head is {config.head!r}, which trains the plain cross entropy of stored logits; "
            "leave loss_fn, z_loss_weight, label_smoothing and logit_softcap at their defaults, or head at 'fused'"
        )
    if config.width % (2 * config.attention_heads):
        raise UsageError(
            f"attention_heads is {config.attention_heads}, and width {config.width} is no multiple of its double: "
            "each attention head takes an equal share of the width, whose features are turned in pairs"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a TOML file; its `[train]` section, if it has one, joins them.

    Raises:
        UsageError: if it cannot be read or is not TOML.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error}") from None
    section = values.pop("train", {})
    return values | (section if isinstance(section, dict) else {"train": section})


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML that `--config` reads back, and `pallas_ce.build_loss_fn` its `[train]` section."""
    # A JSON string, number or boolean is the same in TOML, as long as characters are not escaped as surrogates.
    lines = {n: f"{n} = {json.dumps(v, ensure_ascii=False)}" for n, v in dataclasses.asdict(config).items()}
    others = [line for name, line in lines.items() if name not in OF_LOSS]
    return "\n".join([*others, "", "[train]", *(lines[name] for name in OF_LOSS), ""])
