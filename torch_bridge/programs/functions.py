"""The functions of `pallas_ce` on named arrays, with PyTorch's names for the arguments. No PyTorch in here."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_ce
from pallas_ce import LowRank
from pallas_ce.integration import Known, NeedsGrad, cross_entropy_steps, log_probs_steps, row_statistics_steps
from torch_bridge.programs.program import Arrays, Function, Outputs

# Rows for which "auto" chooses a backward mode. What a forward keeps must not depend on how many rows come: what
# PyTorch has compiled for changing shapes would not fit.
_TYPICAL_ROWS = 4096


class LossOptions(NamedTuple):
    """Static options of the loss; the operator's schema has their types.

    `term_scale` is the factor of the weight's low-rank term, where there is one.
    """

    vocab_axis: int
    dtype: str
    reduction: str
    ignore_index: int | None
    logit_softcap: float | None
    vocab_size: int | None
    backward: str
    precision: str
    implementation: str | None
    scratch_bytes: int | None
    term_scale: float
    return_metrics: bool


class StatisticsOptions(NamedTuple):
    """Static options of the row statistics; `statistics` are names joined by commas."""

    vocab_axis: int
    dtype: str
    statistics: str
    logit_softcap: float | None
    vocab_size: int | None
    precision: str
    implementation: str | None
    scratch_bytes: int | None
    term_scale: float
    fixed_temperature: float


class LogProbsOptions(NamedTuple):
    """Static options of the log-probabilities."""

    vocab_axis: int
    dtype: str
    return_entropy: bool
    return_sum_sq_probs: bool
    return_hit: bool
    ignore_index: int | None
    logit_softcap: float | None
    vocab_size: int | None
    precision: str
    implementation: str | None
    scratch_bytes: int | None
    term_scale: float
    fixed_temperature: float


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


def _arguments(options: LossOptions | StatisticsOptions | LogProbsOptions, arrays: Arrays) -> dict[str, Any]:
    """The arguments of `read`; arrays that are missing are left to its defaults."""
    static = options._asdict()
    if "fixed_temperature" in static:
        static["temperature"] = static.pop("fixed_temperature")
    named: dict[str, Any] = {_NAMES.get(name, name): x for name, x in arrays.items()}
    scale, up, down = static.pop("term_scale"), named.pop("up", None), named.pop("down", None)
    if up is not None and down is not None:
        # Like the weight `[V, H]`, but these are small: where that lies as `[H, V]` they are transposed here.
        named["weight"] = LowRank(named["weight"], *((up.T, down.T) if options.vocab_axis else (up, down)), scale)
    return static | named


def _read_loss(options: LossOptions, arrays: Arrays) -> cross_entropy_steps.Checked:
    return cross_entropy_steps.read(**_arguments(options, arrays) | {"backward": _mode(options, arrays)})


def _read_statistics(options: StatisticsOptions, arrays: Arrays) -> row_statistics_steps.Checked:
    return row_statistics_steps.read(**_arguments(options, arrays) | {"statistics": options.statistics.split(",")})


def _read_log_probs(options: LogProbsOptions, arrays: Arrays) -> log_probs_steps.Checked:
    return log_probs_steps.read(**_arguments(options, arrays))


def _keep(steps: Any, checked: Any, names: frozenset[str]) -> Known | None:
    fields = {field.name for field in dataclasses.fields(NeedsGrad)}
    wanted = {_NAMES.get(name, name) for name in names} & fields
    return steps.keep(*checked, NeedsGrad(**dict.fromkeys(wanted, True)))


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
    needs_grad = NeedsGrad(**dict.fromkeys((_NAMES[name] for name in names), True))
    found = cross_entropy_steps.add_gradients(*checked, known, needs_grad, cotangent, total)
    return {name: getattr(found, _NAMES[name]) for name in names}


def _mode(options: LossOptions, arrays: Arrays) -> str | None:
    if options.backward != "auto" or options.implementation == "reference":
        return options.backward
    hidden, weight = arrays["input"], arrays["linear_weight"]
    rank = arrays["linear_up"].shape[1] if "linear_up" in arrays else 0
    return _chosen_mode(options, hidden.shape[1], hidden.dtype, weight.shape, weight.dtype, rank)


@functools.lru_cache(maxsize=256)
def _chosen_mode(
    options: LossOptions, width: int, dtype: Any, weight_shape: tuple[int, ...], weight_dtype: Any, rank: int
) -> str | None:
    weight: Any = jax.ShapeDtypeStruct(weight_shape, weight_dtype)
    if rank:
        step = 1 - 2 * options.vocab_axis
        up = jax.ShapeDtypeStruct((weight_shape[options.vocab_axis], rank)[::step], dtype)
        weight = LowRank(weight, up, jax.ShapeDtypeStruct((rank, width)[::step], dtype))
    return pallas_ce.explain(
        jax.ShapeDtypeStruct((_TYPICAL_ROWS, width), dtype),
        weight,
        reduction=options.reduction,  # type: ignore[arg-type]
        differentiate=("hidden", "weight"),
        vocab_axis=options.vocab_axis,
        vocab_size=options.vocab_size,
        dtype=options.dtype,
        precision=options.precision,
        implementation=options.implementation,  # type: ignore[arg-type]
        scratch_bytes=options.scratch_bytes,
    ).backward


LOSS = Function(
    _read_loss,
    functools.partial(_keep, cross_entropy_steps),
    _compute_loss,
    _of_head,
    _scaled_loss,
    _adds_to_sum,
    _add_loss,
)
STATISTICS = Function(
    _read_statistics,
    functools.partial(_keep, row_statistics_steps),
    functools.partial(_compute_by_row, row_statistics_steps),
    _of_head,
)
LOG_PROBS = Function(
    _read_log_probs,
    functools.partial(_keep, log_probs_steps),
    functools.partial(_compute_by_row, log_probs_steps),
    _of_head,
)
