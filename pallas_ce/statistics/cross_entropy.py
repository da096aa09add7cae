"""Losses as small differentiable functions of row statistics, and the reductions they share."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.streaming.rows import zeroed

Reduction = Literal["mean", "sum", "none"]


class Metrics(NamedTuple):
    """Scalars that describe one call of `linear_cross_entropy`; none carries a gradient.

    Attributes:
        cross_entropy: the loss without its z part, reduced as the loss is (as a mean for `reduction="none"`).
        z_loss: the z part, reduced in the same way; 0 without one.
        num_tokens: int32, how many tokens count.
        accuracy: the share of counted tokens whose largest logit is their label's; 0 where none counts.
        mean_lse: the mean log-sum-exp of the counted tokens; 0 where none counts.
    """

    cross_entropy: jax.Array
    z_loss: jax.Array
    num_tokens: jax.Array
    accuracy: jax.Array
    mean_lse: jax.Array


def zero_safe_product(weight: jax.Array, value: jax.Array) -> jax.Array:
    """`weight·value` with 0·(±inf) = 0, in the value and both derivatives; the derivative in `weight` stays `value`."""
    return weight * jnp.where((weight == 0) & jnp.isinf(value), 0.0, value)


def safe_inverse(x: jax.Array) -> jax.Array:
    """1/x, and 0 with derivative 0 where x is 0: a mean over nothing is 0."""
    return jnp.where(x == 0, 0.0, 1.0 / jnp.where(x == 0, 1.0, x))


def reduce_rows(
    values: jax.Array,
    mask: jax.Array | None,
    token_weights: jax.Array | None,
    reduction: str,
    normalizer: jax.Array | float | None,
    whole: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """`w_i·values_i` of the rows that count: each, their sum, or their sum over `normalizer`, by default `Σ w_i`.

    Rows that the `mask` turns off are 0 and have gradients of exactly 0. Where no row counts the mean is 0. `whole`
    makes a sum over these rows one over all rows that the call is about.
    """
    weights = jnp.ones_like(values) if token_weights is None else token_weights.astype(values.dtype)
    values, weights = zeroed(mask, (values, weights))
    weighted = values if token_weights is None else zero_safe_product(weights, values)
    if reduction == "none":
        return weighted
    total = whole(jnp.sum(weighted))
    if reduction == "sum":
        return total
    count = whole(jnp.sum(weights)) if normalizer is None else jnp.asarray(normalizer, values.dtype)
    return total * safe_inverse(count)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of one row with every option, as a function of its statistics. Static and hashable.

    With c the class weights (all 1 without), α the smoothing, β the z-loss factor, w the token's weight:

        cross entropy   -w·[ (1-α)·c_t·log p_t + α·Σ_v (c_v/V)·log p_v ]
        z part          w·β·lse²

    The smoothing term is `α/V·Σ_v c_v·(lse - z_v)`, PyTorch's rule: `mean_log_prob` with `u = c/V`. Neither part is a
    difference of rounded logits.

    A factor or term whose c, α, β or w the inputs lack is left out.
    """

    smoothing: bool  # whether α is there
    regularised: bool  # whether β is there
    normalised: bool  # whether each row is divided by the normalisers
    defined_at_zero: ClassVar[bool] = True

    @property
    def names(self) -> frozenset[str]:
        """The statistics it reads."""
        return frozenset(["log_prob", *["mean_log_prob"] * self.smoothing, *["lse"] * self.regularised])

    def parts(self, statistics: dict[str, jax.Array], inputs: tuple[Any, Any]) -> tuple[jax.Array, jax.Array | None]:
        """Cross entropy and z part `[n]`, weighted but not normalised."""
        by_row, shared = inputs
        loss = -statistics["log_prob"]
        if "class_weight" in by_row:
            loss = zero_safe_product(by_row["class_weight"], loss)
        if self.smoothing:
            spread = -statistics["mean_log_prob"]
            loss = zero_safe_product(1.0 - shared["smoothing"], loss) + zero_safe_product(shared["smoothing"], spread)
        z_part = zero_safe_product(shared["z_loss"], jnp.square(statistics["lse"])) if self.regularised else None
        if "token_weight" in by_row:
            loss = zero_safe_product(by_row["token_weight"], loss)
            z_part = None if z_part is None else zero_safe_product(by_row["token_weight"], z_part)
        return loss, z_part

    def __call__(self, statistics: dict[str, jax.Array], inputs: tuple[Any, Any]) -> jax.Array:
        """Each row's share `[n]` of the reduced loss."""
        loss, z_part = self.parts(statistics, inputs)
        if self.normalised:
            loss = loss * inputs[1]["inverse_normalizer"]
            z_part = None if z_part is None else z_part * inputs[1]["inverse_z_normalizer"]
        return loss if z_part is None else loss + z_part
