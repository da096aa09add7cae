"""Everything a training run can be told, with its defaults and its limits.

One frozen dataclass is the single list of options: the command line, the TOML file and the configuration stored in a
run all come from its fields. Values are merged as defaults < TOML file < command line and then checked together.
"""

import dataclasses
import json
import math
import operator
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.lm.errors import UsageError

# How each kind of limit is worded and tested.
_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def _option(default: str | int | float | bool, text: str, **facts: Any) -> Any:
    """A field.

    Args:
        default: on a CPU.
        text: for `--help`.
        facts: its default on an `accelerator` where that differs, its limits by `_LIMITS`, `choices`, TOML `section`.
    """
    return dataclasses.field(default=default, metadata={"help": text, **facts})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run; the class defaults are those for a CPU."""

    head: str = _option("fused", "loss head; both trains one after the other", choices=("fused", "canonical", "both"))
    data: str = _option("", "text file or folder; empty: the Python standard library's own source")
    vocab_size: int = _option(16384, "entries of the byte-level BPE", accelerator=32768, least=257)
    validation_fraction: float = _option(0.01, "share of the text kept for validation", above=0, below=1)

    width: int = _option(192, "features of the hidden states", accelerator=768, least=1)
    layers: int = _option(3, "transformer blocks", accelerator=12, least=1)
    attention_heads: int = _option(3, "attention heads; must divide width", accelerator=12, least=1)
    mlp_width: int = _option(512, "features inside the SwiGLU block", accelerator=2048, least=1)
    tie_embeddings: bool = _option(False, "use the token embedding as the loss head's kernel")
    dtype: str = _option(
        "float32",
        "compute dtype; weights and optimiser state are always float32",
        accelerator="bfloat16",
        choices=("float32", "bfloat16"),
    )
    remat: bool = _option(False, "recompute each block in the backward pass to save memory", accelerator=True)

    # The section that `pallas_ce.build_loss_fn` reads too; a test compares the names with those it has registered.
    loss_fn: str = _option(
        "fused_linear_cross_entropy",
        "the loss: through the fused head, or on stored logits",
        choices=("fused_linear_cross_entropy", "cross_entropy", "chunked_cross_entropy"),
        section="train",
    )
    ce_chunk_size: int = _option(0, "rows at a time of chunked_cross_entropy; 0: 4096", least=0, section="train")
    z_loss_weight: float = _option(0.0, "weight of the mean squared log-sum-exp, in training", least=0, section="train")
    label_smoothing: float = _option(0.0, "label smoothing, in training", least=0, most=1, section="train")
    logit_softcap: float = _option(0.0, "c of the logits' cap c·tanh(z/c); 0: none", least=0, section="train")
    backward: str = _option("auto", "backward mode of the fused loss", choices=("auto", "recompute", "in_forward"))
    implementation: str = _option("auto", "implementation of the fused loss, e.g. xla or reference")

    mesh: str = _option(
        "",
        "how to split over devices, e.g. data=2,tensor=2: data and fsdp split the batch, fsdp the parameters' width, "
        "tensor heads, MLP and vocabulary; with ,sequence tokens over tensor between blocks. Empty: one device. May "
        "differ on --resume",
    )

    optimizer: str = _option(
        "adamw", "muon is for the matrices of the blocks; AdamW has the rest", choices=("adamw", "muon")
    )
    steps: int = _option(200, "optimiser steps", accelerator=600, least=1)
    sequence_length: int = _option(128, "tokens per row", accelerator=1024, least=1)
    batch_size: int = _option(8, "rows per step", accelerator=16, least=1)
    learning_rate: float = _option(1e-3, "peak learning rate", accelerator=6e-4, above=0)
    final_learning_rate: float = _option(0.1, "learning rate at the end, as a share of the peak", least=0, most=1)
    warmup: float = _option(0.1, "share of the steps over which the learning rate rises", least=0, below=1)
    weight_decay: float = _option(0.1, "AdamW's decoupled weight decay, on matrices only", least=0)
    beta2: float = _option(0.95, "AdamW's second-moment decay", above=0, below=1)
    clip_norm: float = _option(1.0, "gradients are scaled down to this global norm", above=0)
    seed: int = _option(0, "seed of the initial weights and of the data order", least=0, most=2**31 - 1)

    validate_every: int = _option(100, "steps between validations", accelerator=200, least=1)
    checkpoint_every: int = _option(100, "steps between checkpoints", accelerator=200, least=1)
    out: str = _option("", "folder for results; empty: runs/train_lm, numbered if that exists")
    cache_dir: str = _option(".cache", "folder for trained tokenisers and compiled programs")

    def loss_heads(self) -> tuple[str, ...]:
        """The loss heads to train, in order; the fused one first, so that its peak memory is its own."""
        if self.head == "both":
            return ("fused", "canonical")
        return ("logits",) if self.head == "fused" and self.loss_fn != _FUSED else (self.head,)

    def without_regularisers(self) -> "TrainConfig":
        """The configuration of the validation loss, which is in nats a token."""
        return dataclasses.replace(self, z_loss_weight=0.0, label_smoothing=0.0)


_FUSED = "fused_linear_cross_entropy"

# These may differ between a run and its resumption: they change where and when things are computed and written, and no
# number by more than the rounding of sums in another order. The text itself is compared by its digest.
FREE_ON_RESUME = frozenset({"data", "out", "cache_dir", "validate_every", "checkpoint_every", "mesh"})


OPTIONS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def default_config(backend: str) -> TrainConfig:
    """The defaults for a JAX backend: a small model for `"cpu"`, a larger one for anything faster."""
    larger = {name: f.metadata["accelerator"] for name, f in OPTIONS.items() if "accelerator" in f.metadata}
    return TrainConfig() if backend == "cpu" else TrainConfig(**larger)


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file; the options of its `[train]` section, those of the loss, join the others.

    Raises:
        UsageError: if it is missing, unreadable or not TOML, or if the section is not what it should be.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the configuration file {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file {path} is not valid TOML: {error}") from None
    section = values.pop("train", {})
    if not isinstance(section, dict):
        raise UsageError(f"{path} sets train to {section!r}; it must be a section, [train]")
    known = [name for name, field in OPTIONS.items() if "section" in field.metadata]
    for name in section:
        if name not in known:
            raise UsageError(f"[train] of {path} has the unknown key {name!r}; known keys: {', '.join(known)}")
        if name in values:
            raise UsageError(f"{path} sets {name} twice, in its [train] section and outside")
    return values | section


def merge(base: TrainConfig, values: Mapping[str, Any], source: str) -> TrainConfig:
    """Returns `base` with `values` put over it.

    Args:
        base: the configuration to start from.
        values: option names to values, not yet checked.
        source: where the values come from, for error messages.

    Raises:
        UsageError: for an unknown option or a value of the wrong type.
    """
    for name in sorted(set(values) - set(OPTIONS)):
        raise UsageError(f"{source} has the unknown key {name!r}; known keys: {', '.join(OPTIONS)}")
    return dataclasses.replace(base, **{name: _typed(name, value, source) for name, value in values.items()})


def _typed(name: str, value: Any, source: str) -> Any:
    wanted = type(OPTIONS[name].default)
    # bool is an int in Python, and TOML writes 1 where 1.0 is meant: only the second is a slip to forgive.
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise UsageError(f"{source} sets {name} to {value!r}, which must be of type {wanted.__name__}")
    return value


def check(config: TrainConfig) -> None:
    """Refuses impossible values.

    Raises:
        UsageError: naming the option, its value and what would work.
    """
    for name, field in OPTIONS.items():
        value, choices = getattr(config, name), field.metadata.get("choices")
        if choices and value not in choices:
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} is {value}; it must be a finite number")
        for key, (words, holds) in _LIMITS.items():
            if key in field.metadata and not holds(value, field.metadata[key]):
                raise UsageError(f"{name} is {value}; it must be {words} {field.metadata[key]}")
    plain = (config.loss_fn, config.z_loss_weight, config.label_smoothing, config.logit_softcap) == (_FUSED, 0, 0, 0)
    if config.head != "fused" and not plain:
        raise UsageError(
            f"head is {config.head!r}, which trains the plain cross entropy of stored logits; "
            "leave loss_fn, z_loss_weight, label_smoothing and logit_softcap at their defaults, or head at 'fused'"
        )
    if config.width % config.attention_heads:
        raise UsageError(
            f"attention_heads is {config.attention_heads}, which does not divide width ({config.width}); "
            "each attention head takes an equal share of the width"
        )
    head_features = config.width // config.attention_heads
    if head_features % 2:
        raise UsageError(
            f"width / attention_heads is {config.width} / {config.attention_heads} = {head_features}, which is odd; "
            "rotary position embeddings turn pairs of features, so it must be even"
        )


def refuse_changes(stored: Mapping[str, Any], config: TrainConfig, where: str) -> None:
    """Compares the configuration that a run was started with to the one that it is resumed with.

    Args:
        stored: the earlier configuration, as a dictionary; an option that it was written before has its default.
        config: the present one.
        where: what the earlier one belongs to, for the error message.

    Raises:
        UsageError: naming the first option that differs, of those not free to change.
    """
    for name in OPTIONS:
        old, new = stored.get(name, getattr(TrainConfig, name)), getattr(config, name)
        if name not in FREE_ON_RESUME and old != new:
            raise UsageError(
                f"{where} was made with {name} = {old!r}, but now {name} = {new!r}; "
                "resume with the same value or start a new run"
            )


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML that `--config` reads back, less the folder it was written to."""
    # A JSON string, number or boolean is the same in TOML, as long as characters are not escaped as surrogates.
    lines: dict[str, list[str]] = {"": [], "train": ["", "[train]"]}
    for name, field in OPTIONS.items():
        if name != "out":
            value = json.dumps(getattr(config, name), ensure_ascii=False)
            lines[field.metadata.get("section", "")].append(f"{name} = {value}")
    return "\n".join([*lines[""], *lines["train"], ""])
