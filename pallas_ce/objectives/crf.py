"""A linear-chain conditional random field over candidate tags, on emission scores from anywhere."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.head import common_dtype
from pallas_ce.objectives.post_training.sequences import token_mask
from pallas_ce.parallel.entry import program
from pallas_ce.statistics import labels as label_rule
from pallas_ce.statistics.cross_entropy import Reduction, reduce_rows
from pallas_ce.streaming.loops import vary_like


def linear_chain_crf(
    emissions: ArrayLike,
    tags: ArrayLike,
    transitions: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
) -> jax.Array:
    r"""Negative log-likelihood of a linear-chain conditional random field over K candidate tags for each position.

    A sequence of tags `y` has score `s(y) = Σ_t emissions[t, y_t] + Σ_{t>0} transitions[y_{t-1}, y_t]`, and

        loss = log Σ_{y'} e^{s(y')} - s(y)

    by the forward algorithm in log space, O(T·K²) time. K may be small where the vocabulary is not: emission scores are
    then the log-probabilities of K candidates for each position, read by their ids from a streamed head
    (`linear_log_probs` with labels `[..., T, K]`), and `tags` are places among these candidates. They are the logits
    minus the position's log-sum-exp; a constant for all candidates of a position changes nothing, so that logits and
    log-probabilities give the same loss and the same gradients.

    Where positions have fewer than K candidates, the rest of `candidates` is padded with -100. To `linear_log_probs`
    that is an ignored label, of log-probability 0: no candidate's is higher. The emission has to be made -inf,
    `jnp.where(candidates < 0, -jnp.inf, emissions)`, and then the loss is as without the padding. `mask` closes whole
    positions only; where all candidates behind it are -100, the head skips these positions.

    Args:
        emissions: `[..., T, K]` floating; -inf closes a candidate.
        tags: `[..., T]` integers in `[0, K)`. A sequence with another value where `mask` is True does not count.
        transitions: `[K, K]` from (first axis) and to (second); or `[..., T-1, K, K]` where candidates differ from
            position to position, the i-th between positions i and i+1. -inf forbids. A closed candidate's may be
            anything finite.
        mask: `[..., T]` bool, True up to the end of the sequence and False behind it; None: all True. Only positions
            before the first False count, and a sequence without any does not. Emissions, tags and transitions that
            only other positions would use may hold anything.
        reduction: "mean" over the sequences that count, "sum", or "none" for `[...]`.
        normalizer: scalar for the mean, in place of the number of sequences.

    Returns:
        Array: `[]`, or `[...]` for "none", float32 (float64 for float64). +inf, with gradient 0, for tags that a
        transition or emission of -inf forbids; NaN where a score that is read is NaN.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce import linear_chain_crf
        >>> uniform = linear_chain_crf(jnp.zeros((4, 3)), jnp.array([0, 1, 2, 0]), jnp.zeros((3, 3)))
        >>> print(uniform, 4 * jnp.log(3.0))
        4.394449 4.394449

        Two or three candidates for each position, out of 50 tags:

        >>> import jax
        >>> from pallas_ce import linear_log_probs
        >>> candidates = jnp.array([[3, 7, 9], [4, 8, -100], [5, 1, 2], [6, 0, -100]])
        >>> def loss(hidden, weight):
        ...     emissions = linear_log_probs(hidden, weight, candidates)
        ...     emissions = jnp.where(candidates < 0, -jnp.inf, emissions)
        ...     return linear_chain_crf(emissions, jnp.array([0, 1, 2, 0]), jnp.zeros((3, 3)))
        >>> hidden, weight = jnp.ones((4, 8)), jnp.zeros((50, 8))
        >>> print(loss(hidden, weight), jnp.log(3.0 * 2 * 3 * 2))
        3.583519 3.583519
        >>> [gradient.shape for gradient in jax.grad(loss, (0, 1))(hidden, weight)]
        [(4, 8), (50, 8)]

    References:
        "Conditional Random Fields" (Lafferty, McCallum, Pereira), section 3.
    """
    checks.check_reduction(reduction, normalizer)
    emissions = checks.floating("emissions", emissions)
    transitions, tags = checks.floating("transitions", transitions), checks.integers("tags", tags)
    if emissions.ndim < 2 or 0 in emissions.shape[-2:]:
        raise ValueError(f"emissions has shape {emissions.shape}; it must be [..., T, K] with T and K at least 1")
    *batch, length, candidates = emissions.shape
    if tags.shape != (*batch, length):
        raise ValueError(f"tags have shape {tags.shape}; emissions' {(*batch, length)} is needed")
    square = (candidates, candidates)
    if transitions.shape not in (square, (*batch, length - 1, *square)):
        raise ValueError(
            f"transitions has shape {transitions.shape}; it must be {square}, or {(*batch, length - 1, *square)} with "
            "one matrix for each pair of neighbours"
        )
    valid, normalizer = token_mask(mask, tags.shape), checks.normalizer(normalizer)
    return _linear_chain_crf(reduction, label_rule.as_array(tags), emissions, transitions, valid, normalizer)


@program(static=1, by_row=lambda reduction, *_: reduction == "none")
def _linear_chain_crf(
    reduction: str,
    tags: jax.Array,
    emissions: jax.Array,
    transitions: jax.Array,
    mask: jax.Array,
    normalizer: Any | None,
) -> jax.Array:
    *batch, length, k = emissions.shape
    wide = common_dtype(common_dtype(emissions.dtype, transitions.dtype), jnp.float32)
    emissions, transitions = emissions.reshape(-1, length, k).astype(wide), transitions.astype(wide)
    if transitions.ndim > 2:
        transitions = transitions.reshape(len(emissions), length - 1, k, k)
    valid = jnp.cumprod(mask.reshape(-1, length).astype(jnp.int32), axis=1).astype(bool)
    ids = label_rule.canonical(tags.reshape(-1, length), k)
    counts = valid[:, 0] & jnp.all((ids != label_rule.NO_TARGET) | ~valid, axis=1)
    values = _losses(emissions, ids, transitions, valid & counts[:, None])
    loss = reduce_rows(values, counts, None, reduction, normalizer)
    return loss.reshape(batch) if reduction == "none" else loss


def _losses(emissions: jax.Array, tags: jax.Array, transitions: jax.Array, live: jax.Array) -> jax.Array:
    """`log Σ_y e^{s(y)} - s(tags)` `[B]`, from scores less the tags' own.

        α_t[j] = E_t[j] - E_t[y_t] + log Σ_i e^{α_{t-1}[i] + A[i, j] - A[y_{t-1}, y_t]}

    with emissions E and transitions A, where the largest entry of α_t, a constant, is taken off at each position and
    added up beside it. So numbers are small where a tagger is sure, whatever its scores have in common, and the tags'
    own path stays at 0.

    Args:
        emissions: `[B, T, K]`.
        tags: `[B, T]`, in `[0, K)` where live.
        transitions: `[K, K]` or `[B, T-1, K, K]`.
        live: `[B, T]` bool, True up to the end of a sequence that counts: nothing else is read.
    """
    tags = jnp.where(live, tags, 0)
    own = jnp.take_along_axis(emissions, tags[..., None], axis=2)[..., 0]
    between = None
    if transitions.ndim == 2:
        moves = transitions[tags[:, :-1], tags[:, 1:]]
    else:
        rows = jnp.take_along_axis(transitions, tags[:, :-1, None, None], axis=2)[:, :, 0]
        moves = jnp.take_along_axis(rows, tags[:, 1:, None], axis=2)[..., 0]
        between = jnp.moveaxis(transitions, 1, 0)
    (own, may_emit), (moves, may_move) = _possible(own, live), _possible(moves, live[:, 1:])

    def step(alpha: jax.Array, x: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> Any:
        emission, is_live, move, matrix = x
        matrix = (transitions[None] if matrix is None else matrix) - move[:, None, None]
        reached = _log_sum_exp(alpha[:, :, None] + jnp.where(is_live[:, None, None], matrix, 0.0))
        return _without_largest(jnp.where(is_live[:, None], emission + reached, alpha))

    emissions = jnp.where(live[..., None], emissions - own[..., None], 0.0)
    first, of_first = _without_largest(emissions[:, 0])
    by_position = (jnp.moveaxis(emissions, 1, 0)[1:], live.T[1:], moves.T, between)
    alpha, of_others = jax.lax.scan(step, vary_like(first, (transitions, live)), by_position)
    loss = of_first + jnp.sum(of_others, axis=0) + _log_sum_exp(alpha)
    return jnp.where(may_emit & may_move | jnp.isnan(loss), loss, jnp.inf)


def _possible(scores: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores `[B, T]` of the tags, 0 where they are -inf or not live, and whether all that are live are above -inf."""
    forbidden = live & jnp.isneginf(scores)
    return jnp.where(live & ~forbidden, scores, 0.0), ~jnp.any(forbidden, axis=1)


def _without_largest(alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`alpha [B, K]` less each row's largest entry, a constant, and that entry; where it is not finite, 0 for it."""
    largest = jax.lax.stop_gradient(jnp.max(alpha, axis=1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return alpha - largest[:, None], largest


def _log_sum_exp(x: jax.Array) -> jax.Array:
    """Over axis 1. Where all are -inf, -inf with gradient 0 instead of nan."""
    none = jnp.all(jnp.isneginf(x), axis=1)
    safe = jax.nn.logsumexp(jnp.where(jnp.expand_dims(none, 1), 0.0, x), axis=1)
    return jnp.where(none, -jnp.inf, safe)
