"""Every public function of a head, called alike: what all of them promise is tested over this list."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce import (
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_loss,
    linear_row_statistics,
    linear_sample,
    linear_top_k,
    sampled_softmax_cross_entropy,
)
from pallas_ce.statistics.row import STATISTICS

KEY = jax.random.key(7)


def of_several_statistics(s: Any) -> Any:
    return (
        jnp.tanh(0.3 * s.lse) - s.log_prob + 0.1 * s.entropy + s.sum_sq_probs + 0.01 * s.max_logit + 0.1 * s.varentropy
    )


def _statistics(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return linear_row_statistics(hidden, weight, labels, statistics=STATISTICS, row_mask=labels >= 0, **options)


def _top_k(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return linear_top_k(hidden, weight, 3, row_mask=labels >= 0, **options)


def _sample(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return linear_sample(KEY, hidden, weight, row_mask=labels >= 0, **options)


def _distilled(divergence: Any, hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    teacher = -hidden[..., ::-1], weight * 0.7
    return linear_distillation(hidden, weight, *teacher, labels, divergence=divergence, **options)


# By name, functions of hidden states, weight and labels; rows with a label below 0 do not count.
BY_ROW: dict[str, Callable[..., Any]] = {
    "linear_row_statistics": _statistics,
    "linear_log_probs": functools.partial(
        linear_log_probs, return_entropy=True, return_sum_sq_probs=True, return_hit=True
    ),
    "linear_top_k": _top_k,
    "linear_sample": _sample,
    "linear_sample of the 3 largest": functools.partial(_sample, top_k=3),
}
DISTILLATIONS = ("forward_kl", "reverse_kl", "jsd")
LOSSES: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_loss": functools.partial(linear_loss, of_several_statistics),
    **{name: functools.partial(_distilled, name) for name in DISTILLATIONS},
    "sampled_softmax": functools.partial(sampled_softmax_cross_entropy, key=KEY, num_samples=9),
}
FUNCTIONS = BY_ROW | LOSSES
# By name, the implementations of those that can be told which, beside the kernels; None: the only one.
SERVED = dict.fromkeys(FUNCTIONS, (None,)) | {
    **dict.fromkeys(("linear_row_statistics", "linear_log_probs", *LOSSES), ("xla", "reference", "toy")),
    **dict.fromkeys(DISTILLATIONS, ("xla", "reference")),
}
TEMPERED = sorted(FUNCTIONS.keys() - {"linear_cross_entropy", "sampled_softmax"})


def by_row(name: str) -> Callable[..., Any]:
    """The function, with a result for each row."""
    return FUNCTIONS[name] if name in BY_ROW else functools.partial(FUNCTIONS[name], reduction="none")


def floating(results: Any) -> list[Any]:
    """Results that have gradients."""
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]


def total(results: Any) -> Any:
    """One number to which all results contribute, for differentiation."""
    return sum(jnp.sum(jnp.sin(x)) for x in floating(results))
