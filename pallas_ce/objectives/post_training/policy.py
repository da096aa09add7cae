"""Policy gradients on log-probabilities: PPO's clipped objective, GRPO and its variants, advantages, KL estimates."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks as arguments
from pallas_ce.api.checks import ArrayLike
from pallas_ce.objectives.post_training import sequences
from pallas_ce.objectives.post_training.sequences import Aggregation

Level = Literal["token", "sequence", "sequence_token"]
Estimator = Literal["k1", "k2", "k3"]


class PolicyMetrics(NamedTuple):
    """Means over the tokens that count, without gradient; None where their input was not given.

    Attributes:
        ratio: the importance ratio.
        clipped_low: the share of tokens whose ratio lies below `1 - clip_low` and whose advantage is negative, so that
            they have no gradient.
        clipped_high: the share with a ratio above `1 + clip_high` and a positive advantage.
        kl: the estimate of KL(policy ‖ reference).
        entropy: the given entropies.
    """

    ratio: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array
    kl: jax.Array | None
    entropy: jax.Array | None


def policy_loss(
    log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    old_log_probs: ArrayLike | None = None,
    ref_log_probs: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    ratio_limit: float | None = None,
    level: Level = "token",
    kl_coefficient: ArrayLike = 0.0,
    kl_estimator: Estimator = "k3",
    entropy_coefficient: ArrayLike = 0.0,
    aggregation: Aggregation = "token_mean",
    length: float | None = None,
    normalizer: ArrayLike | None = None,
    return_metrics: bool = False,
) -> Any:
    r"""The clipped policy-gradient loss of sampled tokens, with KL penalty and entropy bonus.

    For token t of sequence i, with ratio r and advantage A:

        loss_it = -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) + kl_coefficient·KL_it - entropy_coefficient·H_it

        level="token"           r_it = exp(log π_it - log π_old,it)
        level="sequence"        r_i = exp(mean over the sequence's tokens of (log π_it - log π_old,it))
        level="sequence_token"  the value of r_i with the gradient of each token: sg(r_i)·π_it/sg(π_it)

    and the tokens are then aggregated. The arguments of each method:

    * PPO: `advantages [..., T]`, `old_log_probs`, `entropy`, `entropy_coefficient`
    * GRPO: `group_advantages`, `aggregation="sequence_mean"`, `ref_log_probs`, `kl_coefficient`
    * DAPO: `clip_high=0.28`, `aggregation="token_mean"` with the global batch's token count as `normalizer`
    * Dr. GRPO: `group_advantages(scale="none")`, `aggregation="fixed_length"`, `length`
    * GSPO: `level="sequence"`, `aggregation="sequence_mean"`, `clip_low=3e-4`, `clip_high=4e-4`

    Args:
        log_probs: `[..., T]`, log π of the sampled tokens; differentiable.
        advantages: `[...]`, one for each sequence, or `[..., T]`. A constant, as all that follow but `entropy`.
        mask: bool `[..., T]`, the tokens that count; None: all. The others contribute exactly 0, whatever they hold.
        old_log_probs: `[..., T]` under the policy that sampled; None where that is the current one, and r = 1.
        ref_log_probs: `[..., T]` under the reference model; needed for the KL penalty.
        entropy: `[..., T]`, H, differentiable; needed for the bonus. `linear_log_probs(return_entropy=True)` has it.
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1; None: as far as `clip_low`.
        ratio_limit: an upper bound of r in `r·A` (dual clipping), above `1 + clip_high`; None: none.
        level: of the importance ratio.
        kl_coefficient: β. The number 0 leaves the penalty out.
        kl_estimator: see `kl_estimate`.
        entropy_coefficient: the bonus' factor. The number 0 leaves it out.
        aggregation: "token_mean": over all tokens of the batch; "sequence_mean": of each sequence, then over the
            sequences; "fixed_length": the sum over `length` and the number of sequences; "none": `[..., T]`.
        length: the constant of "fixed_length", usually the longest completion allowed.
        normalizer: replaces the number of tokens ("token_mean") or of sequences (the others) that the sum is divided
            by: the global batch's, where this is a part of it.
        return_metrics: return `(loss, PolicyMetrics)`.

    Returns:
        The loss, a scalar (`[..., T]` for "none"), float32 or wider; 0.0 where no token counts. Differences of
        log-probabilities are limited to ±80 (in float32), so that neither a ratio nor its gradient overflows.

    Raises:
        ValueError: shapes or names that do not fit, a coefficient without what it multiplies.
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce.post_training import group_advantages, policy_loss
        >>> log_probs = jnp.log(jnp.array([[0.5, 0.25], [0.5, 0.5]]))  # [sequences, T]
        >>> advantages = group_advantages(jnp.array([1.0, 0.0]), group_size=2)
        >>> mask = jnp.array([[True, True], [True, False]])
        >>> loss, gradient = jax.value_and_grad(policy_loss)(log_probs, advantages, mask, aggregation="sequence_mean")
        >>> print(gradient.round(3))
        [[-0.177 -0.177]
         [ 0.354  0.   ]]

    References:
        PPO: arXiv 1707.06347; dual clipping: arXiv 1912.09729; GRPO: arXiv 2402.03300; Dr. GRPO: arXiv 2503.20783;
        DAPO: arXiv 2503.14476; GSPO and GSPO-token: arXiv 2507.18071. The aggregations are TRL's "bnpo"/"dapo", "grpo"
        and "dr_grpo".
    """
    log_probs, mask = sequences.tokens(log_probs, mask)
    shape = log_probs.shape
    advantages = sequences.constants("advantages", advantages, shape, shape[:-1])
    advantages = sequences.keep(mask, advantages if advantages.shape == shape else advantages[..., None])
    clip_high = clip_low if clip_high is None else clip_high
    arguments.scalar("clip_low", clip_low, 0.0, 1.0)
    arguments.scalar("clip_high", clip_high, 0.0)
    least, most = 1 - clip_low, 1 + clip_high
    if ratio_limit is not None and not arguments.scalar("ratio_limit", ratio_limit) > most:
        raise ValueError(f"ratio_limit={ratio_limit!r} must lie above 1 + clip_high={most}")
    arguments.choice("kl_estimator", kl_estimator, get_args(Estimator))
    old = jax.lax.stop_gradient(log_probs)
    if old_log_probs is not None:
        old = sequences.constants("old_log_probs", old_log_probs, shape, mask=mask)
    ratio = jnp.exp(_log_ratio(log_probs, old, mask, level))
    limited = ratio if ratio_limit is None else jnp.minimum(ratio, ratio_limit)
    loss = -jnp.minimum(limited * advantages, jnp.clip(ratio, least, most) * advantages)
    kl = None
    if ref_log_probs is not None:
        reference = sequences.constants("ref_log_probs", ref_log_probs, shape, mask=mask)
        kl = kl_estimate(log_probs, reference, kl_estimator)
    if entropy is not None:
        entropy = sequences.floats("entropy", entropy, shape, mask=mask)
    for name, coefficient, needed, sign, term in (
        ("kl_coefficient", kl_coefficient, "ref_log_probs", 1, kl),
        ("entropy_coefficient", entropy_coefficient, "entropy", -1, entropy),
    ):
        coefficient = arguments.scalar(name, coefficient)
        if not arguments.is_known(coefficient, 0.0):
            if term is None:
                raise ValueError(f"{name}={coefficient!r} needs {needed}, which is None")
            loss = loss + sign * jnp.asarray(coefficient, term.dtype) * term
    value = sequences.aggregate(loss, mask, aggregation, length, normalizer)
    if not return_metrics:
        return value
    low, high = (ratio < least) & (advantages < 0), (ratio > most) & (advantages > 0)
    metrics = PolicyMetrics(ratio, low.astype(ratio.dtype), high.astype(ratio.dtype), kl, entropy)
    return value, sequences.means(metrics, mask)


def _log_ratio(log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array, level: Level) -> jax.Array:
    """log r, `[..., T]` or, for sequences, `[..., 1]`."""
    arguments.choice("level", level, get_args(Level))
    by_token = _limit(sequences.difference(log_probs, old_log_probs))
    if level == "token":
        return by_token
    tokens = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(by_token.dtype)
    of_sequence = jnp.sum(by_token, axis=-1, keepdims=True) / tokens
    if level == "sequence":
        return of_sequence
    return jax.lax.stop_gradient(of_sequence) + sequences.difference(log_probs, jax.lax.stop_gradient(log_probs))


def _limit(log_ratio: jax.Array) -> jax.Array:
    """Bounded such that its exponential is far from overflowing: beyond, 0·inf would make gradients nan.

    A NaN keeps its gradient, which so is NaN.
    """
    most = 0.9 * math.log(np.finfo(log_ratio.dtype).max)
    return jnp.where(log_ratio > most, most, jnp.where(log_ratio < -most, -most, log_ratio))


def kl_estimate(log_probs: ArrayLike, ref_log_probs: ArrayLike, estimator: Estimator = "k3") -> jax.Array:
    r"""Estimates KL(π ‖ π_ref) from one token sampled from π, for each entry.

    With `d = log π_ref - log π`:

        k1 = -d              unbiased, of either sign; its gradient has mean 0: for rewards, not as a loss
        k2 = d²/2            low variance, biased; its gradient is an unbiased one of the KL on tokens sampled from π
        k3 = e^d - d - 1     unbiased, never negative

    Args:
        log_probs: `[...]`, log π.
        ref_log_probs: `[...]`, log π_ref; d is limited to ±80 (in float32).
        estimator: "k1", "k2" or "k3".

    Returns:
        Array: `[...]` in nats, float32 or wider, differentiable.

    Raises:
        ValueError: shapes that differ, an unknown estimator.
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce.post_training import kl_estimate
        >>> print(kl_estimate(jnp.log(jnp.array([0.5, 0.1])), jnp.log(jnp.array([0.5, 0.2]))).round(4))
        [0.     0.3069]

    References:
        J. Schulman, "Approximating KL Divergence" (2020); GRPO, arXiv 2402.03300, equation 4.
    """
    arguments.choice("estimator", estimator, get_args(Estimator))
    log_probs = sequences.floats("log_probs", log_probs)
    d = _limit(sequences.difference(sequences.floats("ref_log_probs", ref_log_probs, log_probs.shape), log_probs))
    if estimator == "k1":
        return -d
    return 0.5 * jnp.square(d) if estimator == "k2" else jnp.expm1(d) - d


def group_advantages(
    rewards: ArrayLike, group_size: int, *, scale: Literal["group", "batch", "none"] = "group", epsilon: float = 1e-4
) -> jax.Array:
    r"""Advantages relative to the other answers to the same prompt.

        A_i = (R_i - mean of the group) / (s + epsilon)

    with s the sample standard deviation (divisor n - 1) of the group or of the whole batch, or without division.

    Args:
        rewards: `[B]`, the answers to one prompt next to each other. A constant: it gets no gradient.
        group_size: G ≥ 2, which divides B.
        scale: "group" (GRPO), "batch", or "none" (Dr. GRPO: division favours prompts that are nearly solved or nearly
            hopeless).
        epsilon: keeps groups of equal rewards at 0.

    Returns:
        Array: `[B]`, float32 or wider.

    Raises:
        ValueError: rewards that are not `[B]` in whole groups, an unknown scale.
        TypeError: rewards that are not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce.post_training import group_advantages
        >>> print(group_advantages(jnp.array([1.0, 0.0, 5.0, 5.0]), group_size=2, scale="none"))
        [ 0.5 -0.5  0.   0. ]

    References:
        GRPO: arXiv 2402.03300, section 4.1; Dr. GRPO: arXiv 2503.20783.
    """
    arguments.choice("scale", scale, ("group", "batch", "none"))
    arguments.scalar("epsilon", epsilon, 0.0)
    rewards = sequences.constants("rewards", rewards)
    if not arguments.is_int(group_size):
        raise TypeError(f"group_size={group_size!r} must be an int")
    if rewards.ndim != 1 or group_size < 2 or rewards.size % group_size:
        raise ValueError(f"rewards have shape {rewards.shape}; they must be [B], B a multiple of {group_size=} >= 2")
    groups = rewards.reshape(-1, group_size)
    groups = groups - groups[:, :1]  # equal rewards are then exactly 0, and so is what epsilon would blow up
    centred = groups - jnp.mean(groups, axis=1, keepdims=True)
    if scale == "group":
        centred = centred / (jnp.std(groups, axis=1, keepdims=True, ddof=1) + epsilon)
    elif scale == "batch" and rewards.size:
        centred = centred / (jnp.std(rewards, ddof=1) + epsilon)
    return centred.reshape(-1)
