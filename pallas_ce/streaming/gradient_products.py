"""What tiles of dlogits are multiplied for: which gradients are asked, and where the products go."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Tile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerInput[T]:
    """Something for each input that a head is differentiated in, a pytree. All have one type, so each is given by name.

    The products of a tile of dlogits `[n, c]`, or sums of them, are in the accumulator dtype, None if not needed:
    `hidden` is `dlogits·weight_tile [n, H]`, `weight` is `dlogitsᵀ·hidden` in the weight tile's layout, `bias` is
    `Σ_i dlogits [c]`, and `up` is `dlogitsᵀ·low [c, r]`. `down` is `dlogits·up_tile [n, r]`: `down`'s gradient and a
    low-rank term's share of hidden's are made of it. The scale's gradient has no product: see `scale_gradient`. A
    `vocab_scale` multiplies weight and up in all of these, and has a product `[c]` with what it multiplies.
    """

    hidden: T
    weight: T
    bias: T
    logit_scale: T
    up: T
    down: T
    vocab_scale: T

    @staticmethod
    def by_name[U](f: Callable[[str], U]) -> "PerInput[U]":
        """`f` of each input's name."""
        return PerInput(**{name: f(name) for name in INPUTS})

    def __iter__(self) -> Iterator[T]:
        return iter(vars(self).values())

    def _replace(self, **changes: T) -> "PerInput[T]":
        return PerInput(**{**vars(self), **changes})

    def map[U](self, f: Callable[..., U], *others: "PerInput[Any]") -> "PerInput[U]":
        """`f` of each, and of what the `others` have for the same input."""
        return PerInput.by_name(lambda name: f(*(getattr(x, name) for x in (self, *others))))

    def where(self, flags: "PerInput[bool]") -> "PerInput[T | None]":
        """None in place of those that are not flagged."""
        return self.map(lambda x, flag: x if flag else None, flags)

    def of(self, names: Iterable[str], f: Callable[..., T], *others: "PerInput[Any]") -> "PerInput[T]":
        """With `f` of the values here and in the others for each of `names`, None where one has None."""
        given = {name: [getattr(x, name) for x in (self, *others)] for name in names}
        made: Any = {name: None if any(x is None for x in xs) else f(*xs) for name, xs in given.items()}
        return self._replace(**made)


INPUTS = tuple(PerInput.__dataclass_fields__)

# The inputs whose products have an entry for each row.
BY_ROW = ("hidden", "down")

# A head's arrays beside the weight with an entry for each column of the vocabulary, along the first axis; so have their
# products. And whether products of dlogits read them: a shard's padding of these has to be 0, as 0·NaN is not.
BY_COLUMN = {"bias": False, "up": True, "vocab_scale": True}

# Gradients, or products of dlogits.
Arrays = PerInput[jax.Array | None]

NO_ARRAYS: Arrays = PerInput.by_name(lambda _: None)
NO_GRADIENT: PerInput[bool] = PerInput.by_name(lambda _: False)


class WeightGradient(NamedTuple):
    """Where a share of the weight's gradient goes; a mode makes it for each share."""

    array: jax.Array  # the whole gradient or a sum for it; or a sum in the accumulator dtype for one tile
    adds: jax.Array | bool = True  # whether the share is added to the contents, else it replaces them; may be traced
    scale: jax.Array | None = None  # `[]`, which the share is multiplied by; None: 1
    tile: Tile | None = None  # the columns of the share, where `array` has others too
    bits: jax.Array | None = None  # what `array`, if a bfloat16 sum of several blocks, lacks; see `Backend.weight_bits`

    def with_share(self, product: jax.Array, vocab_axis: int) -> jax.Array:
        """`array` with a share in the weight tile's layout; what has no `tile` is added to."""
        share = product if self.scale is None else self.scale * product
        if self.tile is None:
            return self.array + share
        if self.adds:
            return self.tile.add(self.array, share, vocab_axis)
        return self.tile.put(self.array, share.astype(self.array.dtype), vocab_axis)


def put_in_sums(
    found: Arrays, block: RowBlock, hidden_sum: jax.Array | None, weight_sum: WeightGradient | None, vocab_axis: int
) -> Arrays:
    """What a `TileStep` returns of a block's products of a tile."""
    found = found._replace(hidden=block.add(hidden_sum, found.hidden))
    if weight_sum is None or found.weight is None:
        return found
    return found._replace(weight=weight_sum.with_share(found.weight, vocab_axis))


# `(tile index, hidden's sum, the weight's sum)` -> products; in place of hidden's and the weight's there are these sums
# with the tile's shares. See `Backend`.
TileStep = Callable[[jax.Array, jax.Array | None, WeightGradient | None], Arrays]


def scale_gradient(
    hidden: jax.Array, unscaled_hidden: jax.Array, bias: jax.Array | None, unscaled_bias: jax.Array | None
) -> jax.Array:
    """dL/dscale from the gradients before their multiplication by the scale: no pass over the logits.

    With `x = scale·y`, `y = hidden·weight + bias` is linear in (hidden, bias) together, so
    `Σ_ij dL/dx_ij · y_ij = <hidden, dL/dx·weight> + <bias, Σ_i dL/dx_i>`.
    """
    # Rows that do not count have a gradient of 0, whatever they hold: 0·nan is not 0.
    total = jnp.sum(jnp.where(unscaled_hidden == 0, 0, hidden.astype(unscaled_hidden.dtype) * unscaled_hidden))
    if bias is not None and unscaled_bias is not None:
        finite = jnp.isfinite(bias)  # the logit of a -inf bias has gradient 0, and 0·(-inf) = 0
        total += jnp.sum(jnp.where(finite, bias, 0).astype(unscaled_bias.dtype) * unscaled_bias)
    return total
