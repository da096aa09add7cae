"""Policy gradients on log-probabilities: PPO's objective, GRPO, CISPO and SAPO, advantages, KL estimates."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.objectives.post_training import sequences
from pallas_ce.streaming.rows import zeroed

Level = Literal["token", "sequence", "sequence_token"]
Objective = Literal["clip", "cispo", "sapo"]
Estimator = Literal["k1", "k2", "k3"]
SamplerWeights = Literal["truncate", "mask"]


class PolicyMetrics(NamedTuple):
    """Means over the tokens that count, without gradient; None where their input was not given.

    Attributes:
        ratio: the importance ratio.
        clipped_low: the share of tokens whose ratio lies below `1 - clip_low`. For "clip" only those with a negative
            advantage count, which have no gradient. None for "sapo".
        clipped_high: the share with a ratio above `1 + clip_high`, for "clip" and a positive advantage.
        kl: the estimate of KL(policy ‖ reference).
        entropy: the given entropies.
        sampler_weight: the weight that corrects for the sampler.
    """

    ratio: jax.Array
    clipped_low: jax.Array | None
    clipped_high: jax.Array | None
    kl: jax.Array | None
    entropy: jax.Array | None
    sampler_weight: jax.Array | None


def policy_loss(
    log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    old_log_probs: ArrayLike | None = None,
    ref_log_probs: ArrayLike | None = None,
    sampler_log_probs: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    objective: Objective = "clip",
    clip_low: float = 0.2,
    clip_high: float | None = None,
    ratio_limit: float | None = None,
    gate_temperatures: tuple[float, float] = (1.0, 1.05),
    sampler_weights: SamplerWeights = "truncate",
    sampler_range: tuple[float, float] = (0.0, 2.0),
    level: Level = "token",
    kl_coefficient: ArrayLike = 0.0,
    kl_estimator: Estimator = "k3",
    entropy_coefficient: ArrayLike = 0.0,
    aggregation: sequences.Aggregation = "token_mean",
    length: float | None = None,
    normalizer: ArrayLike | None = None,
    return_metrics: bool = False,
) -> Any:
    r"""The policy-gradient loss of sampled tokens, with KL penalty and entropy bonus.

    For token t of sequence i, with ratio r and advantage A:

        loss_it = -w_it·J_it + kl_coefficient·KL_it - entropy_coefficient·H_it

        objective="clip"        J = min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A)
        objective="cispo"       J = sg(clip(r, 1 - clip_low, 1 + clip_high))·A·log π
        objective="sapo"        J = 4/τ·sigmoid(τ·(r - 1))·A, τ the first of gate_temperatures if A > 0, else the second

        level="token"           r_it = exp(log π_it - log π_old,it)
        level="sequence"        r_i = exp(mean over the sequence's tokens of (log π_it - log π_old,it))
        level="sequence_token"  the value of r_i with the gradient of each token: sg(r_i)·π_it/sg(π_it)

    With `sampler_log_probs`, and `v_it = π_old,it / π_sampler,it`, the weight w_it is a constant, else 1:

        sampler_weights="truncate"   v, at least the first number of sampler_range and at most the second
        sampler_weights="mask"       v if it lies in sampler_range, else 0

    A token does not count where log π is -inf, as `linear_log_probs(support=...)` has it for a label outside its set.
    Nor does one where another of the log-probabilities is: without them it has neither ratio nor penalty. The tokens
    that count are then aggregated. The arguments of each method:

    * PPO: `advantages [..., T]`, `old_log_probs`, `entropy`, `entropy_coefficient`
    * GRPO: `group_advantages`, `aggregation="sequence_mean"`, `ref_log_probs`, `kl_coefficient`
    * DAPO: `clip_high=0.28`, `aggregation="token_mean"` with the global batch's token count as `normalizer`
    * Dr. GRPO: `group_advantages(scale="none")`, `aggregation="fixed_length"`, `length`
    * GSPO: `level="sequence"`, `aggregation="sequence_mean"`, `clip_low=3e-4`, `clip_high=4e-4`
    * CISPO: `objective="cispo"`, `clip_low=1.0` (no lower bound), `clip_high`, `aggregation="token_mean"`
    * SAPO: `objective="sapo"`, `aggregation="sequence_mean"`
    * RLOO: `group_advantages(baseline="leave_one_out", scale="none")`
    * truncated importance sampling (TIS): `sampler_log_probs`
    * masked importance sampling (IcePop): `sampler_log_probs`, `sampler_weights="mask"`, `sampler_range=(0.5, 5.0)`

    Args:
        log_probs: `[..., T]`, log π of the sampled tokens; differentiable.
        advantages: `[...]`, one for each sequence, or `[..., T]`. A constant, as all that follow but `entropy`.
        mask: bool `[..., T]`, the tokens that count; None: all. The others, and those with a log-probability of -inf,
            contribute exactly 0, whatever they hold.
        old_log_probs: `[..., T]` under the policy that sampled; None where that is the current one, and r = 1.
        ref_log_probs: `[..., T]` under the reference model; needed for the KL penalty.
        sampler_log_probs: `[..., T]` as the engine that sampled has them, where its arithmetic differs from the
            training program's. `old_log_probs` are then this program's, of the same weights; None: r = 1.
        entropy: `[..., T]`, H, differentiable; needed for the bonus. `linear_log_probs(return_entropy=True)` has it.
        objective: "clip" (PPO), "cispo" (a token's weight is bounded, and no gradient dropped) or "sapo" (a smooth
            gate).
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1; None: as far as `clip_low`.
        ratio_limit: an upper bound of r in `r·A` (dual clipping), above `1 + clip_high`; None: none. For "clip" only.
        gate_temperatures: τ for positive and for other advantages, above 0; for "sapo".
        sampler_weights: "truncate" or "mask".
        sampler_range: the least and the greatest v.
        level: of the importance ratio.
        kl_coefficient: β. The number 0 leaves the penalty out.
        kl_estimator: see `kl_estimate`.
        entropy_coefficient: the bonus' factor. The number 0 leaves it out.
        aggregation: "token_mean": over all tokens of the batch; "sequence_mean": of each sequence, then over the
            sequences; "fixed_length": the sum over `length` and the number of sequences; "none": `[..., T]`. A sequence
            without tokens is one of that number: where such pad the batch, pass `normalizer`.
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
        DAPO: arXiv 2503.14476; GSPO and GSPO-token: arXiv 2507.18071; CISPO: arXiv 2506.13585, equations 4 and 5; SAPO:
        arXiv 2511.20347; RLOO: arXiv 2402.14740; TIS: F. Yao et al., "Your Efficient RL Framework Secretly Brings You
        Off-Policy RL Training" (2025); IcePop: arXiv 2510.18855. The aggregations are TRL's "bnpo"/"dapo", "grpo" and
        "dr_grpo".
    """
    log_probs, mask = sequences.tokens(log_probs, mask)
    shape = log_probs.shape
    given = {"old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs, "sampler_log_probs": sampler_log_probs}
    others = {name: sequences.constants(name, x, shape) for name, x in given.items() if x is not None}
    for x in (log_probs, *others.values()):
        mask = mask & ~jnp.isneginf(x)
    log_probs, others = zeroed(mask, (log_probs, others))
    advantages = sequences.constants("advantages", advantages, shape, shape[:-1])
    advantages = zeroed(mask, advantages if advantages.shape == shape else advantages[..., None])
    clip_high = clip_low if clip_high is None else clip_high
    checks.choice("objective", objective, get_args(Objective))
    checks.choice("kl_estimator", kl_estimator, get_args(Estimator))
    checks.scalar("clip_low", clip_low, 0.0, 1.0)
    checks.scalar("clip_high", clip_high, 0.0)
    least, most = 1 - clip_low, 1 + clip_high
    old = others.get("old_log_probs", jax.lax.stop_gradient(log_probs))
    ratio = jnp.exp(_log_ratio(log_probs, old, mask, level))
    if ratio_limit is not None:
        if objective != "clip":
            raise ValueError(f"ratio_limit={ratio_limit!r} is for objective='clip', not {objective!r}")
        limit = checks.scalar("ratio_limit", ratio_limit)
        if checks.is_plain(limit) and checks.is_plain(most) and not limit > most:
            raise ValueError(f"ratio_limit={ratio_limit!r} must lie above 1 + clip_high={most}")
    if objective == "clip":
        gained = (ratio if ratio_limit is None else jnp.minimum(ratio, ratio_limit)) * advantages
        clipped = jnp.clip(ratio, least, most) * advantages
        gained = jnp.where(gained > clipped, clipped, gained)  # a minimum's gradient is halved where both are equal
    elif objective == "cispo":
        gained = jax.lax.stop_gradient(jnp.clip(ratio, least, most)) * advantages * log_probs
    else:
        name = "gate_temperatures"
        positive, other = (checks.above_zero(name, t) for t in _pair(name, gate_temperatures))
        temperature = jnp.where(advantages > 0, positive, other)
        gained = 4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * advantages
    weight = None
    if sampler_log_probs is not None:
        weight = _sampler_weight(old, others["sampler_log_probs"], sampler_weights, sampler_range)
        gained = weight * gained
    loss = -gained
    kl = None if ref_log_probs is None else kl_estimate(log_probs, others["ref_log_probs"], kl_estimator)
    if entropy is not None:
        entropy = sequences.floats("entropy", entropy, shape, mask=mask)
    for name, coefficient, needed, sign, term in (
        ("kl_coefficient", kl_coefficient, "ref_log_probs", 1, kl),
        ("entropy_coefficient", entropy_coefficient, "entropy", -1, entropy),
    ):
        coefficient = checks.scalar(name, coefficient)
        if not checks.is_known(coefficient, 0.0):
            if term is None:
                raise ValueError(f"{name}={coefficient!r} needs {needed}, which is None")
            loss = loss + sign * jnp.asarray(coefficient, term.dtype) * term
    value = sequences.aggregate(loss, mask, aggregation, length, normalizer)
    if not return_metrics:
        return value
    low = high = None
    if objective != "sapo":
        every = objective == "cispo"
        low = ((ratio < least) & (every | (advantages < 0))).astype(ratio.dtype)
        high = ((ratio > most) & (every | (advantages > 0))).astype(ratio.dtype)
    return value, sequences.means(PolicyMetrics(ratio, low, high, kl, entropy, weight), mask)


def _log_ratio(log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array, level: Level) -> jax.Array:
    """log r, `[..., T]` or, for sequences, `[..., 1]`."""
    checks.choice("level", level, get_args(Level))
    by_token = _limit(sequences.difference(log_probs, old_log_probs))
    if level == "token":
        return by_token
    tokens = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(by_token.dtype)
    of_sequence = jnp.sum(by_token, axis=-1, keepdims=True) / tokens
    if level == "sequence":
        return of_sequence
    return jax.lax.stop_gradient(of_sequence) + sequences.difference(log_probs, jax.lax.stop_gradient(log_probs))


def _pair(name: str, value: Any) -> Any:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be a pair of numbers")
    return value


def _sampler_weight(old: jax.Array, sampler: jax.Array, how: SamplerWeights, limits: tuple[float, float]) -> jax.Array:
    """What each token's gain is multiplied by, so that samples of another engine stand for the training program's."""
    checks.choice("sampler_weights", how, get_args(SamplerWeights))
    name = "sampler_range"
    least, most = (checks.scalar(name, limit, 0.0) for limit in _pair(name, limits))
    if checks.is_plain(least) and checks.is_plain(most) and least > most:
        raise ValueError(f"{name}={limits!r} must begin with the least weight")
    weight = jnp.exp(_limit(sequences.difference(old, sampler)))
    if how == "truncate":
        return jnp.clip(weight, least, most)
    return jnp.where((weight < least) | (weight > most), 0.0, weight)


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
    checks.choice("estimator", estimator, get_args(Estimator))
    log_probs = sequences.floats("log_probs", log_probs)
    d = _limit(sequences.difference(sequences.floats("ref_log_probs", ref_log_probs, log_probs.shape), log_probs))
    if estimator == "k1":
        return -d
    return 0.5 * jnp.square(d) if estimator == "k2" else jnp.expm1(d) - d


def group_advantages(
    rewards: ArrayLike,
    group_size: int,
    *,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-4,
) -> jax.Array:
    r"""Advantages relative to the other answers to the same prompt.

        A_i = (R_i - b_i) / (s + epsilon)

    with b the mean of the group, or of its other answers, and s the sample standard deviation (divisor n - 1) of the
    group or of the whole batch, or without division.

    Args:
        rewards: `[B]`, the answers to one prompt next to each other. A constant: it gets no gradient.
        group_size: G ≥ 2, which divides B.
        baseline: "mean", or "leave_one_out": the mean of the others, an unbiased baseline.
        scale: "group" (GRPO), "batch", or "none" (Dr. GRPO: division favours prompts that are nearly solved or nearly
            hopeless).
        epsilon: keeps groups of equal rewards at 0.

    Returns:
        Array: `[B]`, float32 or wider.

    Raises:
        ValueError: rewards that are not `[B]` in whole groups, an unknown baseline or scale.
        TypeError: rewards that are not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce.post_training import group_advantages
        >>> print(group_advantages(jnp.array([1.0, 0.0, 5.0, 5.0]), group_size=2, scale="none"))
        [ 0.5 -0.5  0.   0. ]

    References:
        GRPO: arXiv 2402.03300, section 4.1; Dr. GRPO: arXiv 2503.20783; leave-one-out: RLOO, arXiv 2402.14740.
    """
    checks.choice("baseline", baseline, ("mean", "leave_one_out"))
    checks.choice("scale", scale, ("group", "batch", "none"))
    checks.scalar("epsilon", epsilon, 0.0)
    rewards = sequences.constants("rewards", rewards)
    group_size = checks.integer("group_size", group_size, "an int, at least 2", 2)
    if rewards.ndim != 1 or rewards.size % group_size:
        raise ValueError(f"rewards have shape {rewards.shape}; they must be [B], B a multiple of {group_size=}")
    groups = rewards.reshape(-1, group_size)
    groups = groups - groups[:, :1]  # equal rewards are then exactly 0, and so is what epsilon would blow up
    centred = groups - jnp.mean(groups, axis=1, keepdims=True)
    if baseline == "leave_one_out":
        centred = centred * (group_size / (group_size - 1))
    if scale == "group":
        centred = centred / (jnp.std(groups, axis=1, keepdims=True, ddof=1) + epsilon)
    elif scale == "batch" and rewards.size:
        centred = centred / (jnp.std(rewards, ddof=1) + epsilon)
    return centred.reshape(-1)
