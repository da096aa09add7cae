"""The functions of `pallas_ce` on named arrays, with PyTorch's names for the arguments. No PyTorch in here."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_ce
from pallas_ce import LowRank
from pallas_ce.integration import Known, PerInput, cross_entropy_steps, log_probs_steps, row_statistics_steps
from torch_bridge.programs.program import Arrays, Function, Outputs

# Rows for which "auto" chooses a backward mode. What a forward keeps must not depend on how many rows come: what
# PyTorch has compiled for changing shapes would not fit.
_TYPICAL_ROWS = 4096


class Options(NamedTuple):
    """Static options of a call; each function reads the ones that are its parameters.

    The operators take all but `vocab_axis`, by the types here. `term_scale` is the factor of the weight's low-rank
    term, `statistics` are names joined by commas, and `fixed_temperature` is a temperature that is a number.
    """

    vocab_axis: int = 0
    dtype: str = "float32"
    precision: str = "highest"
    logit_softcap: float | None = None
    vocab_size: int | None = None
    implementation: str | None = None
    scratch_bytes: int | None = None
    term_scale: float = 1.0
    ignore_index: int | None = -100
    reduction: str = "mean"
    backward: str = "auto"
    return_metrics: bool = False
    statistics: str = ""
    fixed_temperature: float = 1.0
    return_entropy: bool = False
    return_sum_sq_probs: bool = False
    return_hit: bool = False


# The names in `pallas_ce` of tensors that have another name here.
_NAMES = {
    "input": "hidden",
    "linear_weight": "weight",
    "linear_up": "up",
    "linear_down": "down",
    "linear_bias": "bias",
    "target": "labels",
}


# Inputs with a gradient in a backward that adds the weight's to a sum.
_OF_SUMS = frozenset(("input", "linear_weight", "linear_bias"))


def _read(function: Callable[..., Any], steps: Any, options: Options, arrays: Arrays) -> Any:
    """The problem of a public function; arrays that are missing are left to its defaults."""
    static = options._asdict()
    static |= {"temperature": options.fixed_temperature, "statistics": options.statistics.split(",")}
    named: dict[str, Any] = {_NAMES.get(name, name): x for name, x in arrays.items()}
    up, down = named.pop("up", None), named.pop("down", None)
    if up is not None and down is not None:
        # Like the weight `[V, H]`, but these are small: where that lies as `[H, V]` they are transposed here.
        term = (up.T, down.T) if options.vocab_axis else (up, down)
        named["weight"] = LowRank(named["weight"], *term, options.term_scale)
    parameters = inspect.signature(function).parameters
    if "backward" in parameters:
        static["backward"] = _mode(options, arrays)
    return steps.read(**{name: x for name, x in static.items() if name in parameters} | named)


def _keep(steps: Any, checked: Any, names: frozenset[str]) -> Known | None:
    return steps.keep(*checked, _needs_grad(names))


def _needs_grad(names: frozenset[str]) -> PerInput[bool]:
    wanted = {_NAMES.get(name, name) for name in names}
    return PerInput(*(name in wanted for name in PerInput._fields))


def _compute_loss(checked: cross_entropy_steps.Checked, known: Any) -> Outputs:
    """The loss; the five metrics where they are asked for."""
    loss, metrics = cross_entropy_steps.compute(*checked, known)
    return (loss,), tuple(metrics or ())


def _compute_by_row(steps: Any, checked: Any, known: Any) -> Outputs:
    """The values that are asked for, in the order of the result's fields; only floating ones have gradients."""
    values = jax.tree.leaves(steps.compute(*checked, known))
    floating = tuple(x for x in values if jnp.issubdtype(x.dtype, jnp.floating))
    return floating, tuple(x for x in values if not jnp.issubdtype(x.dtype, jnp.floating))


def _of_head(known: Known | None) -> Any:
    """The sums without hidden's, which is by row, like the statistics."""
    return None if known is None else known.sums._replace(hidden=None)


def _scaled_loss(checked: cross_entropy_steps.Checked, known: Known | None) -> Arrays:
    """In_forward's sums: they wait for the upstream scalar, and for a logit scale where there is one.

    A program finishes the sums of a low-rank term, which are small and transposed where the weight is `[H, V]`.
    """
    _, problem = checked
    if known is None or problem.logit_scale is not None:
        return {}
    sums = {"input": known.sums.hidden, "linear_weight": known.sums.weight, "linear_bias": known.sums.bias}
    return {name: x for name, x in sums.items() if x is not None}


def _adds_to_sum(checked: cross_entropy_steps.Checked, known: Known | None) -> frozenset[str]:
    """Where a backward recomputes, for a cotangent that is one number."""
    _, problem = checked
    made = known is None or any(x is not None for x in known.sums)
    return frozenset() if made or problem.options.by_row or problem.up is not None else _OF_SUMS


def _add_loss(
    checked: cross_entropy_steps.Checked, known: Known, cotangent: jax.Array, total: jax.Array, names: frozenset[str]
) -> Arrays:
    found = cross_entropy_steps.add_gradients(*checked, known, _needs_grad(names), cotangent, total)
    return {name: getattr(found, _NAMES[name]) for name in names}


def _mode(options: Options, arrays: Arrays) -> str | None:
    """The loss's backward mode; "auto" as for a typical number of rows."""
    if options.backward != "auto" or options.implementation == "reference":
        return options.backward
    hidden, weight = arrays["input"], arrays["linear_weight"]
    rank = arrays["linear_up"].shape[1] if "linear_up" in arrays else 0
    return _chosen_mode(options, hidden.shape[1], hidden.dtype, weight.shape, weight.dtype, rank)


@functools.lru_cache(maxsize=256)
def _chosen_mode(
    options: Options, width: int, dtype: Any, weight_shape: tuple[int, ...], weight_dtype: Any, rank: int
) -> str | None:
    weight: Any = jax.ShapeDtypeStruct(weight_shape, weight_dtype)
    if rank:
        step = 1 - 2 * options.vocab_axis
        up = jax.ShapeDtypeStruct((weight_shape[options.vocab_axis], rank)[::step], dtype)
        weight = LowRank(weight, up, jax.ShapeDtypeStruct((rank, width)[::step], dtype))
    static: dict[str, Any] = {name: getattr(options, name) for name in _OF_MODE}
    hidden = jax.ShapeDtypeStruct((_TYPICAL_ROWS, width), dtype)
    return pallas_ce.explain(hidden, weight, differentiate=("hidden", "weight"), **static).backward


# The options by which a mode is chosen.
_OF_MODE = ("vocab_axis", "dtype", "precision", "vocab_size", "implementation", "scratch_bytes", "reduction")


def _of_rows(function: Callable[..., Any], steps: Any) -> Function:
    """A function of each row's statistics."""
    own = (functools.partial(_read, function, steps), functools.partial(_keep, steps))
    return Function(*own, functools.partial(_compute_by_row, steps), _of_head)


LOSS = Function(
    functools.partial(_read, pallas_ce.linear_cross_entropy, cross_entropy_steps),
    functools.partial(_keep, cross_entropy_steps),
    _compute_loss,
    _of_head,
    _scaled_loss,
    _adds_to_sum,
    _add_loss,
)
STATISTICS = _of_rows(pallas_ce.linear_row_statistics, row_statistics_steps)
LOG_PROBS = _of_rows(pallas_ce.linear_log_probs, log_probs_steps)
