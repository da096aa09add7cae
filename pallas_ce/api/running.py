"""`linear_cross_entropy_and_gradients`: gradients of micro-batches, the weight's added where their sum lies."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.documented import documented
from pallas_ce.api.head_options import CrossEntropyOptions
from pallas_ce.api.linear_cross_entropy import operands_of
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import LowRank
from pallas_ce.modes import evaluate
from pallas_ce.modes.sums import added
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.logits import present
from pallas_ce.streaming.gradient_products import NO_GRADIENT


class LossAndGradients(NamedTuple):
    """What `linear_cross_entropy_and_gradients` returns.

    Attributes:
        loss: `[]`, as `linear_cross_entropy` returns it, without `loss_scale`.
        hidden: the gradient of `hidden`, in its shape and dtype, times `loss_scale`.
        weight_sum: the argument with the gradient of `weight` times `loss_scale` added.
        bias_sum: likewise for `bias`; None where none was given.
    """

    loss: jax.Array
    hidden: jax.Array
    weight_sum: jax.Array
    bias_sum: jax.Array | None


@documented
def linear_cross_entropy_and_gradients(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    weight_sum: ArrayLike,
    *,
    bias_sum: ArrayLike | None = None,
    loss_scale: ArrayLike = 1.0,
    **options: Unpack[CrossEntropyOptions],
) -> LossAndGradients:
    """`linear_cross_entropy` and its gradients; the weight's is added to `weight_sum` in place.

    For gradients summed over micro-batches: `jax.grad` makes an array of the weight's size for each of them, which
    is then added to the sum; this adds tile by tile and makes none. Call it inside `jit` with the sum as the carry of a
    scan, or donated: elsewhere JAX copies what it may not overwrite. Nothing that this returns can be differentiated;
    the gradient of `hidden` is what the model below is differentiated with, by `jax.vjp`.

    In float32 (float64 for float64) the sum is added to in place, unless devices that split the rows have to add up
    the weight's gradient first, or to gather the weight. A sum in the weight's own narrower dtype is rounded once for
    each call, from a float32 gradient beside it.

    Args:
        hidden: as in `linear_cross_entropy`, like all that is not said here.
        weight: `[V', H]` or `[H, V']`, not a `LowRank`: the gradients of one have no array of this size.
        labels: `[...]`.
        weight_sum: of the weight's shape; float32 (float64 for float64), or the weight's dtype.
        bias_sum: of the bias's shape, float32 (float64) or the bias's dtype; None: the bias is a constant.
        loss_scale: `[]`, what the gradients are multiplied by: one over the number of micro-batches, or a scale that
            keeps float16 gradients in range.
        token_weights: w `[...]`, a constant here.
        logit_scale: their scale, a constant here.
        reduction: "mean" or "sum".
        normalizer: the mean's divisor. With all micro-batches' divisor, their losses add up to the whole mean.

    Returns:
        LossAndGradients: see there.

    Raises:
        ValueError: as `linear_cross_entropy` does; `reduction="none"`; sums of other shapes.
        TypeError: likewise; sums of other dtypes; a `LowRank` weight.
        NotImplementedError: when differentiated.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_cross_entropy_and_gradients
        >>> hidden = jax.random.normal(jax.random.key(0), (4, 16, 8))  # four micro-batches
        >>> weight = jax.random.normal(jax.random.key(1), (100, 8))
        >>> labels = jnp.zeros((4, 16), jnp.int32)
        >>> def step(weight_sum, micro_batch):
        ...     found = linear_cross_entropy_and_gradients(
        ...         micro_batch[0], weight, micro_batch[1], weight_sum, loss_scale=1 / 4
        ...     )
        ...     return found.weight_sum, (found.loss, found.hidden)
        >>> gradient, (losses, d_hidden) = jax.lax.scan(step, jnp.zeros(weight.shape), (hidden, labels))
        >>> gradient.shape, losses.shape, d_hidden.shape
        ((100, 8), (4,), (4, 16, 8))

    References:
        The gradient accumulation fusion of Megatron-LM, for a head whose logits are not stored.
    """
    if isinstance(weight, LowRank):
        raise TypeError(
            "weight is a LowRank; the gradients of its terms are small, so differentiate linear_cross_entropy instead"
        )
    problem = Problem.read(hidden, weight, checks.ids("labels", labels), **options)
    if problem.options.by_row:
        raise ValueError("reduction='none' has no single gradient to add; choose 'mean' or 'sum'")
    if bias_sum is not None and problem.bias is None:
        raise ValueError("bias_sum is given and bias is None; pass both, or neither")
    sums = (
        _sum("weight_sum", weight_sum, "weight", problem.weight, problem),
        None if problem.bias is None or bias_sum is None else _sum("bias_sum", bias_sum, "bias", problem.bias, problem),
    )
    scale = jnp.asarray(checks.scalar("loss_scale", loss_scale), problem.spec.accumulator)
    return _compute(problem.decided((sums, scale)), *sums, scale)


def _sum(name: str, given: Any, of: str, array: jax.Array, problem: Problem) -> jax.Array:
    total = checks.array(name, given)
    if total.shape != array.shape:
        raise ValueError(f"{name} has shape {total.shape}; it must be {array.shape}, the shape of {of}")
    allowed = dict.fromkeys((problem.spec.accumulator.name, array.dtype.name))
    if total.dtype.name not in allowed:
        raise TypeError(f"{name} is {total.dtype.name}; it must be {' or '.join(allowed)}")
    return total


@program(by_row=lambda problem, *sums: LossAndGradients(False, True, *sums[:2]))  # type: ignore[arg-type]
def _compute(
    problem: Problem, weight_sum: jax.Array, bias_sum: jax.Array | None, loss_scale: jax.Array
) -> LossAndGradients:
    given = evaluate.first_order_only((problem, weight_sum, bias_sum, loss_scale), _INSTEAD)
    problem, weight_sum, bias_sum, loss_scale = given
    if bias_sum is not None:  # so that its gradient is not rounded before it is added
        problem = dataclasses.replace(problem, bias=present(problem.bias).astype(problem.spec.accumulator))
    static, operands = operands_of(problem)
    operands = operands._replace(cotangent=loss_scale, weight_sum=weight_sum)
    needs_grad = NO_GRADIENT._replace(hidden=True, weight=True, bias=bias_sum is not None)
    loss, found = evaluate.loss_and_gradients(static, operands, needs_grad)
    with_bias = None if bias_sum is None else added(bias_sum, present(found.bias))
    return LossAndGradients(loss, present(found.hidden), present(found.weight), with_bias)


_INSTEAD = (
    "linear_cross_entropy_and_gradients returns gradients already: differentiate linear_cross_entropy, or pull the "
    "gradient of hidden back through the model by jax.vjp."
)
