"""How a head, its weight and its products' precision are read: into the static facts that all below works with."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from pallas_ce.api import checks
from pallas_ce.head import HeadSpec, common_dtype

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_SUPPORTED = "supported are bfloat16, float16, float32 and float64"

# Within these a soft cap over the least and most temperature stays in float32's range; see `checks.temperature`.
_CAPS = [1e-8, 1e33]
_CAP = f"a finite number above 0, or None for no cap; it lies outside {_CAPS}, where caps over temperatures fit float32"

# What a call takes as a precision. Signatures print the alias's name.
type PrecisionLike = str | Precision | DotAlgorithmPreset

_LEVELS = ("default", "high", "highest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32", "fastest")
_8_BITS = "ANY_F8"  # what presets for 8-bit operands begin with
_PRECISIONS: dict[str, Precision | DotAlgorithmPreset] = {name: Precision(name) for name in _LEVELS}
_PRECISIONS |= {name: x for name, x in DotAlgorithmPreset.__members__.items() if not name.startswith(_8_BITS)}

# The algorithm of a product of operands of these dtypes by default.
_ITSELF = {
    np.dtype(jnp.bfloat16): DotAlgorithmPreset.BF16_BF16_F32,
    np.dtype(np.float16): DotAlgorithmPreset.F16_F16_F32,
    np.dtype(np.float64): DotAlgorithmPreset.F64_F64_F64,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """Stands for `weight + scale · up · down` as a head's weight; a pytree.

    Logits are `hidden·weight + scale·(hidden·down)·up`: not even a tile of the sum is made, nor a gradient of its size.
    With the weight frozen a loss with gradients takes two large products in place of three (of a weight trained with
    it, three), and beside the gradients of `up` and `down` a few numbers for each row and column. A gradient has this
    structure too; to freeze the weight, differentiate `up` and `down` alone, as below.

    `up` and `down` may have another dtype than the weight, float32 beside bfloat16, say. They are multiplied in the
    call's compute dtype, which does not depend on theirs, and their gradients have theirs.

    Attributes:
        weight: `[V', H]`, or `[H, V']` with `vocab_axis=1`.
        up: `[V', r]`, or `[r, V']`: LoRA's B.
        down: `[r, H]`, or `[H, r]`: LoRA's A. Inside a `shard_map` `up` has the part of the vocabulary that the weight
            has, and `down` is whole.
        scale: LoRA's α/r, a Python number; to train or trace one, multiply `up` by it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import LowRank, linear_cross_entropy
        >>> hidden, weight = jnp.ones((6, 8)), jnp.ones((100, 8))
        >>> up, down = jnp.zeros((100, 2)), jax.random.normal(jax.random.key(0), (2, 8))
        >>> def loss(adapter, hidden):
        ...     up, down = adapter
        ...     return linear_cross_entropy(hidden, LowRank(weight, up, down, scale=2.0), jnp.arange(6))
        >>> (d_up, d_down), d_hidden = jax.grad(loss, (0, 1))((up, down), hidden)
        >>> d_up.shape, d_down.shape
        ((100, 2), (2, 8))

    References:
        "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al.), section 4.1.
    """

    weight: Any
    up: Any
    down: Any
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})


# What a call takes as a weight.
type WeightLike = checks.ArrayLike | LowRank


def read_weight(weight: Any, convert: Callable[[str, Any], Any] = checks.array, name: str = "weight") -> LowRank:
    """The arrays of `weight`, as `convert(name, value)` makes them; `up` and `down` are None where it has no term.

    `name` is what errors call the weight.
    """
    if not isinstance(weight, LowRank):
        return LowRank(convert(name, weight), None, None)
    scale = weight.scale
    if not checks.is_plain(scale) or isinstance(scale, bool):
        raise TypeError(
            f"{name}.scale is a {type(scale).__name__}; it must be a Python number: multiply {name}.up by a traced or "
            "trained factor"
        )
    up, down = convert(f"{name}.up", weight.up), convert(f"{name}.down", weight.down)
    return LowRank(convert(f"{name}.weight", weight.weight), up, down, checks.scalar(f"{name}.scale", scale))


def head_spec(
    hidden: jax.Array,
    given: LowRank,
    by_column: Mapping[str, jax.Array],
    vocab_axis: int,
    vocab_size: int | None,
    dtype: Any | None,
    precision: Any | None,
    logit_softcap: float | None,
    parts: tuple[int, int],
) -> HeadSpec:
    """The static facts of a head with arrays `by_column`; the weight is one of `parts` parts of vocabulary and H."""
    weight = given.weight
    if not checks.is_int(vocab_axis) or vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis={vocab_axis!r} must be 0 (weight [V, H]) or 1 (weight [H, V])")
    if hidden.ndim < 1:
        raise ValueError(f"hidden has shape {hidden.shape}; it must be [..., H]")
    if weight.ndim != 2:
        order = "; arguments come as hidden, weight, labels" if weight.ndim < 2 else ""
        raise ValueError(f"weight has shape {weight.shape}; it must have two axes, [V, H] or [H, V]{order}")
    for name, values in {"hidden": hidden, "weight": weight, **by_column}.items():
        checks.floating(name, values)
    held, width = weight.shape[vocab_axis], weight.shape[1 - vocab_axis] * parts[1]
    rows = held * parts[0]
    if hidden.shape[-1] != width:
        other = " (is vocab_axis the right one?)" if hidden.shape[-1] == rows else ""
        other += f", and mesh_axes.width makes weight one of {parts[1]} parts" if parts[1] > 1 else ""
        raise ValueError(
            f"hidden has shape {hidden.shape} and weight {weight.shape} with vocab_axis={vocab_axis}: "
            f"the hidden size is {hidden.shape[-1]} in the one and {width} in the other{other}"
        )
    if rows < 1 or width < 1:
        raise ValueError(f"weight has shape {weight.shape}; both axes must be at least 1")
    for name, values in by_column.items():
        if values.shape != (held,):
            raise ValueError(
                f"{name} has shape {values.shape}; it must be ({held},), one entry for each of the weight's"
            )
    entries = f"the weight's {rows} entries"
    if jax.sharding.get_abstract_mesh().manual_axes and parts == (1, 1):
        entries += "; of a weight that is split, mesh_axes must tell"
    vocab_size = rows if vocab_size is None else checks.count("vocab_size", vocab_size, rows, entries)
    if parts[0] > 1 and vocab_size <= held:
        raise ValueError(
            f"vocab_size={vocab_size} with a weight of {held} entries, which mesh_axes.vocabulary takes for one of "
            f"{parts[0]} parts: it holds the vocabulary alone. Pass each device its part, or name no vocabulary axes"
        )
    chosen = _compute_dtype(hidden, weight, dtype)
    how, rank = _resolve(precision, chosen), 0 if given.up is None else _rank(given, held, width, vocab_axis)
    sizes, scaled = (width, rows, vocab_size), "vocab_scale" in by_column
    return HeadSpec(*sizes, int(vocab_axis), chosen, _cap(logit_softcap), None, how, rank, scaled)


def _rank(given: LowRank, entries: int, width: int, vocab_axis: int) -> int:
    """The r of a low-rank term, beside a weight of `entries` entries of size `width`."""
    up, down = given.up, given.down
    rank = up.shape[1 - vocab_axis] if up.ndim == 2 else 0
    for name, values, shape in (("up", up, (entries, max(rank, 1))), ("down", down, (max(rank, 1), width))):
        checks.floating(f"weight.{name}", values)
        if values.shape != shape[:: 1 - 2 * vocab_axis]:
            names = ("[V, r]", "[r, V]") if name == "up" else ("[r, H]", "[H, r]")
            raise ValueError(
                f"weight.{name} has shape {values.shape}; with vocab_axis={vocab_axis}, beside a weight of {entries} "
                f"entries of size {width}, it must be {names[vocab_axis]}, r at least 1"
                + (f" and equal to weight.up's, {rank}" if name == "down" else "")
            )
    return rank


def logits_spec(logits: Any, vocab_size: int | None, logit_softcap: float | None) -> HeadSpec:
    """The static facts of materialized logits, as hidden states; of anything with `shape` and `dtype`. V may be 0."""
    if logits.ndim < 1:
        raise ValueError(f"logits have shape {logits.shape}; they must be [..., V]")
    checks.known_sizes("logits", logits, "jax.nn.log_softmax")
    if logits.dtype not in _DTYPES:
        raise TypeError(f"logits have dtype {logits.dtype}; {_SUPPORTED}")
    columns = logits.shape[-1]
    if vocab_size is not None:
        checks.count("vocab_size", vocab_size, columns, f"the logits' {columns} columns")
    return HeadSpec(columns, columns, int(vocab_size or columns), 0, np.dtype(logits.dtype), _cap(logit_softcap))


def _compute_dtype(hidden: Any, weight: Any, dtype: Any | None) -> np.dtype:
    which = f"dtype={dtype!r}" if dtype is not None else f"hidden {hidden.dtype} with weight {weight.dtype}"
    try:
        chosen = common_dtype(hidden.dtype, weight.dtype) if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError) as error:  # no such dtype, or 8-bit floats, which promote to nothing
        raise TypeError(f"{which} names no compute dtype; {_SUPPORTED}") from error
    if chosen not in _DTYPES:
        raise TypeError(f"{which} asks for computing in {chosen}; {_SUPPORTED}")
    if chosen == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype=float64 needs JAX's 64-bit mode: jax.config.update('jax_enable_x64', True)")
    return np.dtype(chosen)


def _cap(logit_softcap: float | None) -> float | None:
    return None if logit_softcap is None else checks.static("logit_softcap", logit_softcap, *_CAPS, words=_CAP)


def _read_precision(precision: PrecisionLike) -> Precision | DotAlgorithmPreset:
    """The member that it names; refuses algorithms for 8-bit operands."""
    if not isinstance(precision, str | Precision | DotAlgorithmPreset):
        raise TypeError(
            f"precision={precision!r} is a {type(precision).__name__}; it must be one name for all products, a "
            "jax.lax.Precision, a jax.lax.DotAlgorithmPreset, or None"
        )
    found = _PRECISIONS.get(precision) if isinstance(precision, str) else precision
    if found is None or found not in _PRECISIONS.values():
        wrong = "multiplies 8-bit operands, which no head has" if _8_BITS in str(precision) else "is unknown"
        raise ValueError(f"precision={precision!r} {wrong}; choose from {', '.join(map(repr, _PRECISIONS))}, or None")
    return found


def precision_name(precision: PrecisionLike) -> str:
    """A name for it."""
    found = _read_precision(precision)
    return found.name if isinstance(found, DotAlgorithmPreset) else found.name.lower()


def _resolve(precision: PrecisionLike | None, dtype: np.dtype) -> Precision | DotAlgorithmPreset:
    """How operands of `dtype` are multiplied, the same member for all that means the same.

    None is full float32 for float32 operands, unless JAX's configuration says otherwise: a GPU's own default is TF32, a
    TPU's bfloat16. Of other operands JAX's three levels say nothing, and the configuration is about 32-bit ones.
    """
    if precision is None:
        configured = jax.config.jax_default_matmul_precision if dtype == np.float32 else None
        precision = Precision.HIGHEST if configured is None else configured
    found = _read_precision(precision)
    if found in (DotAlgorithmPreset.DEFAULT, _ITSELF.get(dtype)):
        return Precision.DEFAULT
    return Precision.DEFAULT if isinstance(found, Precision) and dtype != np.float32 else found
