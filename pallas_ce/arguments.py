"""Checks of the public functions' arguments. Each error names the argument, its value and what would work."""

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.head import HeadSpec
from pallas_ce.statistics import STATISTICS


def head_spec(
    hidden: Any,
    weight: Any,
    bias: Any | None,
    vocab_axis: int,
    vocab_size: int | None,
    dtype: Any | None,
    logit_softcap: float | None,
) -> HeadSpec:
    """The static facts of a head, from arrays or anything with `shape` and `dtype`."""
    if vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis={vocab_axis!r} must be 0 (weight [V, H]) or 1 (weight [H, V])")
    if hidden.ndim < 1:
        raise ValueError(f"hidden has shape {hidden.shape}; it must be [..., H]")
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}; it must have two axes, [V, H] or [H, V]")
    for name, array in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {array.dtype}; it must be a floating dtype")
    rows, width = weight.shape[vocab_axis], weight.shape[1 - vocab_axis]
    if hidden.shape[-1] != width:
        other = " (is vocab_axis the right one?)" if hidden.shape[-1] == rows else ""
        raise ValueError(
            f"hidden has shape {hidden.shape} and weight {weight.shape} with vocab_axis={vocab_axis}: "
            f"the hidden size is {hidden.shape[-1]} in the one and {width} in the other{other}"
        )
    if rows < 1 or width < 1:
        raise ValueError(f"weight has shape {weight.shape}; both axes must be at least 1")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias has shape {bias.shape}; it must be ({rows},), one entry for each of the weight's")
    if vocab_size is None:
        vocab_size = rows
    elif not isinstance(vocab_size, int | np.integer) or not 1 <= vocab_size <= rows:
        raise ValueError(f"vocab_size={vocab_size!r} must be an int between 1 and the weight's {rows} entries")
    return HeadSpec(
        width, rows, int(vocab_size), vocab_axis, _compute_dtype(hidden, weight, dtype), _cap(logit_softcap)
    )


def _compute_dtype(hidden: Any, weight: Any, dtype: Any | None) -> np.dtype:
    chosen = jnp.promote_types(hidden.dtype, weight.dtype) if dtype is None else jnp.dtype(dtype)
    if chosen not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        which = f"dtype={dtype!r}" if dtype is not None else f"hidden {hidden.dtype} with weight {weight.dtype}"
        raise TypeError(f"{which} asks for computing in {chosen}; supported are bfloat16, float16, float32 and float64")
    if chosen == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype=float64 needs JAX's 64-bit mode: jax.config.update('jax_enable_x64', True)")
    return np.dtype(chosen)


def _cap(logit_softcap: float | None) -> float | None:
    if logit_softcap is None:
        return None
    if isinstance(logit_softcap, jax.core.Tracer):
        raise TypeError("logit_softcap must be a Python number, not a traced value: it shapes the compiled kernel")
    cap = float(logit_softcap)
    if not (cap > 0 and math.isfinite(cap)):
        raise ValueError(f"logit_softcap={logit_softcap!r} must be a finite number above 0, or None for no cap")
    return cap


def check_labels(labels: Any, leading: tuple[int, ...]) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels have dtype {labels.dtype}; they must be integers")
    if labels.shape != leading:
        raise ValueError(f"labels have shape {labels.shape}; hidden's leading shape {leading} is needed")


def check_by_row(name: str, array: Any, leading: tuple[int, ...]) -> None:
    if array.shape != leading:
        raise ValueError(f"{name} has shape {array.shape}; hidden's leading shape {leading} is needed")


def check_by_column(name: str, array: Any, vocab_size: int) -> None:
    if array.shape != (vocab_size,):
        raise ValueError(
            f"{name} has shape {array.shape}; it must be ({vocab_size},), one entry for each of vocab_size"
        )


def check_reduction(reduction: str, normalizer: Any, backward: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; choose from 'mean', 'sum', 'none'")
    if backward not in ("auto", "recompute", "in_forward"):
        raise ValueError(f"backward={backward!r} is unknown; choose from 'auto', 'recompute', 'in_forward'")
    if reduction == "none" and backward == "in_forward":
        raise ValueError(
            "backward='in_forward' needs a scalar loss, and reduction='none' returns one loss for each token: "
            "choose reduction='mean' or 'sum', or backward='recompute'"
        )
    if normalizer is not None and reduction != "mean":
        raise ValueError(f"normalizer is given with reduction={reduction!r}; only reduction='mean' divides by it")


def scalar(name: str, value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> None:
    """Checks a scalar that may be an array or traced; its range only for plain numbers, which costs no transfer."""
    if jnp.ndim(value) != 0:
        raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be a scalar")
    if isinstance(value, int | float | np.number) and not low <= float(value) <= high:
        bounds = f"between {low:g} and {high:g}" if high < sys.float_info.max else "a finite number"
        raise ValueError(f"{name}={value!r} must be {bounds}")


def is_known(value: Any, constant: float) -> bool:
    """Whether a scalar is a Python or NumPy number of just that value: then its term is left out when compiling."""
    return isinstance(value, int | float | np.number) and float(value) == constant


def check_statistics(names: Any, labels: Any | None) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"statistics={names!r} must be a sequence of names, such as ({names!r},)")
    names = tuple(dict.fromkeys(names))
    if not names:
        raise ValueError(f"statistics is empty; choose from {STATISTICS}")
    for name in names:
        if name not in STATISTICS:
            raise ValueError(f"statistics names {name!r}, which is unknown; choose from {STATISTICS}")
        if labels is None and name in ("target_logit", "log_prob"):
            raise ValueError(f"statistics names {name!r}, which needs labels; labels is None")
    return names
