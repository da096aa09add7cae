"""How gradients are finished: from one device's sums to what a mode returns."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ce.head import Head
from pallas_ce.modes.call import Operands
from pallas_ce.parallel.shards import NO_AXES, Axes, Local, RowArrays, psum
from pallas_ce.statistics.gradient import exponent_above, power_of_two
from pallas_ce.statistics.logits import product
from pallas_ce.streaming.gradient_products import Arrays, PerInput, scale_gradient


def through_down(head: Head, for_hidden: jax.Array | None, for_down: jax.Array | None) -> jax.Array | None:
    """`for_hidden [n, H]` with what a low-rank term adds to it, `for_down [n, r]·down`."""
    if for_hidden is None or for_down is None:
        return for_hidden
    assert head.down is not None
    operand, factor = _fitted(for_down, head)
    return for_hidden + factor * head.matmul(operand, head.down, (1, 0))


def _down_gradient(head: Head, rows: RowArrays, for_down: jax.Array) -> jax.Array:
    """`for_downᵀ·hidden [r, H]`, where `for_down [N, r]` is 0 in rows that do not count."""
    operand, factor = _fitted(for_down, head)
    # Behind a barrier: XLA would keep until now what it zeroed to find `low`, or as many zeros.
    hidden = rows.batch.hidden
    operand, hidden, zero = jax.lax.optimization_barrier((operand, hidden, jnp.zeros((), hidden.dtype)))
    counted = hidden if rows.mask is None else jnp.where(rows.mask[..., None], hidden, zero)
    return factor * head.matmul(operand, counted, (0, 0))


def _fitted(x: jax.Array, head: Head) -> tuple[jax.Array, jax.Array]:
    """`x` as an operand, divided by the power of two that comes with it, so that it fits every dtype's range."""
    shift = exponent_above(x)
    return (x * power_of_two(-shift, x.dtype)).astype(head.spec.dtype), power_of_two(shift, x.dtype)


def sum_over_devices(
    local: Local,
    needs_grad: PerInput[bool],
    sums: Arrays,
    dtypes: tuple[np.dtype, np.dtype],
    *,
    scattered: bool = False,
    hidden_scale: jax.Array | None = None,
) -> tuple[jax.Array | None, Arrays]:
    """Hidden's sum and the head's from this device's share of the products' sums.

    The scale's is made here, from hidden's and the bias's (see `scale_gradient`), and `down`'s from its product by row.
    Hidden's and the weight's are rounded to `dtypes`, hidden's after `hidden_scale`. The weight's is added to the given
    one, unless it `adds_in_place`; it is `scattered` where it is this device's part of it already.
    """
    (shards, rows, head, given), hidden, weight, scale, down = local, None, sums.weight, None, None
    if needs_grad.logit_scale:
        assert sums.hidden is not None
        scale = scale_gradient(rows.batch.hidden, sums.hidden, head.bias, sums.bias)
        scale = psum(scale, shards.sums.logit_scale)
    if needs_grad.down:
        assert sums.down is not None
        down = psum(_down_gradient(head, rows, sums.down), shards.sums.down)
    bias = None if sums.bias is None or not needs_grad.bias else shards.sum_entries(sums.bias, shards.sums.bias)
    up = None if sums.up is None else shards.sum_entries(sums.up, shards.sums.up)
    if needs_grad.hidden:
        assert sums.hidden is not None
        scaled = sums.hidden if hidden_scale is None else product(sums.hidden, hidden_scale)
        hidden = shards.sum_hidden(scaled, dtypes[0])
    if weight is not None and not local.adds_in_place:
        own = weight if scattered else shards.scatter_weight(weight, head.spec.vocab_axis)
        own = psum(own.astype(dtypes[1]), shards.sums.weight)
        weight = own if given.weight is None else added(given.weight, own)
    return hidden, PerInput(None, weight, bias, scale, up, down)


def without_padding(head: Head, columns: int, sums: Arrays, *, weight: bool = True) -> Arrays:
    """The head's sums, the `weight`'s too, with 0 in the padding among the first `columns` entries that tiles cover.

    Its dlogits are 0, but a NaN in hidden states makes a NaN of 0·NaN.
    """
    spec = head.spec

    def cleared(x: jax.Array | None, axis: int = 0) -> jax.Array | None:
        if x is None or columns == spec.vocab_size:
            return x
        zeros = jnp.zeros([columns - spec.vocab_size if i == axis else n for i, n in enumerate(x.shape)], x.dtype)
        # From an index that XLA does not know: else it would make one operation of this and a kernel's, and fail.
        start = lax.optimization_barrier(jnp.int32(spec.vocab_size))
        return lax.dynamic_update_slice_in_dim(x, zeros, start, axis)

    own = cleared(sums.weight, spec.vocab_axis) if weight else sums.weight
    return sums._replace(weight=own, bias=cleared(sums.bias), up=cleared(sums.up))


def added(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """`total` with a gradient in the accumulator dtype, rounded once."""
    return (total.astype(gradient.dtype) + gradient).astype(total.dtype)


def finish(
    operands: Operands, sums: Arrays, upstream: jax.Array | None = None, axes: PerInput[Axes] = NO_AXES
) -> Arrays:
    """Gradients from their sums, times the upstream scalar (None: 1) and the logit scale, each rounded once.

    Where each device has a share of a gradient, the shares are added up over `axes`; the weight's, see `Shards`, when
    they have been rounded.
    """
    head, arrays = operands.head, operands.differentiable
    upstream = jnp.ones((), head.spec.accumulator) if upstream is None else upstream
    scale = upstream if head.logit_scale is None else upstream * head.logit_scale

    def rounded(total: jax.Array | None, like: jax.Array | None, axes: Axes) -> jax.Array | None:
        if total is None or like is None:
            return None
        total = total.astype(scale.dtype)
        # Rows and columns that do not count have 0, whatever the logit scale is. Upstream scalars alone are often a
        # constant 1, with which there is nothing to be done.
        scaled = scale * total if head.logit_scale is None else product(total, scale)
        return psum(scaled, axes).astype(like.dtype)

    found = [
        rounded(*of_input)
        for of_input in zip(sums._replace(logit_scale=None), arrays, axes._replace(weight=()), strict=True)
    ]
    weight, logit_scale = found[1], sums.logit_scale
    return PerInput(*found)._replace(
        weight=None if weight is None else psum(weight, axes.weight),
        logit_scale=None if logit_scale is None else psum(upstream * logit_scale, axes.logit_scale),
    )
