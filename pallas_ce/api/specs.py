"""Checks of heads and logits, which make of them the static facts that all below works with."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks
from pallas_ce.api.low_rank import LowRank
from pallas_ce.api.precision import resolve
from pallas_ce.head import HeadSpec, common_dtype

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_SUPPORTED = "supported are bfloat16, float16, float32 and float64"

# Within these a soft cap over the least and most temperature stays in float32's range; see `checks.temperature`.
_LEAST_CAP, _MOST_CAP = 1e-8, 1e33


def head_spec(
    hidden: jax.Array,
    given: LowRank,
    bias: jax.Array | None,
    vocab_axis: int,
    vocab_size: int | None,
    dtype: Any | None,
    precision: Any | None,
    logit_softcap: float | None,
    parts: tuple[int, int],
) -> HeadSpec:
    """The static facts of a head; the weight is one of `parts` parts of the vocabulary and of H."""
    weight = given.weight
    if not checks.is_int(vocab_axis) or vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis={vocab_axis!r} must be 0 (weight [V, H]) or 1 (weight [H, V])")
    if hidden.ndim < 1:
        raise ValueError(f"hidden has shape {hidden.shape}; it must be [..., H]")
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}; it must have two axes, [V, H] or [H, V]")
    for name, values in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if values is not None:
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
    if bias is not None and bias.shape != (held,):
        raise ValueError(f"bias has shape {bias.shape}; it must be ({held},), one entry for each of the weight's")
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
    how, rank = resolve(precision, chosen), 0 if given.up is None else _rank(given, held, width, vocab_axis)
    return HeadSpec(width, rows, vocab_size, int(vocab_axis), chosen, _cap(logit_softcap), precision=how, rank=rank)


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
    cap = _cap(logit_softcap)
    return HeadSpec(columns, columns, int(vocab_size or columns), 0, np.dtype(logits.dtype), cap)


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
    if logit_softcap is None:
        return None
    if isinstance(logit_softcap, jax.core.Tracer):
        raise TypeError("logit_softcap must be a Python number, not a traced value: it shapes the compiled kernel")
    try:
        cap = float(logit_softcap)
    except OverflowError:
        cap = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"logit_softcap={logit_softcap!r} must be a number above 0, or None for no cap") from error
    if not (cap > 0 and math.isfinite(cap)):
        raise ValueError(
            f"logit_softcap={checks.shown(logit_softcap)} must be a finite number above 0, or None for no cap"
        )
    if not _LEAST_CAP <= cap <= _MOST_CAP:
        raise ValueError(
            f"logit_softcap={cap:g} lies outside [{_LEAST_CAP:g}, {_MOST_CAP:g}], where caps over temperatures fit "
            "float32; None for no cap"
        )
    return cap
