"""What tiles of dlogits are multiplied for: which gradients are asked, their shares, and the sums they go into."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.streaming.tiles import Tile


class Products(NamedTuple):
    """What a tile of dlogits `[n, c]` is multiplied for, or sums of that; in the accumulator dtype, None if not needed.

    Attributes:
        hidden: `dlogits·weight_tile [n, H]`.
        weight: `dlogitsᵀ·hidden` in the weight tile's layout.
        bias: `Σ_i dlogits [c]`.
        low: `dlogits·up_tile [n, r]`.
        up: `dlogitsᵀ·low [c, r]`.
        weight_bits: where `weight` is a bfloat16 sum, until all blocks are added: the bits that it lacks; see
            `Backend.weight_bits`.
    """

    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    low: jax.Array | None = None
    up: jax.Array | None = None
    weight_bits: jax.Array | None = None

    def added(self, hidden_sum: jax.Array | None, weight_sum: "WeightSum | None", vocab_axis: int) -> "Products":
        """What a `TileStep` returns of a tile's products, from hidden's sum with the tile's share."""
        weight = self.weight
        if weight_sum is not None and weight is not None:
            weight = weight_sum.add(weight, vocab_axis)
        return self._replace(hidden=hidden_sum, weight=weight)


def plus(total: jax.Array | None, share: jax.Array | None) -> jax.Array | None:
    """Their sum; None where there is none of either."""
    return None if total is None or share is None else total + share


@dataclasses.dataclass(frozen=True)
class WeightSum:
    """What a tile's share of the weight's gradient goes into.

    Attributes:
        array: the whole gradient, whose part of the tile is replaced; or a sum in the accumulator dtype, of the tile's
            shape.
        tile: the tile.
        scale: `[]`, which shares are multiplied by for the whole gradient; None for a tile's sum.
        adds: whether the whole gradient is a sum itself, in the accumulator dtype, whose part is added to.
    """

    array: jax.Array
    tile: Tile
    scale: jax.Array | None
    adds: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is the whole gradient."""
        return self.scale is not None

    def add(self, product: jax.Array, vocab_axis: int) -> jax.Array:
        """`array` with a share in the weight tile's layout."""
        if self.scale is None:
            return self.array + product
        if self.adds:
            return self.tile.add(self.array, self.scale * product, vocab_axis)
        return self.tile.put(self.array, (self.scale * product).astype(self.array.dtype), vocab_axis)


# `(tile index, hidden's sum, the weight's sum)` -> both with the tile's shares, and the others' shares; see `Backend`.
TileStep = Callable[[jax.Array, jax.Array | None, WeightSum | None], Products]


@dataclasses.dataclass(frozen=True)
class NeedsGrad:
    """Which inputs are differentiated; the others' products, buffers and collectives are skipped. Static."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    logit_scale: bool = False
    up: bool = False
    down: bool = False

    def __bool__(self) -> bool:
        return any(dataclasses.astuple(self))

    @property
    def hidden_product(self) -> bool:
        """The scale's gradient comes from the hidden one's (see `scale_gradient`), so either needs that product."""
        return self.hidden or self.logit_scale

    @property
    def low_product(self) -> bool:
        """A low-rank term makes a share of hidden's gradient, and all of `down`'s."""
        return self.hidden_product or self.down

    @property
    def bias_sum(self) -> bool:
        """The scale's gradient also comes from the bias's, the sum of dlogits over the rows."""
        return self.bias or self.logit_scale

    @property
    def products(self) -> int:
        """Matrix products with the width of hidden states beside the logits' own."""
        return int(self.hidden_product) + int(self.weight)


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
