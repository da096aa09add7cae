"""Losses by name, for training programs that pick one from a configuration: `build_loss_fn`.

A loss is called `(logits, labels)` or `(hidden, weight, labels)`, which its entry says, and returns a scalar. An
auxiliary loss, such as a mixture of experts' load balance, is the model's own and is added outside.
"""

import dataclasses
import functools
import numbers
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_ce.api import checks as arguments
from pallas_ce.api.linear_cross_entropy import linear_cross_entropy
from pallas_ce.api.linear_loss import linear_loss
from pallas_ce.api.materialized import chunked_cross_entropy, cross_entropy, mean_squared_lse
from pallas_ce.statistics.row import RowStatistics

LossFn = Callable[..., jax.Array]
Takes = Literal["logits", "hidden"]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What a `[train]` section may say of the loss.

    Attributes:
        loss_fn: the name of a registered loss.
        ce_chunk_size: `chunk_size` of `chunked_cross_entropy`; 0 means 4096. Other losses do not read it.
        z_loss_weight: β of `β·mean(lse²)`, added to any loss; 0.0 adds no work.
        label_smoothing: α of the cross entropies.
    """

    loss_fn: str = "cross_entropy"
    ce_chunk_size: int = 0
    z_loss_weight: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_types(vars(self), "LossConfig")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> "LossConfig":
        """From the keys and values of a `[train]` section, or of a document that has one.

        Args:
            values: names of fields to values.
            source: where they come from, for error messages.

        Raises:
            ValueError: an unknown key, naming the known ones.
            TypeError: a value of the wrong type.
        """
        if isinstance(section := values.get("train"), Mapping):
            values = section
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise ValueError(f"{source} has the unknown key {unknown[0]!r}; known keys: {', '.join(known)}")
        _check_types(values, source)
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path) -> "LossConfig":
        """From the `[train]` section of a TOML file; a file without one has every default.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not TOML, `train` is no section, or it has an unknown key.
            TypeError: a value of the wrong type.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("train", {})
        except RecursionError:
            raise ValueError(f"{path} holds values too deeply nested to be read; [train] needs none that are") from None
        if not isinstance(values, Mapping):
            raise ValueError(f"{path} sets train to {arguments.shown(values)}; it must be a section, [train]")
        return cls.from_mapping(values, f"[train] of {path}")


def _check_types(values: Mapping[str, Any], source: str) -> None:
    types = typing.get_type_hints(LossConfig)
    kinds = {int: numbers.Integral, float: numbers.Real}
    for name, value in values.items():
        if not isinstance(value, kinds.get(types[name], types[name])) or isinstance(value, bool):
            raise TypeError(
                f"{source} sets {name} to {arguments.shown(value)}, which must be of type {types[name].__name__}"
            )


@dataclasses.dataclass(frozen=True)
class LossEntry:
    """A registered loss.

    Attributes:
        build: makes the loss from a configuration.
        takes: "logits" where it is called `(logits, labels)`, "hidden" where `(hidden, weight, labels)`.
        reads_options: whether what `build` makes has label smoothing and z-loss in it.
    """

    build: Callable[[LossConfig], LossFn]
    takes: Takes
    reads_options: bool = False


def _options(config: LossConfig) -> dict[str, Any]:
    return {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss_weight}


_REGISTRY: dict[str, LossEntry] = {
    "cross_entropy": LossEntry(
        lambda config: functools.partial(cross_entropy, **_options(config)), "logits", reads_options=True
    ),
    "chunked_cross_entropy": LossEntry(
        lambda config: functools.partial(chunked_cross_entropy, chunk_size=config.ce_chunk_size, **_options(config)),
        "logits",
        reads_options=True,
    ),
    "fused_linear_cross_entropy": LossEntry(
        lambda config: functools.partial(linear_cross_entropy, **_options(config)), "hidden", reads_options=True
    ),
}


def loss_names() -> tuple[str, ...]:
    """The names of the registered losses, in the order of their registration."""
    return tuple(_REGISTRY)


def loss_entry(name: str) -> LossEntry:
    """The entry of that name.

    Raises:
        ValueError: no loss has that name; it lists those there are.
    """
    if name not in _REGISTRY:
        raise ValueError(f"loss_fn={name!r} is unknown; registered are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def register_loss(name: str, loss_fn: LossFn, *, takes: Takes = "logits") -> None:
    """Makes `loss_fn` available to `build_loss_fn` under `name`.

    Args:
        name: what `loss_fn = "…"` will say.
        loss_fn: `(logits, labels)` or `(hidden, weight, labels)` to a scalar; it decides itself which labels count.
        takes: "logits" or "hidden", which of the two it is called with.

    Raises:
        ValueError: the name is taken, or `takes` is unknown.
        TypeError: `name` is no string or `loss_fn` no function.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce import build_loss_fn, register_loss
        >>> def squared_error(logits, labels):
        ...     return jnp.mean((jnp.argmax(logits, -1) - labels) ** 2.0)
        >>> register_loss("squared_error", squared_error)
        >>> print(build_loss_fn({"loss_fn": "squared_error"})(jnp.eye(3), jnp.array([0, 1, 1])))
        0.33333334
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} must be a non-empty string")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} must be a function of {_SIGNATURES.get(takes, 'logits and labels')}")
    if takes not in _SIGNATURES:
        raise ValueError(
            f"takes={takes!r} must be 'logits', for (logits, labels), or 'hidden', for {_SIGNATURES['hidden']}"
        )
    if name in _REGISTRY:
        raise ValueError(f"name={name!r} is taken; registered are {', '.join(_REGISTRY)}")
    _REGISTRY[name] = LossEntry(lambda config: loss_fn, takes)


_SIGNATURES = {"logits": "(logits, labels)", "hidden": "(hidden, weight, labels)"}


def build_loss_fn(config: LossConfig | Mapping[str, Any] | str | Path) -> LossFn:
    """The loss that a configuration names, with its z-loss.

    Built in are `cross_entropy` and `chunked_cross_entropy`, called `(logits, labels)`, and
    `fused_linear_cross_entropy`, called `(hidden, weight, labels)`, which is `linear_cross_entropy`. Further options of
    those functions may be given at the call (`vocab_axis=1`, say). Each returns the mean over the labels that count,
    which those of -100 do not, and 0.0 where none does. A z-loss is a term of these; to a loss of the user's own,
    `z_loss_weight·mean(lse²)` is added, in one more pass over its logits: over the same labels of the same head, by the
    options that say which (`ignore_index`, `vocab_size`, `bias`, …); options that weigh tokens are refused.

    Args:
        config: a `LossConfig`, a mapping with (some of) its fields, or the path of a TOML file with a `[train]`
            section.

    Returns:
        The loss function.

    Raises:
        ValueError: an unknown loss or key, naming the known ones; a value out of range; label smoothing for a loss
            that does not read it.
        TypeError: a value of the wrong type.
        OSError: the file cannot be read.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce import build_loss_fn
        >>> loss_fn = build_loss_fn({"loss_fn": "chunked_cross_entropy", "z_loss_weight": 1e-4})
        >>> print(loss_fn(jnp.zeros((4, 8)), jnp.array([0, 1, 2, -100])))
        2.079874
    """
    if isinstance(config, str | Path):
        config = LossConfig.from_toml(config)
    elif isinstance(config, Mapping):
        config = LossConfig.from_mapping(config)
    elif not isinstance(config, LossConfig):
        raise TypeError(f"config={config!r} must be a LossConfig, a mapping or the path of a TOML file")
    entry = loss_entry(config.loss_fn)
    _check(config)
    loss_fn = entry.build(config)
    if entry.reads_options:
        return loss_fn
    if config.label_smoothing:
        raise ValueError(
            f"label_smoothing={config.label_smoothing} is not read by loss_fn={config.loss_fn!r}, a loss of your own: "
            "smooth in it, and leave the option at 0.0"
        )
    return _with_z_loss(loss_fn, entry.takes, config.z_loss_weight) if config.z_loss_weight else loss_fn


def _check(config: LossConfig) -> None:
    arguments.chunk("ce_chunk_size", config.ce_chunk_size)
    arguments.scalar("label_smoothing", config.label_smoothing, 0.0, 1.0)
    arguments.scalar("z_loss_weight", config.z_loss_weight, 0.0)


# Options of a call that say which logits and labels there are, by what a loss takes, and those that weigh tokens.
_WHICH: dict[Takes, frozenset[str]] = {
    "logits": frozenset({"ignore_index", "logit_softcap", "vocab_size"}),
    "hidden": frozenset(
        {"ignore_index", "row_mask", "bias", "vocab_axis", "vocab_size", "logit_softcap", "logit_scale", "temperature"}
        | {"dtype", "implementation", "scratch_bytes", "mesh_axes"}
    ),
}
_WEIGHING = ("token_weights", "class_weights", "normalizer", "reduction")


def _with_z_loss(loss_fn: LossFn, takes: Takes, z_weight: float) -> LossFn:
    """`loss_fn` with `z_weight·mean(lse²)` added, the mean over the labels that count."""

    def of_z(options: dict[str, Any]) -> dict[str, Any]:
        if weighing := [name for name in _WEIGHING if name in options]:
            raise ValueError(
                f"{weighing[0]} at a call of a registered loss with z_loss_weight={z_weight}: the z-loss that is added "
                "is a plain mean; make it part of the loss, and leave z_loss_weight at 0.0"
            )
        return {name: value for name, value in options.items() if name in _WHICH[takes]}

    def from_logits(logits: Any, labels: Any, **options: Any) -> jax.Array:
        return loss_fn(logits, labels, **options) + z_weight * mean_squared_lse(logits, labels, **of_z(options))

    def from_hidden(hidden: Any, weight: Any, labels: Any, **options: Any) -> jax.Array:
        z_part = linear_loss(_squared_lse, hidden, weight, labels, **of_z(options))
        return loss_fn(hidden, weight, labels, **options) + z_weight * z_part

    return functools.wraps(loss_fn)(from_logits if takes == "logits" else from_hidden)


def _squared_lse(row: RowStatistics) -> jax.Array:
    assert row.lse is not None
    return jnp.square(row.lse)
