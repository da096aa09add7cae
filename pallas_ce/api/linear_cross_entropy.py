"""`linear_cross_entropy`, the loss of a language model's head, and its gradients added to a sum of micro-batches."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.head_options import CrossEntropyOptions, computed_by
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import LowRank, WeightLike
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Known, Operands, added
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.cross_entropy import CrossEntropy, Metrics, safe_inverse
from pallas_ce.streaming.gradient_products import NO_GRADIENT, Arrays, PerInput
from pallas_ce.streaming.rows import flat_rows, present, zeroed


def operands_of(problem: Problem) -> tuple[Call, Operands]:
    """The problem as rows, a head, and a row loss with its inputs: by row `[...]`, and those that all rows share."""
    batch, head, mask = problem.rows_that_count()
    options, wide, divisor = problem.options, problem.spec.accumulator, problem.how.divisor
    ids, counts, smoothed = present(batch.labels), present(mask), options.label_smoothing is not None
    u = None  # what smoothing reads, c/V; 1/V throughout without class weights
    weight = problem.token_weights
    by_row = {} if weight is None else {"token_weight": weight}
    weight = jnp.ones(ids.shape, wide) if weight is None else weight
    normalizer = z_normalizer = divisor(jnp.sum(jnp.where(counts, weight, 0)))
    if options.class_weights is not None:
        class_weights = jax.lax.stop_gradient(options.class_weights.astype(wide))
        u = class_weights / problem.spec.vocab_size if smoothed else None
        if not class_weights.size:  # nothing counts in an empty vocabulary
            class_weights = jnp.zeros(1, wide)
        by_row["class_weight"] = jnp.where(counts, class_weights[jnp.where(counts, ids, 0)], 0)
        normalizer = divisor(jnp.sum(jnp.where(counts, weight * by_row["class_weight"], 0)))
    factors = {"smoothing": options.label_smoothing, "z_loss": options.z_loss}
    shared = {name: jnp.asarray(x, wide) for name, x in factors.items() if x is not None}
    if options.normalizer is not None:
        normalizer = z_normalizer = jnp.asarray(options.normalizer, wide)
    if options.reduction == "sum":
        normalizer = z_normalizer = jnp.ones((), wide)
    shared["inverse_normalizer"], shared["inverse_z_normalizer"] = map(safe_inverse, (normalizer, z_normalizer))
    loss = CrossEntropy(smoothed, options.z_loss is not None, options.reduction == "mean")
    names = loss.names | (frozenset({"argmax", "lse"}) if options.return_metrics else frozenset())
    operands = Operands(batch, dataclasses.replace(head, logit_weights=u), mask, (by_row, shared))
    return Call(problem.how, names, loss), operands


def _by_row(problem: Problem, *_: Any) -> Any:
    by_row = problem.options.by_row
    return (by_row, False) if problem.options.return_metrics else by_row


@program(by_row=_by_row)
def compute(problem: Problem, known: Known | None = None) -> Any:
    """The loss or, with metrics, both. `known`: what `evaluate.keep` has found for the same call."""
    call, operands = operands_of(problem)
    value, found = evaluate.loss(call, operands._replace(known=known), problem.options.by_row)
    if not problem.options.return_metrics:
        return value
    loss, total, (by_row, shared) = call.row_total, problem.how.total, operands.inputs
    assert isinstance(loss, CrossEntropy)
    flat = flat_rows(problem.leading, (found, by_row, present(operands.mask), present(operands.batch.labels)))
    found, by_row, mask, ids = flat
    read, by_row = zeroed(mask, (found, by_row))
    cross_entropy, z_part = loss.parts(read, (by_row, shared))
    count = total(jnp.sum(mask, dtype=jnp.int32))
    wide = cross_entropy.dtype
    inverse_count = safe_inverse(count.astype(wide))
    z_sum = jnp.zeros((), wide) if z_part is None else total(jnp.sum(z_part, where=mask))
    metrics = Metrics(
        cross_entropy=total(jnp.sum(cross_entropy, where=mask)) * shared["inverse_normalizer"],
        z_loss=z_sum * shared["inverse_z_normalizer"],
        num_tokens=count,
        accuracy=total(jnp.sum(mask & (found["argmax"] == ids), dtype=wide)) * inverse_count,
        mean_lse=total(jnp.sum(found["lse"])) * inverse_count,
    )
    return value, jax.tree.map(jax.lax.stop_gradient, metrics)


@computed_by(compute)
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike,
    *,
    shift: int = 0,
    return_metrics: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> tuple[Problem]:
    r"""Cross entropy of a head's logits with `labels`, without storing logits.

        logits = softcap(logit_scale · (vocab_scale·(hidden·weight) + bias))

    For a row z with label t, token weight w, class weights c (1 each by default), smoothing α and z-loss factor β:

        loss = w·[ (1-α)·c_t·(lse - z_t) + α/V·Σ_v c_v·(lse - z_v) ]  +  w·β·lse²,     lse = log Σ_v exp z_v

    which is PyTorch's `cross_entropy` where the options are its. The mean divides the first part by `Σ w·c_t` and the
    z part by `Σ w`, over the tokens that count; a given `normalizer` replaces both.

    Args:
        hidden: `[..., H]` bfloat16, float16, float32 or float64; any leading shape, zero tokens included.
        weight: `[V', H]` (`vocab_axis=0`: tied embeddings, PyTorch) or `[H, V']` (`vocab_axis=1`: Flax Dense kernels).
            Float32 master weights with `dtype=bfloat16` are cast inside; their gradient is the float32 accumulator.
            "mosaic_gpu" copies a slice of a larger array that is made inside the same `jit`.
        labels: `[...]`, any integer dtype. Labels outside `[0, vocab_size)` count as ignored.
        shift: 1 where the hidden state of a position predicts the next one's label, along the last of the leading axes:
            the loss of `hidden[..., :-1, :]` with `labels[..., 1:]` and `token_weights[..., 1:]`, without the copy of
            hidden. Positions whose label would lie behind the last one do not count. Any number from 0 on.
        return_metrics: return `(loss, Metrics)`.

    Returns:
        The loss, float32 (float64 for float64): `[]`, or `[...]` for "none"; 0.0 when no token counts. With
        `return_metrics`, the pair `(loss, Metrics)`.

    Raises:
        ValueError: shapes or values that do not fit, "in_forward" with `reduction="none"`, a named implementation that
            cannot serve, a budget too small for one row.
        TypeError: dtypes that do not fit; `validate_labels` on traced labels.
        NotImplementedError: when differentiated twice or in forward mode; see `implementation="reference"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 5, 8))      # [batch, time, H]
        >>> weight = jax.random.normal(jax.random.key(1), (100, 8))       # [V, H]
        >>> labels = jnp.array([[1, 2, 3, 4, -100], [5, 6, -100, -100, -100]])
        >>> loss_and_gradients = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))
        >>> loss, (d_hidden, d_weight) = loss_and_gradients(hidden, weight, labels)
        >>> d_hidden.shape, d_weight.shape
        ((2, 5, 8), (100, 8))
        >>> loss, metrics = linear_cross_entropy(hidden, weight, labels, z_loss=1e-4, return_metrics=True)
        >>> int(metrics.num_tokens)
        6

    References:
        "From Projection to Prediction: Beyond Logits for Scalable Language Models": Algorithm 1 (forward), 2
        (recompute), 3 and 4 (in_forward). z-loss: "PaLM: Scaling Language Modeling with Pathways", section 5.
    """
    ids = checks.ids("labels", labels)
    return (Problem.read(hidden, weight, ids, shift=shift, return_metrics=return_metrics, **options).decided(),)


def add_gradients(
    problem: Problem, known: Known, needs_grad: PerInput[bool], cotangent: jax.Array, weight_sum: jax.Array
) -> Arrays:
    """The gradients of `compute`'s loss, a scalar; in place of the weight's there is `weight_sum` with it added.

    For mode recompute. `cotangent []` and `weight_sum` are in the accumulator dtype.
    """
    call, operands = operands_of(problem)
    operands = operands._replace(known=known, cotangent=cotangent, weight_sum=weight_sum)
    return evaluate.loss_and_gradients(call, operands, needs_grad)[1]


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


@program(by_row=lambda problem, *sums: LossAndGradients(False, True, *sums[:2]))  # type: ignore[arg-type]
def _add(
    problem: Problem, weight_sum: jax.Array, bias_sum: jax.Array | None, loss_scale: jax.Array
) -> LossAndGradients:
    problem, weight_sum, bias_sum, loss_scale = evaluate.first_order_only(
        (problem, weight_sum, bias_sum, loss_scale),
        "linear_cross_entropy_and_gradients returns gradients already: differentiate linear_cross_entropy, or pull the "
        "gradient of hidden back through the model by jax.vjp.",
    )
    if bias_sum is not None:  # so that its gradient is not rounded before it is added
        problem = dataclasses.replace(problem, bias=present(problem.bias).astype(problem.spec.accumulator))
    static, operands = operands_of(problem)
    operands = operands._replace(cotangent=loss_scale, weight_sum=weight_sum)
    needs_grad = NO_GRADIENT._replace(hidden=True, weight=True, bias=bias_sum is not None)
    loss, found = evaluate.loss_and_gradients(static, operands, needs_grad)
    with_bias = None if bias_sum is None else added(bias_sum, present(found.bias))
    return LossAndGradients(loss, present(found.hidden), present(found.weight), with_bias)


@computed_by(_add)
def linear_cross_entropy_and_gradients(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    weight_sum: ArrayLike,
    *,
    bias_sum: ArrayLike | None = None,
    loss_scale: ArrayLike = 1.0,
    **options: Unpack[CrossEntropyOptions],
) -> tuple[Problem, jax.Array, jax.Array | None, jax.Array]:
    """`linear_cross_entropy` and its gradients; the weight's is added to `weight_sum` in place.

    For gradients summed over micro-batches: `jax.grad` makes an array of the weight's size for each of them, which
    is then added to the sum; this adds tile by tile and makes none. Call it inside `jit` with the sum as the carry of a
    scan, or donated: elsewhere JAX copies what it may not overwrite. Nothing that this returns can be differentiated;
    the gradient of `hidden` is what the model below is differentiated with, by `jax.vjp`.

    In float32 (float64 for float64) the sum is added to in place, unless devices that split the rows have to add up
    the weight's gradient first, or to gather the weight. A sum in the weight's own narrower dtype is rounded once for
    each call, from a float32 gradient beside it.

    Args:
        hidden: as in `linear_cross_entropy`, like all that is not said here. There is no `shift` and no
            `return_metrics`: shift the labels before.
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
        mesh_axes: likewise; what its `grad` says does not matter here.

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
    if (axes := problem.mesh_axes) is not None:  # gradients that are returned meet collectives as `jax.grad`'s inside
        problem = dataclasses.replace(problem, mesh_axes=dataclasses.replace(axes, grad="inside"))
    if problem.options.by_row:
        raise ValueError("reduction='none' has no single gradient to add; choose 'mean' or 'sum'")
    if bias_sum is not None and problem.bias is None:
        raise ValueError("bias_sum is given and bias is None; pass both, or neither")
    sums = _sum(problem, "weight", weight_sum), None if bias_sum is None else _sum(problem, "bias", bias_sum)
    scale = jnp.asarray(checks.scalar("loss_scale", loss_scale), problem.spec.accumulator)
    return problem.decided((sums, scale)), *sums, scale


def _sum(problem: Problem, of: str, given: Any) -> jax.Array:
    array, total = getattr(problem, of), checks.array(f"{of}_sum", given)
    if total.shape != array.shape:
        raise ValueError(f"{of}_sum has shape {total.shape}; it must be {array.shape}, the shape of {of}")
    allowed = dict.fromkeys((problem.spec.accumulator.name, array.dtype.name))
    if total.dtype.name not in allowed:
        raise TypeError(f"{of}_sum is {total.dtype.name}; it must be {' or '.join(allowed)}")
    return total
