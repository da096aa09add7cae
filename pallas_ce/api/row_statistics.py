"""`linear_row_statistics`, for any loss written on top of them, and `linear_log_probs`, for post-training."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.head_options import LabelledOptions, StatisticsOptions, computed_by
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Known, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.labels import NO_TARGET, as_array, canonical, repeated
from pallas_ce.statistics.logits import present, product
from pallas_ce.statistics.row import RowStatistics, from_primitives, gap, primitive_names, spread
from pallas_ce.streaming.rows import zeroed


@program(static=1)
def compute_statistics(names: tuple[str, ...], problem: Problem, known: Known | None = None) -> RowStatistics:
    """The statistics. `known`: what `evaluate.keep` has found for the same call."""
    call, operands = statistics_call(names, problem)
    return from_primitives(evaluate.statistics(call, operands._replace(known=known)), names)


def statistics_call(names: tuple[str, ...], problem: Problem) -> tuple[Call, Operands]:
    """The call on all rows: no label is special."""
    return Call(problem.how, primitive_names(names)), Operands(*problem.rows(), problem.row_mask)


@computed_by(compute_statistics)
def linear_row_statistics(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike | None = None,
    *,
    statistics: Sequence[str] = ("lse", "target_logit"),
    **options: Unpack[StatisticsOptions],
) -> tuple[tuple[str, ...], Problem]:
    r"""Statistics of each row of logits, without storing them.

        logits = softcap(logit_scale · (vocab_scale·(hidden·weight) + bias)) / temperature

    Differentiable in `hidden`, `weight`, `bias`, `vocab_scale` and `logit_scale`, in reverse mode, once, with any
    cotangents: a loss written in plain JAX on top of the statistics trains. The backward recomputes tiles of the logits
    (`2·N·H·V` operations) beside its two products; the forward keeps O(N) numbers.

    Args:
        hidden: `[..., H]` bfloat16, float16, float32 or float64; N rows in all, zero rows included.
        weight: `[V', H]` (`vocab_axis=0`) or `[H, V']` (`vocab_axis=1`), floating. `explain` tells where a copy is
            made; none is transposed.
        labels: `[...]`, any integer dtype; needed for `target_logit` and `log_prob`. No label is special here: one
            outside `[0, vocab_size)` has `target_logit` 0, and `log_prob` `-lse`; mask its row, or take
            `linear_log_probs`, where it is 0. `[..., K]`: K targets for each row.
        statistics: names of the statistics to return, out of `RowStatistics`' fields. Others cost nothing.

    Returns:
        RowStatistics: fields `[...]`, float32 (float64 for float64; `argmax` int32), None where not asked for; with K
            targets, `target_logit` and `log_prob` are `[..., K]`.

    Raises:
        ValueError: shapes that do not fit, unknown names, a budget too small for one row.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice or in forward mode.

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
    return checks.check_statistics(statistics, problem.labels), problem.decided()


class LogProbs(NamedTuple):
    """What `linear_log_probs` found of each row `p = softmax(z)`; None where not asked for, 0 in ignored rows.

    Attributes:
        log_probs: `log p_t`, the labels' shape; 0 for ignored labels.
        entropy: `-Σ_v p_v log p_v` in nats, `[...]`.
        sum_sq_probs: `Σ_v p_v²`, `[...]`.
        hit: bool, the labels' shape: whether the label is the largest logit's, the lowest one where several tie; False
            for ignored labels.
        in_support: bool `[...]`, with `support`: whether it has the label; False for ignored labels.
    """

    log_probs: jax.Array
    entropy: jax.Array | None = None
    sum_sq_probs: jax.Array | None = None
    hit: jax.Array | None = None
    in_support: jax.Array | None = None


@program(static=1)
def compute_log_probs(
    names: tuple[str, ...], problem: Problem, support: jax.Array | None = None, known: Known | None = None
) -> Any:
    """The log-probabilities, or everything asked for. `known`: what `evaluate.keep` has found for the same call."""
    call, operands, labels = log_probs_call(names, problem, support)
    values, counts = evaluate.statistics(call, operands._replace(known=known)), labels != NO_TARGET
    if support is not None:
        return _over_support(names, values["target_logit"], operands, labels)
    found = from_primitives(values, names)
    hit = None if found.argmax is None else counts & (spread(found.argmax, labels) == labels)
    log_probs = jnp.where(counts, present(found.log_prob), 0)
    return log_probs if names == ("log_prob",) else LogProbs(log_probs, found.entropy, found.sum_sq_probs, hit)


def log_probs_call(
    names: tuple[str, ...], problem: Problem, support: jax.Array | None
) -> tuple[Call, Operands, jax.Array]:
    """The call on the rows that count, whose targets are the labels or a support's ids; and the labels."""
    batch, head, mask = problem.rows_that_count()
    labels, primitives = present(batch.labels), primitive_names(names)
    if support is not None:  # in ascending order, and none in place of all but the first of equal ones
        primitives = frozenset({"target_logit"})
        ids = jnp.sort(problem.shifted(canonical(support, head.spec.vocab_size), NO_TARGET), axis=-1)
        batch = batch._replace(labels=jnp.where(repeated(ids), NO_TARGET, ids))
    return Call(problem.how, primitives), Operands(batch, head, mask), labels


def _over_support(names: tuple[str, ...], logits: jax.Array, operands: Operands, labels: jax.Array) -> LogProbs:
    """Of `p = softmax(logits)` over each row's set of ids alone.

    A label outside its row's set has log-probability -inf and no gradient.
    """
    ids = present(operands.batch.labels)
    place = ids == labels[..., None]
    in_support = (labels != NO_TARGET) & jnp.any(place, axis=-1)
    z = jnp.where(ids != NO_TARGET, logits, -jnp.inf)
    distance = gap(z, jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True)))
    exponentials = jnp.exp(distance)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    none = total == 0  # a row without any id, or of -inf only, has no probabilities
    total = jnp.where(none, 1.0, total)
    log_p, p = distance - jnp.log(total), exponentials / total
    of_label = jnp.sum(jnp.where(place, log_p, 0.0), axis=-1)
    top = jnp.take_along_axis(ids, jnp.argmax(z, axis=-1)[..., None], axis=-1)[..., 0]
    found = LogProbs(
        jnp.where(in_support & ~none[..., 0], of_label, -jnp.inf),
        -jnp.sum(product(p, jnp.where(p == 0, 0.0, log_p)), axis=-1) if "entropy" in names else None,
        jnp.sum(p * p, axis=-1) if "sum_sq_probs" in names else None,
        in_support & (top == labels) if "argmax" in names else None,
        in_support,
    )
    return zeroed(operands.mask, found)


@computed_by(compute_log_probs)
def linear_log_probs(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    support: ArrayLike | None = None,
    return_entropy: bool = False,
    return_sum_sq_probs: bool = False,
    return_hit: bool = False,
    shift: int = 0,
    **options: Unpack[LabelledOptions],
) -> tuple[tuple[str, ...], Problem, jax.Array | None]:
    r"""Log-probabilities of `labels` under `softmax(z)`, without storing logits.

        z = softcap(logit_scale · (vocab_scale·(hidden·weight) + bias)) / temperature,   log p_t = z_t - log Σ_v exp z_v

    Differentiable in `hidden`, `weight`, `bias`, `vocab_scale` and `logit_scale`, in reverse mode, once, through
    everything returned together, with any cotangents: the input of policy-gradient, preference and distillation losses
    (`pallas_ce.post_training`). The backward recomputes tiles of logits; the forward keeps O(N) numbers. For a plain
    sum over rows, `linear_loss` takes the cheaper mode in_forward.

    Args:
        hidden: `[..., H]` bfloat16, float16, float32 or float64.
        weight: `[V', H]` (`vocab_axis=0`) or `[H, V']` (`vocab_axis=1`), floating.
        labels: `[...]`, any integer dtype, or `[..., K]` for the log-probabilities of K given tokens of each row; a
            token may be given several times. Labels outside `[0, vocab_size)` count as ignored.
        temperature: positive; a number, an array `[]` or one `[...]` of a temperature for each row. A constant: it gets
            no gradient. A number costs nothing.
        support: `[..., K]`, any integer dtype: with each label the ids that its sampler kept (top-k, top-p), in any
            order. `softmax` is over their logits alone, and so are entropy, squares and hits. Ids outside
            `[0, vocab_size)`, say -1, are padding; one that is given twice counts once. A label outside its set has
            log-probability -inf and no gradient. Labels are then `[...]`. Takes memory for `[N, K]` numbers.
        return_entropy: return `LogProbs` with the rows' entropy.
        return_sum_sq_probs: return `LogProbs` with the rows' sum of squared probabilities.
        return_hit: return `LogProbs` with whether a label is the most likely token.
        shift: a row meets the labels `shift` positions later, at its own temperature; see `linear_cross_entropy`.
        ignore_index: this label is ignored: log-probability and gradient exactly 0. The work of rows whose labels are
            all ignored is skipped, and what they hold does not matter.
        dtype: compute dtype of the products' operands; by default the inputs' common one. With `jnp.float32`, the
            float32 head of reinforcement learning, bfloat16 inputs are cast tile by tile, and the gradient products
            take dlogits that are not rounded to bfloat16; sums and log-probabilities are float32 in any case.

    Returns:
        The log-probabilities, float32 (float64 for float64), in the labels' shape; `LogProbs` where more is asked,
        and with `support`, whose `in_support` tells which rows a loss can use.

    Raises:
        ValueError: shapes or values that do not fit, a named implementation that cannot serve.
        TypeError: dtypes that do not fit; `validate_labels` on traced labels.
        NotImplementedError: when differentiated twice or in forward mode; see `implementation="reference"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_log_probs
        >>> hidden, weight = jnp.ones((2, 3)), jnp.zeros((4, 3))
        >>> print(linear_log_probs(hidden, weight, jnp.array([1, -100])))
        [-1.3862944  0.       ]
        >>> found = linear_log_probs(hidden, weight, jnp.array([[1, 2], [0, -100]]), return_entropy=True)
        >>> found.log_probs.shape, found.entropy.shape
        ((2, 2), (2,))
        >>> def objective(hidden):  # log-probability and entropy bonus, differentiated together
        ...     found = linear_log_probs(hidden, weight, jnp.array([1, -100]), temperature=0.7, return_entropy=True)
        ...     return jnp.sum(found.log_probs + 0.01 * found.entropy)
        >>> jax.grad(objective)(hidden).shape
        (2, 3)
        >>> found = linear_log_probs(hidden, weight, jnp.array([1, 3]), support=jnp.array([[0, 1], [2, -1]]))
        >>> print(found.log_probs, found.in_support)
        [-0.6931472       -inf] [ True False]
        >>> narrow = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)  # a float32 head of bfloat16 tensors
        >>> def policy_gradient(hidden, weight):
        ...     return linear_log_probs(hidden, weight, jnp.array([1, 2]), dtype=jnp.float32).sum()
        >>> value, gradients = jax.value_and_grad(policy_gradient, (0, 1))(*narrow)
        >>> value.dtype.name, [gradient.dtype.name for gradient in gradients]
        ('float32', ['bfloat16', 'bfloat16'])

    References:
        "From Projection to Prediction: Beyond Logits for Scalable Language Models", Algorithms 1 and 2.
    """
    ids = checks.ids("labels", labels)
    of_rows: dict[str, Any] = {"temperature": temperature, "shift": shift, "reduction": "none"}
    problem = Problem.read(hidden, weight, ids, several=True, **of_rows, **options)
    asked = {"log_prob": True, "entropy": return_entropy, "sum_sq_probs": return_sum_sq_probs, "argmax": return_hit}
    names = tuple(name for name, wanted in asked.items() if wanted)
    if support is None:
        return names, problem.decided(), None
    kept, leading, of_labels = checks.integers("support", support), problem.leading, present(problem.labels)
    if kept.shape[:-1] != leading or kept.ndim != len(leading) + 1 or not kept.shape[-1]:
        raise ValueError(f"support has shape {kept.shape}; {leading} with K >= 1 ids of each row behind it is needed")
    if of_labels.shape != leading:
        raise ValueError(f"support takes one label of each row, {leading}, and labels have shape {of_labels.shape}")
    support = as_array(kept)
    # It is decided for K targets a row.
    how = dataclasses.replace(problem, labels=support).decided((of_labels,)).how
    return names, dataclasses.replace(problem, how=how), support
