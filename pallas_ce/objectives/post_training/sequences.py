"""What the losses share: checked arrays, the masking rule, and how the tokens of many sequences become one number."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.head import common_dtype
from pallas_ce.statistics.cross_entropy import reduce_rows, safe_inverse
from pallas_ce.streaming.rows import zeroed

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length", "none"]


def tokens(log_probs: Any, mask: Any | None, entries: str = "[..., T]") -> tuple[jax.Array, jax.Array]:
    """Checked log-probabilities, 0 where masked, and the mask of their tokens."""
    x = floats("log_probs", log_probs)
    axes = entries.count(",")
    if x.ndim < axes:
        raise ValueError(f"log_probs has shape {x.shape}; it must be {entries}")
    counts = token_mask(mask, x.shape[: x.ndim - axes + 1])
    return zeroed(counts, x), counts


def floats(name: str, value: Any, *shapes: tuple[int, ...], mask: jax.Array | None = None) -> jax.Array:
    """`value` as floating numbers of at least float32, of one of `shapes` where any are given; 0 where masked."""
    x = checks.floating(name, value)
    if shapes and x.shape not in shapes:
        raise ValueError(f"{name} has shape {x.shape}; it must be {' or '.join(map(str, shapes))}")
    # First of all 0: a value that is not finite has a nan derivative.
    return zeroed(mask, x.astype(common_dtype(x.dtype, jnp.float32)))


def constants(name: str, value: Any, *shapes: tuple[int, ...], mask: jax.Array | None = None) -> jax.Array:
    """`floats` without gradient."""
    return jax.lax.stop_gradient(floats(name, value, *shapes, mask=mask))


def token_mask(mask: Any | None, shape: tuple[int, ...]) -> jax.Array:
    """A checked mask of that shape; all True where None."""
    given = checks.mask("mask", mask, shape, "the shape")
    return jnp.ones(shape, bool) if given is None else given


def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a - b`, and 0 with gradient 0 where both are the same infinity, as of tokens that neither policy allows."""
    same = (a == b) & jnp.isinf(a)
    return zeroed(~same, a) - zeroed(~same, b)


def means[Values](values: Values, mask: jax.Array) -> Values:
    """Of each array of a tree the mean where `mask` is on, without gradient; 0 where it is nowhere."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(reduce_rows(x, mask, None, "mean", None)), values)


def aggregate(
    values: jax.Array, mask: jax.Array, how: Aggregation, length: float | None, normalizer: Any | None
) -> jax.Array:
    """One number from `values [..., T]`; 0 where no token counts.

    With `m` the mask, B sequences and Z the normalizer, by default what stands in brackets:

        token_mean      Σ_it m_it·x_it / Z                       [Σ_it m_it]
        sequence_mean   Σ_i (Σ_t m_it·x_it / Σ_t m_it) / Z       [B]; a sequence without tokens adds 0
        fixed_length    Σ_it m_it·x_it / (length·Z)              [B]
        none            m_it·x_it
    """
    checks.choice("aggregation", how, get_args(Aggregation))
    if (length is not None) != (how == "fixed_length"):
        raise ValueError(
            f"length={length!r} with aggregation={how!r}: 'fixed_length' needs a number, and the others take none"
        )
    if normalizer is not None and how == "none":
        raise ValueError("normalizer is given with aggregation='none', which divides by nothing")
    values, tokens, normalizer = zeroed(mask, values), jnp.sum(mask, axis=-1), checks.normalizer(normalizer)
    if how == "none":
        return values
    if how == "token_mean":
        return reduce_rows(values, None, None, "mean", jnp.sum(tokens) if normalizer is None else normalizer)
    divisor = tokens if length is None else checks.above_zero("length", length)
    by_sequence = jnp.sum(values, axis=-1) * safe_inverse(jnp.asarray(divisor, values.dtype))
    return reduce_rows(by_sequence, None, None, "mean", normalizer)
