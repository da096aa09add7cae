"""Distillation from the log-probabilities of a teacher's K most likely tokens, where the student's are read by id."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.objectives.post_training import sequences
from pallas_ce.statistics.divergences import Name, not_negative, over_mixture
from pallas_ce.streaming.rows import zeroed


def top_k_distillation_loss(
    log_probs: ArrayLike,
    teacher_log_probs: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    divergence: Name = "forward_kl",
    beta: float = 0.5,
    tail: bool = True,
    aggregation: sequences.Aggregation = "token_mean",
    length: float | None = None,
    normalizer: ArrayLike | None = None,
) -> jax.Array:
    r"""The divergence of a student p from a teacher q, on the teacher's K most likely tokens.

    With `tail` each distribution is K probabilities and the other tokens' together, `1 - Σ_k p_k`. Without, the K are
    normalised to sum to 1. Merging tokens never raises a divergence: with the tail it is a lower bound of the
    one over the vocabulary, and exact where the other tokens are in the teacher's proportions.

        forward_kl   KL(q ‖ p) = Σ_k q_k·(log q_k - log p_k)
        reverse_kl   KL(p ‖ q)
        jsd          β·KL(q ‖ m) + (1-β)·KL(p ‖ m),   m = β·q + (1-β)·p

    Args:
        log_probs: `[..., T, K]`, the student's at the teacher's tokens: `linear_log_probs` with labels `[..., T, K]`.
        teacher_log_probs: `[..., T, K]`, log q, normalised over the vocabulary; -inf where a row has fewer than K
            tokens: those places take part on neither side. A constant: it gets no gradient.
        mask: bool `[..., T]`, the tokens that count; None: all. The others contribute exactly 0, whatever they hold.
        divergence: which.
        beta: β in (0, 1), for "jsd".
        tail: whether the other tokens take part. Their probability is at least the dtype's epsilon.
        aggregation: of the tokens, as in `policy_loss`: "token_mean", "sequence_mean", "fixed_length" or "none".
        length: the constant of "fixed_length".
        normalizer: as in `policy_loss`.

    Returns:
        Array: the loss in nats, a scalar (`[..., T]` for "none"), float32 or wider.

    Raises:
        ValueError: shapes or names that do not fit, β outside (0, 1).
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_log_probs
        >>> from pallas_ce.post_training import top_k_distillation_loss
        >>> hidden, weight = jnp.ones((2, 3)), jnp.zeros((10, 3))  # the student: uniform over ten tokens
        >>> ids = jnp.array([[4, 1], [2, 7]])
        >>> teacher = jnp.log(jnp.array([[0.5, 0.3], [0.1, 0.1]]))
        >>> loss = top_k_distillation_loss(linear_log_probs(hidden, weight, ids), teacher, aggregation="none")
        >>> print(loss.round(4))
        [0.857 0.   ]

    References:
        Generalised Jensen-Shannon divergence: "On-Policy Distillation of Language Models" (GKD), arXiv 2306.13649. For
        a temperature, pass `temperature` to `linear_log_probs` and multiply the loss by its square: "Distilling the
        Knowledge in a Neural Network", arXiv 1503.02531.
    """
    checks.choice("divergence", divergence, get_args(Name))
    if divergence == "jsd":
        beta = checks.beta(beta)
    log_probs, mask = sequences.tokens(log_probs, mask, "[..., T, K]")
    teacher = sequences.constants("teacher_log_probs", teacher_log_probs, log_probs.shape)
    # Places that take no part have probability 0 on both sides, which is selected and never computed.
    present = mask[..., None] & ~jnp.isneginf(teacher)
    student, there = _distribution(zeroed(present, log_probs), present, tail)
    teacher, _ = _distribution(zeroed(present, teacher), present, tail)
    if divergence == "forward_kl":
        values = _kl(teacher, student, there)
    elif divergence == "reverse_kl":
        values = _kl(student, teacher, there)
    else:
        of_student, of_teacher = over_mixture(beta, student, teacher)
        terms = beta * jnp.exp(teacher) * of_teacher + (1 - beta) * jnp.exp(student) * of_student
        values = jnp.sum(zeroed(there, terms), axis=-1)
    return sequences.aggregate(not_negative(values), mask, aggregation, length, normalizer)


def _distribution(log_probs: jax.Array, present: jax.Array, tail: bool) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities that sum to 1 over the places present: with a place for the tail, or normalised."""
    if not tail:
        # 0 where no place is present, or none has any probability.
        some = jnp.any(present & ~jnp.isneginf(log_probs), axis=-1, keepdims=True)
        total = jax.nn.logsumexp(jnp.where(some, log_probs, 0.0), axis=-1, keepdims=True, where=present | ~some)
        return log_probs - jnp.where(some, total, 0.0), present
    total = jnp.sum(jnp.where(present, jnp.exp(log_probs), 0.0), axis=-1, keepdims=True)
    rest = jnp.maximum(1 - total, np.finfo(total.dtype).eps)
    there = jnp.ones_like(rest, bool)
    return jnp.concatenate([log_probs, jnp.log(rest)], axis=-1), jnp.concatenate([present, there], axis=-1)


def _kl(log_p: jax.Array, log_q: jax.Array, present: jax.Array) -> jax.Array:
    """Σ p·(log p - log q) over the places present, with 0·log 0 = 0, but not where q is NaN."""
    p = jnp.exp(log_p)
    counts = present & ((p != 0) | jnp.isnan(log_q))
    return jnp.sum(jnp.where(counts, p * jnp.where(counts, log_p - log_q, 0.0), 0.0), axis=-1)
