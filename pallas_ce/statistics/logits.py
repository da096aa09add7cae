"""Logits as the entries of `table` read them: a tile while streaming, or whole rows for the definitions."""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_ce.streaming.rows import present as present


@dataclasses.dataclass
class LogitsTile:
    """A tile as `fields` of a `Partial` read it, see `row.partial_of_tile`; what several read is made once.

    Attributes:
        z: `[n, c]`, -inf where not valid.
        reference: `[n]`, what distances are measured from.
        distance: `[n, c]`, z less the reference.
        exp: `e^distance`.
        sum_exp: its sum `[n]`.
        top: `[n]`, the tile's own m, NaN where a logit is.
    """

    logits: jax.Array
    columns: jax.Array
    valid: jax.Array | None
    labels: jax.Array | None
    logit_weights: jax.Array | None
    fields: dataclasses.InitVar[tuple[str, ...]] = ()

    def __post_init__(self, fields: tuple[str, ...]) -> None:
        """Makes what the fields read; "max" is one of all but targets' logits and sums of weights."""
        if "max" not in fields:
            return
        self.z = self.logits if self.valid is None else jnp.where(self.valid[None, :], self.logits, -jnp.inf)
        largest = self.z.max(axis=1)
        self.reference = reference_of(largest)
        if "sum_exp" in fields:
            self.distance = self.z - self.reference[:, None]
            self.exp = jnp.exp(self.distance)
            self.sum_exp = self.exp.sum(axis=1)
            is_nan = jnp.isnan(self.sum_exp)
        else:
            is_nan = jnp.any(jnp.isnan(self.z), axis=1)
        # A NaN shows in every sum, but not in a maximum that XLA makes for a CPU.
        self.top = jnp.where(is_nan, jnp.nan, largest)

    def target(self) -> jax.Array:
        """The targets' logits in the labels' shape, 0 where they lie elsewhere."""
        assert self.labels is not None
        if self.labels.ndim > 1:
            place, inside = places_in_tile(self.labels, self.columns, self.valid)
            return jnp.where(inside, jnp.take_along_axis(self.logits, place, axis=1, mode="clip"), 0.0)
        hit = self.columns[None, :] == self.labels[:, None]
        hit = hit if self.valid is None else hit & self.valid[None, :]
        return jnp.where(hit, self.logits, 0.0).sum(axis=1)

    def weighted(self, reference: jax.Array) -> jax.Array:
        """`Σ u (z - reference)` `[n]`, to which columns with u = 0 add nothing, nor of no distance if u = ±inf."""
        u = present(self.logit_weights)
        counts = u != 0 if self.valid is None else self.valid & (u != 0)
        # Selected before it is multiplied, for the sake of derivatives; and after, or XLA on a CPU stores the products.
        distance = jnp.where(counts[None, :], self.logits - reference[:, None], 0.0)
        counts = counts[None, :] & (jnp.isfinite(u)[None, :] | (distance != 0))
        return jnp.where(counts, u[None, :] * distance, 0.0).sum(axis=1)

    def sum_weights(self) -> jax.Array:
        """`Σ u`, `[n]`."""
        u = present(self.logit_weights)
        return jnp.broadcast_to(
            jnp.sum(u if self.valid is None else jnp.where(self.valid, u, 0.0)), self.logits.shape[:1]
        )


class Distances(NamedTuple):
    """Logits `[n, c]` of neighbouring columns, in few bits: each measured from the largest of a tile.

    Those near the largest, which have probability, keep their accuracy, and a tile's largest is exact.

    Attributes:
        stored: `[n, c]`, a logit less its tile's largest, in tiles of equal size; -inf where there is no column. Of a
            tile with an infinite largest they are the logits.
        max: `[tiles, n]` float32.
        factor: `[n]`, to be multiplied with `stored`; `max` is its product already. None: 1.
    """

    stored: jax.Array
    max: jax.Array
    factor: jax.Array | None = None

    def times(self, factor: jax.Array | None) -> Self:
        """The logits times `factor [n]`, which is positive."""
        return self if factor is None else self._replace(max=self.max * factor[None], factor=factor)

    def measured_from(self, reference: jax.Array, further: jax.Array | None = None) -> jax.Array:
        """`z - reference_of(reference) - further`, of each row `[n]` or of all `[1]`, `[n, tiles, columns]` float32.

        XLA fuses whatever follows in this shape into one pass, and not in all cases if it is `[n, c]`.
        """
        tiles, n = self.max.shape
        largest = self.max - reference_of(reference)[None]
        largest = (largest if further is None else largest - further[None]).T[:, :, None]
        distance = self.stored.reshape(n, tiles, -1).astype(largest.dtype)
        return largest + (distance if self.factor is None else self.factor[:, None, None] * distance)


def reference_of(m: jax.Array) -> jax.Array:
    """The reference of a row with the largest logit m: m, or 0 where m is infinite.

    So exponentials are 0 in a row of -inf only, and inf for a logit of +inf, instead of e^nan.
    """
    return jnp.where(jnp.isinf(m), 0.0, m)


def product(weight: jax.Array, value: jax.Array) -> jax.Array:
    """weight·value, and 0 where the weight is 0: 0·(±inf) = 0. A NaN of the weight stays."""
    return jnp.where(weight == 0, 0.0, weight * value)


def places_in_tile(labels: jax.Array, columns: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Where in a tile the targets `labels [n, K]` lie, `[n, K]`, and whether they do, in a column that is valid.

    The places of those that do not mean nothing, but lie in the tile.
    """
    last = columns.shape[0] - 1
    offset = labels - columns[0]
    place = jnp.clip(offset, 0, last)
    inside = (offset >= 0) & (offset <= last)
    return place, inside if valid is None else inside & valid[place]


class Row(NamedTuple):
    """Whole rows, as definitions read them; `[n, V]`."""

    tile: LogitsTile
    log_p: jax.Array  # 0 where p is 0
    p: jax.Array  # 0 in rows of -inf only
    lse: jax.Array  # [n]
    reference: jax.Array  # [n], m
    log_sum: jax.Array  # [n], lse - m, which is kept apart

    def argmax(self) -> jax.Array:
        """`[n]` int32."""
        return jnp.argmax(self.tile.logits, axis=1).astype(jnp.int32)

    def entropy(self) -> jax.Array:
        """`[n]`."""
        return -(self.p * self.log_p).sum(axis=1)
