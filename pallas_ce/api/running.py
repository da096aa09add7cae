"""`linear_cross_entropy_and_gradients`: gradients of micro-batches, the weight's added where their sum lies."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike, DTypeLike
from pallas_ce.api.inputs import CheckedCall, read_head
from pallas_ce.api.linear_cross_entropy import operands_of
from pallas_ce.api.low_rank import LowRank
from pallas_ce.api.options import Options, read_options, split
from pallas_ce.api.precision import PrecisionLike
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.dispatch.settings import Settings
from pallas_ce.gradient_products import NO_GRADIENT
from pallas_ce.modes import evaluate, running
from pallas_ce.modes.sums import added
from pallas_ce.parallel.entry import program
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics.cross_entropy import Reduction
from pallas_ce.statistics.logits import present


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


def linear_cross_entropy_and_gradients(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    weight_sum: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    bias_sum: ArrayLike | None = None,
    loss_scale: ArrayLike = 1.0,
    vocab_axis: int = 0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    token_weights: ArrayLike | None = None,
    class_weights: ArrayLike | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logit_softcap: float | None = None,
    logit_scale: ArrayLike = 1.0,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
    backward: Backward = "auto",
    implementation: Implementation | None = None,
    scratch_bytes: int | None = None,
    mesh_axes: MeshAxes | None = None,
    validate_labels: bool = False,
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
        bias: `[V']`.
        bias_sum: of the bias's shape, float32 (float64) or the bias's dtype; None: the bias is a constant.
        loss_scale: `[]`, what the gradients are multiplied by: one over the number of micro-batches, or a scale that
            keeps float16 gradients in range.
        vocab_axis: the weight's vocabulary axis.
        vocab_size: V, where the weight is padded.
        ignore_index: labels of tokens that do not count.
        token_weights: w `[...]`, a constant here.
        class_weights: c `[V]`.
        label_smoothing: α.
        z_loss: β.
        logit_softcap: the cap of the logits.
        logit_scale: their scale, a constant here.
        reduction: "mean" or "sum".
        normalizer: the mean's divisor. With all micro-batches' divisor, their losses add up to the whole mean.
        dtype: compute dtype.
        precision: how float32 operands are multiplied.
        backward: "in_forward" (three products), "recompute" (four, less scratch) or "auto".
        implementation: "xla", "mosaic_gpu", "triton", "reference" or None.
        scratch_bytes: bound on scratch memory.
        mesh_axes: inside a `shard_map`, how the arrays are split over its axes.
        validate_labels: raise on labels outside the vocabulary; only outside jit.

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
    return _checked(**locals())


def _checked(*, weight_sum: Any, bias_sum: Any, loss_scale: Any, **arguments: Any) -> LossAndGradients:
    if isinstance(arguments["weight"], LowRank):
        raise TypeError(
            "weight is a LowRank; the gradients of its terms are small, so differentiate linear_cross_entropy instead"
        )
    if arguments["reduction"] == "none":
        raise ValueError("reduction='none' has no single gradient to add; choose 'mean' or 'sum'")
    of_loss, of_head = split(arguments)
    call = read_head(**of_head, needs_labels=True)
    options = read_options(call.leading, call.spec.vocab_size, **of_loss)
    if bias_sum is not None and call.bias is None:
        raise ValueError("bias_sum is given and bias is None; pass both, or neither")
    sums = (
        _sum("weight_sum", weight_sum, "weight", call.weight, call),
        None if call.bias is None or bias_sum is None else _sum("bias_sum", bias_sum, "bias", call.bias, call),
    )
    loss_scale = jnp.asarray(checks.scalar("loss_scale", loss_scale), call.spec.accumulator)
    others = (options, sums, loss_scale)
    settings = call.settings(others, scalar_loss=True, backward=options.backward)
    return _compute(settings, call, options, *sums, loss_scale)


def _sum(name: str, given: Any, of: str, array: jax.Array, call: CheckedCall) -> jax.Array:
    total = checks.array(name, given)
    if total.shape != array.shape:
        raise ValueError(f"{name} has shape {total.shape}; it must be {array.shape}, the shape of {of}")
    allowed = dict.fromkeys((call.spec.accumulator.name, array.dtype.name))
    if total.dtype.name not in allowed:
        raise TypeError(f"{name} is {total.dtype.name}; it must be {' or '.join(allowed)}")
    return total


def _lie_as(settings: Settings, call: CheckedCall, options: Options, *sums: Any) -> Any:
    places: Any = (False, True, *sums[:2])
    return LossAndGradients(*places)


@program(static=1, by_row=_lie_as)
def _compute(
    settings: Settings,
    call: CheckedCall,
    options: Options,
    weight_sum: jax.Array,
    bias_sum: jax.Array | None,
    loss_scale: jax.Array,
) -> LossAndGradients:
    given = evaluate.first_order_only((call, options, weight_sum, bias_sum, loss_scale), _INSTEAD)
    call, options, weight_sum, bias_sum, loss_scale = given
    if bias_sum is not None:  # so that its gradient is not rounded before it is added
        call = dataclasses.replace(call, bias=present(call.bias).astype(call.spec.accumulator))
    static, operands = operands_of(settings, call, options)
    operands = operands._replace(cotangent=loss_scale, weight_sum=weight_sum)
    needs_grad = NO_GRADIENT._replace(hidden=True, weight=True, bias=bias_sum is not None)
    loss, found = running.loss_and_gradients(static, operands, needs_grad)
    with_bias = None if bias_sum is None else added(bias_sum, present(found.bias))
    return LossAndGradients(loss, present(found.hidden), present(found.weight), with_bias)


_INSTEAD = (
    "linear_cross_entropy_and_gradients returns gradients already: differentiate linear_cross_entropy, or pull the "
    "gradient of hidden back through the model by jax.vjp."
)
