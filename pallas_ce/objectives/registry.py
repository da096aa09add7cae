"""Losses by name, for training programs that pick one from a configuration: `build_loss_fn`.

A loss is called `(logits, labels)` or `(hidden, weight, labels)`, as `register_loss` was told, and returns a scalar. An
auxiliary loss, such as a mixture of experts' load balance, is the model's own and is added outside.
"""

import dataclasses
import functools
import inspect
import numbers
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.linear_cross_entropy import linear_cross_entropy
from pallas_ce.api.linear_loss import linear_loss
from pallas_ce.api.materialized import chunked_cross_entropy, cross_entropy, mean_squared_lse
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.row import RowStatistics

LossFn = Callable[..., jax.Array]
Takes = Literal["logits", "hidden"]

_ARGUMENTS = {"logits": ("logits", "labels"), "hidden": ("hidden", "weight", "labels")}
_BUILT_IN: dict[str, tuple[LossFn, Takes]] = {
    "cross_entropy": (cross_entropy, "logits"),
    "chunked_cross_entropy": (chunked_cross_entropy, "logits"),
    "fused_linear_cross_entropy": (linear_cross_entropy, "hidden"),
}
_REGISTRY = dict(_BUILT_IN)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What a `[train]` section may say of the loss.

    Attributes:
        loss_fn: the name of a registered loss.
        ce_chunk_size: `chunk_size` of `chunked_cross_entropy`; 0 means 4096. Other losses do not read it.
        z_loss_weight: β of `β·mean(lse²)`, added to any loss; 0.0 adds no work.
        label_smoothing: α of the cross entropies.
        logit_softcap: c of the cap `c·tanh(z/c)` of the cross entropies' logits; 0.0 for none.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range.
    """

    loss_fn: str = "cross_entropy"
    ce_chunk_size: int = 0
    z_loss_weight: float = 0.0
    label_smoothing: float = 0.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        kinds = {str: str, int: numbers.Integral, float: numbers.Real}
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if not isinstance(value, kinds[kind]) or isinstance(value, bool):
                raise TypeError(f"{field.name}={checks.shown(value)} must be of type {kind.__name__}")
        checks.integer("ce_chunk_size", self.ce_chunk_size, "a positive int, or 0 for 4096", 0)
        checks.scalar("z_loss_weight", self.z_loss_weight, 0.0)
        checks.scalar("label_smoothing", self.label_smoothing, 0.0, 1.0)
        checks.scalar("logit_softcap", self.logit_softcap, 0.0)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> "LossConfig":
        """From the keys and values of a `[train]` section, or of a document that has one.

        Args:
            values: names of fields to values. In a document, keys outside of the section are the program's own.
            source: where they come from, for error messages.

        Raises:
            ValueError: an unknown key, one of these outside the section, or a value out of range.
            TypeError: a value of the wrong type.
        """
        known = list(cls.__dataclass_fields__)
        if "train" in values:
            if outside := [name for name in known if name in values]:
                raise ValueError(f"{source} sets {outside[0]} outside its section [train]; move it there")
            values, source = values["train"], f"[train] of {source}"
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} is {checks.shown(values)}; it must be a section of keys and values")
        if unknown := [name for name in values if name not in known]:
            raise ValueError(f"{source} has the unknown key {unknown[0]!r}; known keys: {', '.join(known)}")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{source}: {error}") from None

    @classmethod
    def from_toml(cls, path: str | Path) -> "LossConfig":
        """From the `[train]` section of a TOML file; a file without one has every default.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not TOML, or as `from_mapping`.
            TypeError: a value of the wrong type.
        """
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} is no file; for a loss by its name pass {{'loss_fn': {str(path)!r}}}")
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (RecursionError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as TOML: {error}") from error
        sections = (name for name, x in document.items() if isinstance(x, dict) and "loss_fn" in x)
        if "train" not in document and (other := next(sections, None)):
            raise ValueError(f"{path} sets loss_fn in its section [{other}] and has no section [train]; move it there")
        return cls.from_mapping({"train": {}} | document, str(path))


def loss_names() -> tuple[str, ...]:
    """The names of the registered losses, in the order of their registration."""
    return tuple(_REGISTRY)


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
    checks.choice("takes", takes, tuple(_ARGUMENTS))
    called = _ARGUMENTS[takes]
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} must be a non-empty string")
    if name in _REGISTRY:
        raise ValueError(f"name={name!r} is taken; registered are {', '.join(_REGISTRY)}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} must be a function of {', '.join(called)}")
    try:
        named = list(inspect.signature(loss_fn).bind(*called).arguments)
    except ValueError:  # a callable that is not written in Python may have no signature
        named = []
    except TypeError as error:
        raise TypeError(
            f"loss_fn={loss_fn!r} cannot be called ({', '.join(called)}), as {takes=} says: {error}"
        ) from None
    if any(own != given and own in called for own, given in zip(named, called, strict=False)):
        raise TypeError(
            f"loss_fn={loss_fn!r} takes {', '.join(named)}; with {takes=} it is called ({', '.join(called)})"
        )
    _REGISTRY[name] = (loss_fn, takes)


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
            section. A training program's own keys stand outside of the section.

    Returns:
        The loss function.

    Raises:
        ValueError: an unknown loss or key, naming the known ones; a value out of range; label smoothing or a soft cap
            for a loss that does not read it; a file that is not TOML.
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
    name, z_loss = config.loss_fn, config.z_loss_weight
    if name not in _REGISTRY:
        raise ValueError(f"loss_fn={name!r} is unknown; registered are {', '.join(_REGISTRY)}")
    loss_fn, takes = _REGISTRY[name]
    smoothing, softcap = config.label_smoothing, config.logit_softcap
    if name in _BUILT_IN:
        chunks = {"chunk_size": config.ce_chunk_size} if name == "chunked_cross_entropy" else {}
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "logit_softcap": softcap or None}
        return functools.partial(loss_fn, **options, **chunks)
    for option, value in {"label_smoothing": smoothing, "logit_softcap": softcap}.items():
        if value:
            raise ValueError(f"{option}={value} is not read by loss_fn={name!r}, a loss of your own: leave it at 0.0")
    return _with_z_loss(name, loss_fn, takes, z_loss) if z_loss else loss_fn


def _with_z_loss(called: str, loss_fn: LossFn, takes: Takes, z_weight: float) -> LossFn:
    """The loss with `z_weight·mean(lse²)` added, the mean over the labels that count."""
    z_term = mean_squared_lse if takes == "logits" else functools.partial(linear_loss, _squared_lse)
    known = inspect.signature(z_term).parameters

    @functools.wraps(loss_fn)
    def with_z_loss(*arrays: Any, **options: Any) -> jax.Array:
        for name in ("token_weights", "class_weights", "normalizer", "reduction"):
            if name in options:
                raise ValueError(
                    f"{name} at a call of a registered loss with z_loss_weight={z_weight}, which adds a plain mean: "
                    "make the z-loss part of the loss, and leave z_loss_weight at 0.0"
                )
        # The options that say which logits and labels there are.
        of_z = {name: value for name, value in options.items() if name in known}
        loss = loss_fn(*arrays, **options)
        if jnp.shape(loss):
            raise ValueError(f"loss_fn={called!r} returned the shape {jnp.shape(loss)}; a registered loss is a scalar")
        return loss + z_weight * z_term(*arrays, **of_z)

    return with_z_loss


# One function for all, which JAX traces once.
def _squared_lse(row: RowStatistics) -> Any:
    return present(row.lse) ** 2
