"""Log-probabilities over a given set of each row's vocabulary entries, and nothing else: its *support*."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.statistics.labels import NO_TARGET
from pallas_ce.statistics.logits import product


class OverSupport(NamedTuple):
    """What `over_support` finds of each row, `[...]`."""

    log_prob: jax.Array
    entropy: jax.Array
    sum_sq_probs: jax.Array
    hit: jax.Array
    in_support: jax.Array


def as_set(ids: jax.Array) -> jax.Array:
    """`canonical` ids `[..., K]` in ascending order, with `NO_TARGET` for all but the first of equal ones."""
    ids = jnp.sort(ids, axis=-1)
    again = jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), ids[..., 1:] == ids[..., :-1]], axis=-1)
    return jnp.where(again, NO_TARGET, ids)


def over_support(logits: jax.Array, ids: jax.Array, label: jax.Array) -> OverSupport:
    """The statistics of `p = softmax(logits [..., K])` over a row's ids `as_set`, and of `label [...]` under it.

    A label outside its row's set has log-probability -inf and no gradient.
    """
    inside, place = ids != NO_TARGET, ids == label[..., None]
    in_support = (label != NO_TARGET) & jnp.any(place, axis=-1)
    z = jnp.where(inside, logits, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    distance = z - jnp.where(jnp.isinf(largest), 0.0, largest)
    exponentials = jnp.exp(distance)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    none = total == 0  # a row without any id, or of -inf only, has no probabilities
    total = jnp.where(none, 1.0, total)
    log_p, p = distance - jnp.log(total), exponentials / total
    of_label = jnp.sum(jnp.where(place, log_p, 0.0), axis=-1)
    entropy = -jnp.sum(product(p, jnp.where(p == 0, 0.0, log_p)), axis=-1)
    top = jnp.take_along_axis(ids, jnp.argmax(z, axis=-1)[..., None], axis=-1)[..., 0]
    return OverSupport(
        jnp.where(in_support & ~none[..., 0], of_label, -jnp.inf),
        entropy,
        jnp.sum(p * p, axis=-1),
        in_support & (top == label),
        in_support,
    )
