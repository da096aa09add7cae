"""The k largest of each row by a tournament of groups, where sorting whole rows is what costs.

Of groups of neighbouring entries, ordered by their largest entry and equal ones by their place, the first k hold the k
largest entries, equal entries in order of their places as well. For let an entry e lie in a group that is not among
them. Each of those k groups has a largest entry that comes before its own group's, hence before e: it is larger, or
equal and, as groups are neighbours, at a lower place. So k entries come before e. Only maxima of groups are sorted, a
few hundred at a time, and the entries of k groups.

NaN is the largest of all, of either sign, and equal to itself, as `jnp.argmax` has it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Entries of a group where the rule is free to choose, and rows so short that they are sorted as they are.
_GROUP = 8
_SHORT = 512


class Largest(NamedTuple):
    """The k largest entries `[n, k]`, in descending order, equal ones in order of their places `[n, k]` int32."""

    values: jax.Array
    places: jax.Array


def top_k(values: jax.Array, k: int) -> Largest:
    """As `lax.top_k` of `values [n, m]`, `k <= m`, but a NaN with a minus sign does not come last."""
    found, places = jax.lax.top_k(jnp.where(jnp.isnan(values), jnp.nan, values), k)
    return Largest(found, places.astype(jnp.int32))


def largest(values: jax.Array, k: int) -> Largest:
    """The same, where `m` may be large."""
    n, m = values.shape
    if m <= max(_SHORT, k * _GROUP):
        return top_k(values, k)
    # Padding comes last of all equal entries, and there are m >= k others.
    padded = jnp.pad(values, ((0, 0), (0, -m % _GROUP)), constant_values=-jnp.inf)
    return largest_in_groups(padded.reshape(n, -1, _GROUP), k)


def largest_in_groups(groups: jax.Array, k: int, maxima: jax.Array | None = None) -> Largest:
    """The k largest of `groups [n, m, size]`, rows of neighbouring groups; places count through a row.

    Only k groups of each row are read, where their `maxima [n, m]` are given.
    """
    n, m, size = groups.shape
    if maxima is None:  # NaN where a group has one, which XLA's own maximum on a CPU passes over
        lowest = jnp.array(-jnp.inf, groups.dtype)
        maxima = jax.lax.reduce(groups, lowest, lambda a, b: jnp.where((a > b) | jnp.isnan(a), a, b), (2,))
    # In order of their places, so that the first of equal entries is at the lowest place.
    chosen = jax.lax.sort(largest(maxima, min(k, m)).places, is_stable=False)
    entries = jnp.take_along_axis(groups, chosen[:, :, None], axis=1, mode="promise_in_bounds")
    found = largest(entries.reshape(n, -1), k)
    group = jnp.take_along_axis(chosen, found.places // size, axis=1, mode="promise_in_bounds")
    return Largest(found.values, group * size + found.places % size)
