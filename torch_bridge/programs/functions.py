"""The functions of `pallas_ce` on named arrays, with PyTorch's names for the arguments. No PyTorch in here."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_ce
from pallas_ce.integration import Known, NeedsGrad, cross_entropy_steps, log_probs_steps, row_statistics_steps
from torch_bridge.programs.program import Arrays, Function, Outputs

# Rows for which "auto" chooses a backward mode. What a forward keeps must not depend on how many rows come: what
# PyTorch has compiled for changing shapes would not fit.
_TYPICAL_ROWS = 4096


class LossOptions(NamedTuple):
    """Static options of the loss; the types are those of the operator's schema."""

    vocab_axis: int
    dtype: str
    reduction: str
    ignore_index: int | None
    logit_softcap: float | None
    vocab_size: int | None
    backward: str
    implementation: str | None
    scratch_bytes: int | None
    return_metrics: bool


class StatisticsOptions(NamedTuple):
    """Static options of the row statistics; `statistics` are names joined by commas."""

    vocab_axis: int
    dtype: str
    statistics: str
    logit_softcap: float | None
    vocab_size: int | None
    implementation: str | None
    scratch_bytes: int | None
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
    implementation: str | None
    scratch_bytes: int | None
    fixed_temperature: float


def _read_loss(options: LossOptions, arrays: Arrays) -> cross_entropy_steps.Checked:
    return cross_entropy_steps.read(
        labels=arrays["target"],
        token_weights=arrays.get("token_weights"),
        class_weights=arrays.get("class_weights"),
        label_smoothing=arrays.get("label_smoothing", 0.0),
        z_loss=arrays.get("z_loss", 0.0),
        normalizer=arrays.get("normalizer"),
        reduction=options.reduction,
        backward=_mode(options, arrays),
        ignore_index=options.ignore_index,
        return_metrics=options.return_metrics,
        **_head(options, arrays),
    )


def _keep_loss(checked: cross_entropy_steps.Checked, names: frozenset[str]) -> Known | None:
    return cross_entropy_steps.keep(*checked, _wanted(names))


def _compute_loss(checked: cross_entropy_steps.Checked, known: Any) -> Outputs:
    """The loss; the five metrics where they are asked for."""
    loss, metrics = cross_entropy_steps.compute(*checked, known)
    return (loss,), tuple(metrics or ())


def _scaled_loss(checked: cross_entropy_steps.Checked, known: Known | None) -> Arrays:
    """In_forward's sums: they wait for the upstream scalar, and for a logit scale where there is one."""
    _, call, _ = checked
    if known is None or call.logit_scale is not None:
        return {}
    sums = {"input": known.sums.hidden, "linear_weight": known.sums.weight, "linear_bias": known.sums.bias}
    return {name: x for name, x in sums.items() if x is not None}


def _read_statistics(options: StatisticsOptions, arrays: Arrays) -> row_statistics_steps.Checked:
    return row_statistics_steps.read(
        labels=arrays.get("target"),
        statistics=names_in_order(options.statistics),
        row_mask=arrays.get("row_mask"),
        logit_weights=arrays.get("logit_weights"),
        temperature=arrays.get("temperature", options.fixed_temperature),
        **_head(options, arrays),
    )


def _keep_statistics(checked: row_statistics_steps.Checked, names: frozenset[str]) -> Known | None:
    return row_statistics_steps.keep(*checked, _wanted(names))


def _compute_statistics(checked: row_statistics_steps.Checked, known: Any) -> Outputs:
    found = row_statistics_steps.compute(*checked, known)
    _, names, _ = checked
    values = [getattr(found, name) for name in names]
    floating = tuple(x for x in values if jnp.issubdtype(x.dtype, jnp.floating))
    return floating, tuple(values[len(floating) :])


def _read_log_probs(options: LogProbsOptions, arrays: Arrays) -> log_probs_steps.Checked:
    return log_probs_steps.read(
        labels=arrays["target"],
        temperature=arrays.get("temperature", options.fixed_temperature),
        return_entropy=options.return_entropy,
        return_sum_sq_probs=options.return_sum_sq_probs,
        return_hit=options.return_hit,
        ignore_index=options.ignore_index,
        **_head(options, arrays),
    )


def _keep_log_probs(checked: log_probs_steps.Checked, names: frozenset[str]) -> Known | None:
    return log_probs_steps.keep(*checked, _wanted(names))


def _compute_log_probs(checked: log_probs_steps.Checked, known: Any) -> Outputs:
    *differentiable, hit = log_probs_steps.compute(*checked, known)
    return tuple(x for x in differentiable if x is not None), () if hit is None else (hit,)


def names_in_order(statistics: str) -> tuple[str, ...]:
    """The names in a comma-separated list; argmax, which has no gradient, last."""
    return tuple(sorted(statistics.split(","), key=lambda name: name == "argmax"))


def _wanted(names: frozenset[str]) -> NeedsGrad:
    return NeedsGrad(
        hidden="input" in names,
        weight="linear_weight" in names,
        bias="linear_bias" in names,
        logit_scale="logit_scale" in names,
    )


def _head(options: LossOptions | StatisticsOptions | LogProbsOptions, arrays: Arrays) -> dict[str, Any]:
    return {
        "hidden": arrays["input"],
        "weight": arrays["linear_weight"],
        "bias": arrays.get("linear_bias"),
        "logit_scale": arrays.get("logit_scale", 1.0),
        "vocab_axis": options.vocab_axis,
        "vocab_size": options.vocab_size,
        "logit_softcap": options.logit_softcap,
        "dtype": options.dtype,
        "implementation": options.implementation,
        "scratch_bytes": options.scratch_bytes,
    }


def _mode(options: LossOptions, arrays: Arrays) -> str | None:
    if options.backward != "auto" or options.implementation == "reference":
        return options.backward
    hidden, weight = arrays["input"], arrays["linear_weight"]
    return _chosen_mode(options, hidden.shape[1], hidden.dtype, weight.shape, weight.dtype)


@functools.lru_cache(maxsize=256)
def _chosen_mode(
    options: LossOptions, width: int, dtype: Any, weight_shape: tuple[int, ...], weight_dtype: Any
) -> str | None:
    return pallas_ce.explain(
        jax.ShapeDtypeStruct((_TYPICAL_ROWS, width), dtype),
        jax.ShapeDtypeStruct(weight_shape, weight_dtype),
        reduction=options.reduction,  # type: ignore[arg-type]
        differentiate=("hidden", "weight"),
        vocab_axis=options.vocab_axis,
        vocab_size=options.vocab_size,
        dtype=options.dtype,
        implementation=options.implementation,  # type: ignore[arg-type]
        scratch_bytes=options.scratch_bytes,
    ).backward


LOSS = Function(_read_loss, _keep_loss, _compute_loss, _scaled_loss)
STATISTICS = Function(_read_statistics, _keep_statistics, _compute_statistics)
LOG_PROBS = Function(_read_log_probs, _keep_log_probs, _compute_log_probs)
