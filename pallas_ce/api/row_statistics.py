"""`linear_row_statistics`: the statistics themselves, for any loss written on top of them."""

import inspect
from collections.abc import Sequence
from typing import Unpack

from pallas_ce.api.checks import ArrayLike, check_statistics
from pallas_ce.api.documented import computed_by
from pallas_ce.api.head_options import StatisticsOptions
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Known, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.row import RowStatistics, from_primitives, primitive_names
from pallas_ce.streaming.gradient_products import PerInput


@program(static=1)
def compute(names: tuple[str, ...], problem: Problem, known: Known | None = None) -> RowStatistics:
    """The statistics. `known`: what `keep` has found for the same call."""
    call, operands = _call(names, problem)
    return from_primitives(evaluate.statistics(call, operands._replace(known=known)), names)


def keep(names: tuple[str, ...], problem: Problem, needs_grad: PerInput[bool]) -> Known | None:
    """What `compute` takes as `known`."""
    return evaluate.keep(*_call(names, problem), needs_grad)


def _call(names: tuple[str, ...], problem: Problem) -> tuple[Call, Operands]:
    return Call(problem.how, primitive_names(names)), Operands(*problem.rows(), problem.row_mask)


@computed_by(compute)
def linear_row_statistics(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike | None = None,
    *,
    statistics: Sequence[str] = ("lse", "target_logit"),
    **options: Unpack[StatisticsOptions],
) -> tuple[tuple[str, ...], Problem]:
    r"""Statistics of each row of `logits = softcap(logit_scale · (hidden·weight + bias)) / temperature`, not stored.

    Differentiable in `hidden`, `weight`, `bias` and `logit_scale`, in reverse mode, once, with any cotangents: a loss
    written in plain JAX on top of the statistics trains. The backward recomputes tiles of the logits (`2·N·H·V`
    operations) beside its two products; the forward keeps O(N) numbers.

    Args:
        hidden: `[..., H]` bfloat16, float16, float32 or float64; N rows in all, zero rows included.
        weight: `[V', H]` (`vocab_axis=0`) or `[H, V']` (`vocab_axis=1`), floating. `explain` tells where a copy is
            made; none is transposed.
        labels: `[...]`, any integer dtype; needed for `target_logit` and `log_prob`. No label is special here: one
            outside `[0, vocab_size)` has `target_logit` 0. `[..., K]`: K targets for each row.
        statistics: names of the statistics to return, out of `RowStatistics`' fields. Others cost nothing.
        row_mask: `[...]` bool; rows where it is False hold 0, have gradients of exactly 0, and their work is skipped.
        logit_weights: `[V]`, the u of `mean_logit = Σ_v u_v·z_v`; 1/V each by default. A constant: it gets no gradient.
        temperature: positive; a number, an array `[]` or one `[...]` of a temperature for each row. Divides the capped
            logits; a constant, it gets no gradient. A number is folded into cap and scale and costs nothing.

    Returns:
        RowStatistics: fields `[...]`, float32 (float64 for float64; `argmax` int32), None where not asked for; with K
            targets, `target_logit` and `log_prob` are `[..., K]`.

    Raises:
        ValueError: shapes that do not fit, unknown names, a budget too small for one row.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_row_statistics
        >>> hidden, weight = jnp.ones((2, 3)), jnp.zeros((4, 3))
        >>> found = linear_row_statistics(hidden, weight, jnp.array([0, 3]), statistics=("log_prob", "entropy"))
        >>> print(found.log_prob, found.entropy)
        [-1.3862944 -1.3862944] [1.3862944 1.3862944]
        >>> def entropy_bonus(hidden):
        ...     return linear_row_statistics(hidden, weight, statistics=("entropy",)).entropy.sum()
        >>> jax.grad(entropy_bonus)(hidden).shape
        (2, 3)

    References:
        "From Projection to Prediction: Beyond Logits for Scalable Language Models", Algorithms 1 and 2.
    """
    # No label is special, and each row has cotangents of its own.
    problem = Problem.read(hidden, weight, labels, ignore_index=None, reduction="none", several=True, **options)
    return check_statistics(statistics, problem.labels), problem.decided()


# For wrappers that do not differentiate by JAX, like `keep`.
read = inspect.unwrap(linear_row_statistics)
