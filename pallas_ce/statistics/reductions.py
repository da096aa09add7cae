"""From one loss for each row to what a call returns: weights, masks and normalisers, in one place."""

import jax
import jax.numpy as jnp

from pallas_ce.statistics.cross_entropy import safe_inverse, zero_safe_product


def reduce_rows(
    values: jax.Array,
    mask: jax.Array | None,
    token_weights: jax.Array | None,
    reduction: str,
    normalizer: jax.Array | float | None,
) -> jax.Array:
    """`w_i·values_i` of the rows that count: each, their sum, or their sum over `normalizer`, by default `Σ w_i`.

    Args:
        values: `[N]`.
        mask: `[N]` bool, which rows count; None: all. The others are 0 and have gradients of exactly 0.
        token_weights: w `[N]`, or None for 1.
        reduction: "none", "sum" or "mean"; 0 where no row counts.
        normalizer: `[]` or None.
    """
    weights = jnp.ones_like(values) if token_weights is None else token_weights.astype(values.dtype)
    if mask is not None:
        values, weights = jnp.where(mask, values, 0.0), jnp.where(mask, weights, 0.0)
    weighted = values if token_weights is None else zero_safe_product(weights, values)
    if reduction == "none":
        return weighted
    total = jnp.sum(weighted)
    if reduction == "sum":
        return total
    return total * safe_inverse(jnp.sum(weights) if normalizer is None else jnp.asarray(normalizer, values.dtype))
