"""`linear_cross_entropy`: the loss of a language model's head."""

import dataclasses
from typing import Any, Unpack

import jax

from pallas_ce.api.checks import ArrayLike, ids
from pallas_ce.api.documented import documented
from pallas_ce.api.head_options import CrossEntropyOptions
from pallas_ce.api.options import call_metrics
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Known, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.cross_entropy import CrossEntropy, Metrics
from pallas_ce.statistics.logits import present
from pallas_ce.streaming.gradient_products import Arrays, PerInput


@documented
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike,
    *,
    shift: int = 0,
    return_metrics: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> Any:
    r"""Cross entropy of `logits = softcap(logit_scale · (hidden·weight + bias))` with `labels`, without storing logits.

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
        NotImplementedError: when differentiated twice; see `implementation="reference"`.

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
    found = compute(*read(hidden, weight, labels, shift=shift, return_metrics=return_metrics, **options))
    return found if return_metrics else found[0]


def read(hidden: Any, weight: Any, labels: Any, **options: Any) -> tuple[Problem]:
    """Checks the arguments of `linear_cross_entropy`, for `compute` and `keep`."""
    return (Problem.read(hidden, weight, ids("labels", labels), **options).decided(),)


@program(by_row=lambda problem, *_: (problem.options.by_row, False))
def compute(problem: Problem, known: Known | None = None) -> tuple[jax.Array, Metrics | None]:
    """The loss and, where asked for, its metrics. `known`: what `keep` has found for the same call."""
    call, operands = operands_of(problem)
    value, found = evaluate.loss(call, operands._replace(known=known), problem.options.by_row)
    if not problem.options.return_metrics:
        return value, None
    assert isinstance(call.row_total, CrossEntropy)
    targets, mask = present(operands.batch.labels), present(operands.mask)
    return value, call_metrics(call.row_total, found, targets, mask, operands.inputs, problem.how.total)


def keep(problem: Problem, needs_grad: PerInput[bool]) -> Known | None:
    """What `compute` takes as `known`, for gradients of `needs_grad` or fewer."""
    return evaluate.keep(*operands_of(problem), needs_grad)


def add_gradients(
    problem: Problem, known: Known, needs_grad: PerInput[bool], cotangent: jax.Array, weight_sum: jax.Array
) -> Arrays:
    """The gradients of `compute`'s loss, a scalar; in place of the weight's there is `weight_sum` with it added.

    For mode recompute, from what `keep` has found. `cotangent []` and `weight_sum` are in the accumulator dtype.
    """
    call, operands = operands_of(problem)
    operands = operands._replace(known=known, cotangent=cotangent, weight_sum=weight_sum)
    return evaluate.loss_and_gradients(call, operands, needs_grad)[1]


def operands_of(problem: Problem) -> tuple[Call, Operands]:
    """The problem as rows, a head, and a row loss with its inputs."""
    batch, head, mask = problem.rows_that_count()
    options, wide = problem.options.of_rows(problem.shifted), problem.spec.accumulator
    head = dataclasses.replace(head, logit_weights=options.logit_weights(problem.spec.vocab_size, wide))
    loss, inputs = options.row_loss(wide, present(batch.labels), present(mask), problem.how.total)
    names = loss.names | (frozenset({"argmax", "lse"}) if options.return_metrics else frozenset())
    return Call(problem.how, names, loss), Operands(batch, head, mask, inputs)
