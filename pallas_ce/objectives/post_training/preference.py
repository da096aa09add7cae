"""Preference losses on the log-probabilities of pairs of answers."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.objectives.post_training import sequences
from pallas_ce.statistics.cross_entropy import Reduction, reduce_rows, safe_inverse
from pallas_ce.streaming.rows import zeroed


class PreferenceMetrics(NamedTuple):
    """Means over the pairs that count, without gradient.

    Attributes:
        chosen_reward: `β·(log π - log π_ref)` of the chosen answers.
        rejected_reward: the same of the rejected ones.
        margin: the former less the latter.
        accuracy: the share of pairs whose margin is positive.
    """

    chosen_reward: jax.Array
    rejected_reward: jax.Array
    margin: jax.Array
    accuracy: jax.Array


def sequence_log_probs(log_probs: ArrayLike, mask: ArrayLike | None = None, *, average: bool = False) -> jax.Array:
    r"""The log-probability of each sequence: `Σ_t m_t·log p_t`, or with `average` that over `Σ_t m_t`.

    Args:
        log_probs: `[..., T]`, of the tokens.
        mask: bool `[..., T]`, the answer's tokens; None: all. What the others hold does not matter. A token that counts
            with -inf makes the sum -inf, since an answer without it is another answer. Where a label may lie outside a
            support, pass a mask that is False there under the policy and under the reference model.
        average: divide by the number of tokens, as IPO does; 0 for a sequence without any.

    Returns:
        Array: `[...]`, float32 or wider, differentiable.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce.post_training import sequence_log_probs
        >>> print(sequence_log_probs(jnp.array([[-1.0, -2.0, 0.0]]), jnp.array([[True, True, False]])))
        [-3.]
    """
    log_probs, mask = sequences.tokens(log_probs, mask)
    total = jnp.sum(log_probs, axis=-1)
    return total * safe_inverse(jnp.sum(mask, axis=-1).astype(total.dtype)) if average else total


def dpo_loss(
    chosen: ArrayLike,
    rejected: ArrayLike,
    ref_chosen: ArrayLike,
    ref_rejected: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    reduction: Reduction = "mean",
    return_metrics: bool = False,
) -> Any:
    r"""Direct preference optimisation: prefers the chosen answer more than the reference model does.

    With `Δ = (log π(chosen) - log π(rejected)) - (log π_ref(chosen) - log π_ref(rejected))`:

        sigmoid   -(1-ε)·log σ(β·Δ) - ε·log σ(-β·Δ)
        hinge     max(0, 1 - β·Δ)
        ipo       (Δ - 1/(2β))²

    Args:
        chosen: `[...]`, log-probabilities of the chosen answers, `sequence_log_probs` (averaged for "ipo"). Of -inf the
            loss may be infinite; an answer that has it under both models is no evidence.
        rejected: `[...]`, of the rejected ones.
        ref_chosen: `[...]`, under the reference model. A constant, as the next.
        ref_rejected: `[...]`, likewise.
        mask: bool `[...]`, the pairs that count; None: all. The others contribute exactly 0, whatever they hold.
        beta: β > 0.
        label_smoothing: ε in [0, 0.5]: how often preferences are taken to be wrong; for "sigmoid".
        kind: of loss.
        reduction: "mean" over the pairs that count, "sum", or "none" for `[...]`.
        return_metrics: return `(loss, PreferenceMetrics)`.

    Returns:
        The loss, float32 or wider; 0.0 where no pair counts.

    Raises:
        ValueError: shapes, names or numbers that do not fit.
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce.post_training import dpo_loss
        >>> print(dpo_loss(jnp.array([-2.0]), jnp.array([-7.0]), jnp.array([-3.0]), jnp.array([-4.0])).round(4))
        0.513

    References:
        DPO: arXiv 2305.18290, equation 7; label smoothing: E. Mitchell, "A note on DPO with noisy preferences" (2023);
        hinge: SLiC-HF, arXiv 2305.10425; IPO: arXiv 2310.12036, equation 17.
    """
    checks.choice("kind", kind, ("sigmoid", "hinge", "ipo"))
    checks.choice("reduction", reduction, get_args(Reduction))
    beta = checks.above_zero("beta", beta)
    checks.scalar("label_smoothing", label_smoothing, 0.0, 0.5)
    smoothed = not checks.is_known(label_smoothing, 0.0)
    if smoothed and kind != "sigmoid":
        raise ValueError(f"label_smoothing={label_smoothing!r} is for kind='sigmoid'; kind is {kind!r}")
    chosen = sequences.floats("chosen", chosen)
    shape = chosen.shape
    mask = sequences.token_mask(mask, shape)
    chosen, rejected = zeroed(mask, chosen), sequences.floats("rejected", rejected, shape, mask=mask)
    ref_chosen = sequences.constants("ref_chosen", ref_chosen, shape, mask=mask)
    ref_rejected = sequences.constants("ref_rejected", ref_rejected, shape, mask=mask)
    chosen_gain, rejected_gain = sequences.difference(chosen, ref_chosen), sequences.difference(rejected, ref_rejected)
    delta = sequences.difference(chosen_gain, rejected_gain)
    if kind == "sigmoid":
        losses = -jax.nn.log_sigmoid(beta * delta)
        if smoothed:
            losses = (1 - label_smoothing) * losses - label_smoothing * jax.nn.log_sigmoid(-beta * delta)
    elif kind == "hinge":
        losses = jax.nn.relu(1 - beta * delta)
    else:
        losses = jnp.square(delta - 1 / (2 * beta))
    value = reduce_rows(losses, mask, None, reduction, None)
    if not return_metrics:
        return value
    metrics = PreferenceMetrics(beta * chosen_gain, beta * rejected_gain, beta * delta, (delta > 0).astype(delta.dtype))
    return value, sequences.means(metrics, mask)
