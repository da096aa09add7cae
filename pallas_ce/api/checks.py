"""Checks of the public functions' arguments. Each error names the argument, its value and what would work."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.protocol import Backward
from pallas_ce.statistics import labels as label_rule
from pallas_ce.statistics.cross_entropy import Reduction
from pallas_ce.statistics.row import STATISTICS, needs_labels

# What a call takes as an array: one of JAX or NumPy, a number, or nested lists of these at run time. Signatures print
# the name of a `type` alias; for JAX's own they print every member.
type ArrayLike = jax.typing.ArrayLike
type DTypeLike = jax.typing.DTypeLike

# Between these all that is made of float32 logits of ±1e4 stays finite, values and gradients: a logit over T is then at
# most 1e9, which is rounded to multiples of 64, so that probabilities beside a rounded log-sum-exp cannot overflow;
# 1/T does not underflow, nor does a soft cap over T leave float32's range.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = (float(np.float32(x)) for x in (1e-5, 1e30))  # as arrays of float32 have them
_TEMPERATURES = f"{_LEAST_TEMPERATURE:g} and {_MOST_TEMPERATURE:g}"  # torch.compile takes no number into a text


def shown(value: Any) -> str:
    """`repr(value)` for an error message: shortened where it is long, and of values whose `repr` fails too."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an int of more digits than Python prints
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:100]}…"


def no_tensor(name: str, value: Any) -> None:
    """Refuses PyTorch's tensors, and sequences of them, which NumPy would read without their gradients."""
    if any(map(_is_tensor, jax.tree.leaves(value))):
        has = "is" if _is_tensor(value) else "holds"
        raise TypeError(
            f"{name} {has} a torch.Tensor: torch_bridge has these functions for tensors, with gradients, and to_jax, "
            "which makes an array on a tensor's memory"
        )


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array."""
    no_tensor(name, value)
    if isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be one array")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} is a {type(value).__name__} that JAX cannot read as an array: {error}") from error


def known_sizes(name: str, value: Any, instead: str) -> None:
    """Refuses sizes that only a run tells, as `jax.export` has them; `instead` serves these."""
    if not all(isinstance(size, int) for size in value.shape):
        raise ValueError(
            f"{name} has shape {value.shape}, but blocks are planned for known sizes: export a fixed batch, and fill "
            f"it up with rows whose label is ignore_index (-100 by default), or take {instead}"
        )


def ids(name: str, value: Any) -> np.ndarray | jax.Array:
    """`value` as an array, one of NumPy if JAX does not hold it: JAX would cut 64-bit integers before they are read."""
    no_tensor(name, value)
    held = any(isinstance(x, jax.Array) or hasattr(x, "__jax_array__") for x in jax.tree.leaves(value))
    try:
        values = None if held else np.asarray(value)
    except (TypeError, ValueError):
        values = None
    return array(name, value) if values is None or not jnp.issubdtype(values.dtype, jnp.integer) else values


def integer(name: str, value: Any, words: str, least: int, most: float = float("inf")) -> int:
    """`value` as an int between `least` and `most`, which is what the `words` say."""
    if not is_int(value) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be {words}")
    return int(value)


def count(name: str, value: Any, most: int, in_words: str) -> int:
    """`value` as an int between 1 and `most`, which is `in_words`."""
    return integer(name, value, f"an int between 1 and {in_words}", 1, most)


def choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """One of the known names."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(map(repr, known))}")


def is_int(value: Any) -> bool:
    """Whether it is an int of Python or NumPy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def labels(
    value: Any,
    leading: tuple[int, ...],
    vocab_size: int,
    ignore_index: int | None,
    validate: bool,
    of: str = "hidden's",
    several: bool = False,
    shift: int = 0,
) -> jax.Array:
    """Integers (not bool), one for each token, or `several`; with `validate`, their values are checked too.

    Each row's is then `shift` positions later.
    """
    labels = ids("labels", value)
    one_hot = labels.shape == (*leading, vocab_size)
    integers("labels", labels, one_hot * "; of class probabilities take labels.argmax(-1)")
    many = several and labels.ndim == len(leading) + 1 and labels.shape[-1] > 0
    if labels.shape[: -1 if many else None] != leading:
        either = ", or that with K >= 1 labels for each row behind it," if several else ""
        order = "; arguments come as hidden, weight, labels" if of == "hidden's" else ""
        raise ValueError(f"labels have shape {labels.shape}; {of} leading shape {leading}{either} is needed{order}")
    if validate:
        label_rule.check(labels, ignore_index, vocab_size, shift=shift, axis=len(leading) - 1)
    return label_rule.as_array(labels)


def integers(name: str, value: Any, hint: str = "") -> np.ndarray | jax.Array:
    """`ids` of an integer dtype; the `hint` goes behind the error."""
    values = ids(name, value)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(
            f"{name} {'have' if name[-1] == 's' else 'has'} dtype {values.dtype}; integers are needed{hint}"
        )
    return values


def shift(value: Any, labels: Any | None, leading: tuple[int, ...]) -> int:
    """By how many positions labels lie behind the rows that predict them."""
    value = integer("shift", value, "an int, at least 0: 1 where the next token is the label", 0)
    if value and labels is None:
        raise ValueError(f"shift={value} needs labels, which is None")
    if value and not leading:
        raise ValueError(f"shift={value} needs an axis of positions; hidden is a single row [H]")
    return value


def scratch(scratch_bytes: Any) -> int | None:
    """`scratch_bytes` as an int or None."""
    if scratch_bytes is None:
        return None
    return integer("scratch_bytes", scratch_bytes, "a positive int, or None for the default", 1)


def ignored(ignore_index: Any) -> int | None:
    """`ignore_index` as an int or None."""
    if ignore_index is None:
        return None
    if not is_int(ignore_index):
        raise TypeError(f"ignore_index={ignore_index!r} must be a Python int, or None where no label is special")
    return int(ignore_index)


def shaped(
    name: str, value: Any | None, shape: tuple[int, ...], of: str = "hidden's leading shape"
) -> jax.Array | None:
    """`value` as a real array of the `shape` that errors say is `of` something; None stays None."""
    if value is None:
        return None
    values = _real(name, array(name, value))
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}; {of} {shape} is needed")
    return values


def _real[T: Any](name: str, values: T) -> T:
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise TypeError(f"{name} has dtype {values.dtype}; it must be real")
    return values


def mask(name: str, value: Any | None, shape: tuple[int, ...], of: str = "hidden's leading shape") -> jax.Array | None:
    """`shaped`, of booleans only: an integer or floating array is as likely to hold weights or labels as a mask."""
    given = shaped(name, value, shape, of)
    if given is not None and given.dtype != jnp.bool:
        raise TypeError(f"{name} has dtype {given.dtype}; it must be bool: pass {name} != 0")
    return given


def floating(name: str, value: Any) -> jax.Array:
    """`value` as an array of a floating dtype."""
    values = array(name, value)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {values.dtype}; it must be a floating dtype")
    return values


def temperature(value: Any, leading: tuple[int, ...], zero: bool = False) -> float | jax.Array:
    """A positive number, or a floating array `[]` or with one entry for each token; with `zero`, 0 too."""
    words = f"{'0, or ' if zero else ''}between {_TEMPERATURES}"
    return _scalar_or_by_row("temperature", value, leading, _LEAST_TEMPERATURE, _MOST_TEMPERATURE, zero, words)


def share(name: str, value: Any | None, leading: tuple[int, ...], zero: bool = False) -> jax.Array | None:
    """A number above 0 (with `zero`, at least 0) and at most 1, or a floating array of them, `[]` or one by token.

    None stands for 1, with `zero` for 0.
    """
    if value is None or is_known(value, 0.0 if zero else 1.0):
        return None
    words = f"{'at least' if zero else 'above'} 0 and at most 1"
    return jnp.asarray(_scalar_or_by_row(name, value, leading, sys.float_info.min, 1.0, zero, words))


def _scalar_or_by_row(
    name: str, value: Any, leading: tuple[int, ...], low: float, high: float, zero: bool, words: str
) -> float | jax.Array:
    """From `low` to `high`, or with `zero` 0. The range of an array is checked only where that costs no transfer."""
    number, many = is_plain(value) and not isinstance(value, bool), isinstance(value, np.ndarray)
    if number or (many and jnp.issubdtype(value.dtype, np.floating)):
        x: Any = np.asarray(value, np.float64) if many else value if isinstance(value, int) else float(value)
        fits = (x >= low) & (x <= high) | (zero & (x == 0))
        if not (fits.all() if many else fits):
            first = x[~fits].flat[0] if many else value
            raise ValueError(f"{name}={shown(first) if isinstance(first, int) else f'{first:g}'} must be {words}")
        if number:
            return float(value)
    values = floating(name, value)
    if values.shape not in ((), leading):
        raise ValueError(
            f"{name} has shape {values.shape}; it must be a scalar or have hidden's leading shape {leading}"
        )
    return values


def check_reduction(reduction: str, normalizer: Any, backward: str = "auto") -> None:
    """Known names, and a reduction, normalizer and backward mode that go together."""
    choice("reduction", reduction, get_args(Reduction))
    choice("backward", backward, get_args(Backward))
    if reduction == "none" and backward == "in_forward":
        raise ValueError(
            "backward='in_forward' needs a scalar loss, and reduction='none' returns one loss for each token: "
            "choose reduction='mean' or 'sum', or backward='recompute'"
        )
    if normalizer is not None and reduction != "mean":
        raise ValueError(f"normalizer is given with reduction={reduction!r}; only reduction='mean' divides by it")


def scalar(
    name: str, value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max, *, words: str = ""
) -> Any:
    """A scalar that may be an array or traced; a plain number, whose range is checked, as a float.

    JAX would take an int for one of 32 bits. The range of an array is not checked: that would cost a transfer. `words`
    say what a number must be, by default from its range.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if is_plain(value):
        if not low <= (value if isinstance(value, int) else float(value)) <= high:  # no float holds every int
            least = "" if low == -sys.float_info.max else f", at least {low:g}"
            bounds = f"between {low:g} and {high:g}" if high < sys.float_info.max else f"a finite number{least}"
            raise ValueError(f"{name}={shown(value)} must be {words or bounds}")
        return float(value)
    if value is None:
        raise TypeError(f"{name} is None; it must be a number or a scalar array")
    no_tensor(name, value)
    if not hasattr(value, "shape"):
        value = array(name, value)
    if value.shape != ():
        raise ValueError(f"{name} has shape {value.shape}; it must be a scalar")
    return _real(name, value)


def above_zero(name: str, value: Any) -> Any:
    """`scalar`, and a plain number must be above 0."""
    return scalar(name, value, math.ulp(0.0), words="above 0, and finite")


def static(name: str, value: Any, low: float, high: float, *, words: str) -> float:
    """A number from `low` to `high`, whose value is known when it is traced."""
    if isinstance(value, jax.core.Tracer) or _is_tensor(value):
        what = "torch.Tensor" if _is_tensor(value) else "traced value"
        raise TypeError(f"{name} must be a Python number, not a {what}: it shapes the compiled program")
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be {words}")
    return scalar(name, float(scalar(name, value, low, high, words=words)), low, high, words=words)


def beta(value: Any) -> float:
    """β of the Jensen-Shannon divergence."""
    words = "strictly between 0 and 1; for the ends choose divergence='forward_kl' (0) or 'reverse_kl' (1)"
    return static("beta", value, math.ulp(0.0), math.nextafter(1.0, 0.0), words=words)


def normalizer(value: Any | None) -> Any | None:
    """What a mean divides by: `scalar`, and a plain number must be at least 0. None stays None."""
    return None if value is None else scalar("normalizer", value, 0.0)


def is_plain(value: Any) -> bool:
    """Whether it is a real number of Python or NumPy."""
    return isinstance(value, int | float | np.integer | np.floating)


def key(value: Any) -> Any:
    """One of JAX's random keys."""
    dtype, ndim = getattr(value, "dtype", None), getattr(value, "ndim", None)
    if dtype is not None:
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and ndim == 0
        if typed or (dtype == jnp.uint32 and ndim == 1):
            return value
    described = type(value).__name__ if dtype is None else f"{dtype}{list(value.shape)}"
    raise TypeError(f"key is {described}; it must be one key, such as jax.random.key(0) (for several, use jax.vmap)")


def is_known(value: Any, constant: float) -> bool:
    """Whether a scalar is a Python or NumPy number of just that value: then its term is left out when compiling."""
    return is_plain(value) and float(value) == constant


def sequence_of_names(argument: str, names: Any) -> tuple[str, ...]:
    """`names` without repetitions; a string is refused, since it would be taken letter by letter."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        example = names if isinstance(names, str) else "…"
        raise TypeError(f"{argument}={names!r} must be a sequence of names, such as ({example!r},)")
    return tuple(dict.fromkeys(names))


def check_statistics(names: Any, labels: Any | None) -> tuple[str, ...]:
    """`statistics` as a tuple of known names that can be had."""
    names = sequence_of_names("statistics", names)
    if not names:
        raise ValueError(f"statistics is empty; choose from {STATISTICS}")
    for name in names:
        if name not in STATISTICS:
            raise ValueError(f"statistics names {name!r}, which is unknown; choose from {STATISTICS}")
        if labels is None and needs_labels(name):
            raise ValueError(f"statistics names {name!r}, which needs labels; labels is None")
    return names
