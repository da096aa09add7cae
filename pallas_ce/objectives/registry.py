"""Losses by name, for training programs that pick one from a configuration: `build_loss_fn`.

A loss is called `(logits, labels)` or `(hidden, weight, labels)`, which its entry says, and returns a scalar. An
auxiliary loss, such as a mixture of experts' load balance, is the model's own and is added outside.
"""

import dataclasses
import difflib
import functools
import inspect
import numbers
import tomllib
import typing
import warnings
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
        logit_softcap: c of the cap `c·tanh(z/c)` of the cross entropies' logits; 0.0 for none.
    """

    loss_fn: str = "cross_entropy"
    ce_chunk_size: int = 0
    z_loss_weight: float = 0.0
    label_smoothing: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        _check_types(vars(self), "LossConfig")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> "LossConfig":
        """From the keys and values of a `[train]` section, or of a document that has one.

        Other keys of the section are the training program's own: they are left alone, with a warning that names them.

        Args:
            values: names of fields to values.
            source: where they come from, for error messages.

        Raises:
            ValueError: a key that looks like a misspelt one of these, or one of these outside the section.
            TypeError: a value of the wrong type.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if isinstance(section := values.get("train"), Mapping):
            if outside := [name for name in values if name in known]:
                raise ValueError(f"{source} sets {outside[0]} outside its section [train]; move it there")
            values, source = section, f"[train] of {source}"
        others = [str(name) for name in values if name not in known]
        for name in others:
            begun = [key for key in known if key.startswith(name)]
            if meant := begun or difflib.get_close_matches(name, known, n=1, cutoff=0.7):
                raise ValueError(
                    f"{source} has the unknown key {name!r}; is {meant[0]!r} meant? known keys: {', '.join(known)}"
                )
        if others:
            warnings.warn(
                f"{source} has keys that are not the loss's, and that it does not heed: {', '.join(others)}; it reads "
                f"{', '.join(known)}",
                stacklevel=2,
            )
        mine = {name: value for name, value in values.items() if name in known}
        _check_types(mine, source)
        return cls(**mine)

    @classmethod
    def from_toml(cls, path: str | Path) -> "LossConfig":
        """From the `[train]` section of a TOML file; a file without one has every default.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not TOML, `train` is no section, or as `from_mapping`.
            TypeError: a value of the wrong type.
        """
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError(f"{path} holds values too deeply nested to be read; [train] needs none that are") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        section = document.setdefault("train", {})
        if not isinstance(section, Mapping):
            raise ValueError(f"{path} sets train to {arguments.shown(section)}; it must be a section, [train]")
        return cls.from_mapping(document, str(path))


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
        loss_fn: the loss.
        takes: "logits" where it is called `(logits, labels)`, "hidden" where `(hidden, weight, labels)`.
        options: what it takes from a configuration, by name; None where the loss is a user's own, which takes nothing.
    """

    loss_fn: LossFn
    takes: Takes
    options: Callable[[LossConfig], dict[str, Any]] | None = None


def _options(config: LossConfig) -> dict[str, Any]:
    return {
        "label_smoothing": config.label_smoothing,
        "z_loss": config.z_loss_weight,
        "logit_softcap": config.logit_softcap or None,
    }


def _chunked_options(config: LossConfig) -> dict[str, Any]:
    return {"chunk_size": config.ce_chunk_size, **_options(config)}


_REGISTRY: dict[str, LossEntry] = {
    "cross_entropy": LossEntry(cross_entropy, "logits", _options),
    "chunked_cross_entropy": LossEntry(chunked_cross_entropy, "logits", _chunked_options),
    "fused_linear_cross_entropy": LossEntry(linear_cross_entropy, "hidden", _options),
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
        TypeError: `name` is no string, `loss_fn` no function, or one that cannot be called so or, by the names
            of its arguments, in another order.

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
    _check_order(loss_fn, takes)
    _REGISTRY[name] = LossEntry(loss_fn, takes)


_SIGNATURES = {"logits": "(logits, labels)", "hidden": "(hidden, weight, labels)"}

# What losses elsewhere call the same arrays.
_SYNONYMS = {"label": "labels", "target": "labels", "targets": "labels", "y_true": "labels", "y_pred": "logits"}


def _check_order(loss_fn: LossFn, takes: Takes) -> None:
    """Raises TypeError for a function that cannot be called as its kind is, or whose names tell of another order."""
    called = _SIGNATURES[takes].strip("()").split(", ")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a callable that is not written in Python may have none
        return
    try:
        bound = list(signature.bind(*called).arguments)
    except TypeError as error:
        raise TypeError(
            f"loss_fn{signature} cannot be called {_SIGNATURES[takes]}, as takes={takes!r} says: {error}"
        ) from error
    for position, name in zip(called, bound, strict=False):
        if (meant := _SYNONYMS.get(name, name)) != position and meant in ("logits", "hidden", "weight", "labels"):
            raise TypeError(
                f"loss_fn{signature} would be given {position} as its argument {name!r}: with takes={takes!r} it is "
                f"called {_SIGNATURES[takes]}, in this order"
            )


def build_loss_fn(config: LossConfig | Mapping[str, Any] | str | Path) -> LossFn:
    """The loss that a configuration names, with its z-loss.

    Built in are `cross_entropy` and `chunked_cross_entropy`, called `(logits, labels)`, and
    `fused_linear_cross_entropy`, called `(hidden, weight, labels)`, which is `linear_cross_entropy`. Further options of
    those functions may be given at the call (`vocab_axis=1`, say). Each returns the mean over the labels that count,
    which labels of -100 do not, and 0.0 where none does. A z-loss is a term of these. To a loss of the user's own,
    `z_loss_weight·mean(lse²)` is added, in one more pass over its logits, with its options for labels and head
    (`ignore_index`, `vocab_size`, `bias`, …); options that weigh tokens are refused.

    Args:
        config: a `LossConfig`, a mapping with (some of) its fields, or the path of a TOML file with a `[train]`
            section. A training program's own keys may stand beside them; a warning names them.

    Returns:
        The loss function.

    Raises:
        ValueError: an unknown loss or a misspelt key, naming the known ones; a value out of range; label smoothing or a
            soft cap for a loss that does not read it; a file that is not TOML.
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
    arguments.chunk("ce_chunk_size", config.ce_chunk_size)
    arguments.scalar("label_smoothing", config.label_smoothing, 0.0, 1.0)
    arguments.scalar("z_loss_weight", config.z_loss_weight, 0.0)
    arguments.scalar("logit_softcap", config.logit_softcap, 0.0)
    if entry.options is not None:
        return functools.partial(entry.loss_fn, **entry.options(config))
    for name in ("label_smoothing", "logit_softcap"):
        if value := getattr(config, name):
            raise ValueError(
                f"{name}={value} is not read by loss_fn={config.loss_fn!r}, a loss of your own: apply it there, and "
                "leave the option at 0.0"
            )
    return _with_z_loss(entry, config.z_loss_weight) if config.z_loss_weight else entry.loss_fn


# Options of a call that weigh tokens.
_WEIGHING = ("token_weights", "class_weights", "normalizer", "reduction")


def _with_z_loss(entry: LossEntry, z_weight: float) -> LossFn:
    """The loss with `z_weight·mean(lse²)` added, the mean over the labels that count."""
    z_term = mean_squared_lse if entry.takes == "logits" else functools.partial(linear_loss, _squared_lse)
    known = inspect.signature(z_term).parameters

    @functools.wraps(entry.loss_fn)
    def with_z_loss(*arrays: Any, **options: Any) -> jax.Array:
        if weighing := [name for name in _WEIGHING if name in options]:
            raise ValueError(
                f"{weighing[0]} at a call of a registered loss with z_loss_weight={z_weight}: the z-loss that is added "
                "is a plain mean; make it part of the loss, and leave z_loss_weight at 0.0"
            )
        # The options that say which logits and labels there are.
        of_z = {name: value for name, value in options.items() if name in known}
        return entry.loss_fn(*arrays, **options) + z_weight * z_term(*arrays, **of_z)

    return with_z_loss


def _squared_lse(row: RowStatistics) -> jax.Array:
    assert row.lse is not None
    return jnp.square(row.lse)
