"""What the modes share: a call as data, and how its gradients are finished."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.gradient_products import NeedsGrad, Products, scale_gradient
from pallas_ce.head import Batch, Head
from pallas_ce.parallel.shards import Axes, RowArrays, Shards, Sums, psum
from pallas_ce.statistics.logits import product
from pallas_ce.statistics.powers import exponent_above, power_of_two


class RowTotal(Protocol):
    """`(statistics [n], (by_row, shared)) -> [n]`, each row's share of the total.

    Attributes:
        defined_at_zero: whether its values and derivatives are finite where statistics and inputs by row are 0. It is
            then given zeros for rows that do not count, else what a row that counts holds.
    """

    defined_at_zero: ClassVar[bool]

    @property
    def names(self) -> frozenset[str]:
        """The statistics that it reads."""
        ...

    def __call__(self, statistics: dict[str, jax.Array], inputs: tuple[Any, Any], /) -> jax.Array:
        """Each row by itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Call[How]:
    """Static facts of a call.

    Attributes:
        settings: how it is carried out.
        names: the primitive statistics to return.
        row_total: makes the sum over the rows; None where the call returns the statistics.
    """

    settings: How
    names: frozenset[str]
    row_total: RowTotal | None = None

    @property
    def read(self) -> frozenset[str]:
        """The `names` that `row_total` reads."""
        return frozenset() if self.row_total is None else self.row_total.names


class Gradients(NamedTuple):
    """Gradients of the inputs, or what they are made of before upstream scalar and scale; None where not needed."""

    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    logit_scale: jax.Array | None = None
    up: jax.Array | None = None
    down: jax.Array | None = None


class Known(NamedTuple):
    """A forward's results, given to a later evaluation of the same problem so that they are not made again.

    For callers whose differentiation keeps arrays from forward to backward and not closures: `evaluate.keep` makes it,
    and the functions there that take it have the same values and gradients with it as without.

    Attributes:
        statistics: `[N]` each, those that the loss reads and those that its derivatives do.
        sums: in_forward's, that the gradients come from.
    """

    statistics: dict[str, jax.Array]
    sums: Gradients = Gradients()


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
        batch: the rows.
        head: the head.
        mask: `[...]` bool, which rows count; None: all.
        inputs: what else is read, with `row_total` its `(by_row, shared)`: pytrees of `[..., *K]`, and of arrays that
            all rows share.
        known: what `evaluate.keep` has found for the same call, or None.
        cotangent: `[]`, of the sum of the row totals, where gradients are made at once; None: it is not known yet.
    """

    batch: Batch
    head: Head
    mask: jax.Array | None
    inputs: Any = ((), ())
    known: Known | None = None
    cotangent: jax.Array | None = None


def absent() -> jax.Array:
    """Stands for None among residuals."""
    return jnp.zeros(1, jnp.int8)


def through_down(head: Head, for_hidden: jax.Array | None, for_low: jax.Array | None) -> jax.Array | None:
    """`for_hidden [n, H]` with what a low-rank term adds to it: `for_low·down`."""
    if for_hidden is None or for_low is None:
        return for_hidden
    assert head.down is not None
    operand, factor = _fitted(for_low, head)
    return for_hidden + factor * head.matmul(operand, head.down, (1, 0))


def _for_down(head: Head, rows: RowArrays, for_low: jax.Array) -> jax.Array:
    """`for_lowᵀ·hidden [r, H]`, where `for_low [N, r]` is 0 in rows that do not count."""
    operand, factor = _fitted(for_low, head)
    # Behind a barrier: XLA would keep until now what it zeroed to find `low`, or as many zeros.
    hidden = rows.batch.hidden
    operand, hidden, zero = jax.lax.optimization_barrier((operand, hidden, jnp.zeros((), hidden.dtype)))
    counted = hidden if rows.mask is None else jnp.where(rows.mask[..., None], hidden, zero)
    return factor * head.matmul(operand, counted, (0, 0))


def _fitted(x: jax.Array, head: Head) -> tuple[jax.Array, jax.Array]:
    """`x` as an operand, divided by the power of two that comes with it, so that it fits every dtype's range."""
    shift = exponent_above(x)
    return (x * power_of_two(-shift, x.dtype)).astype(head.spec.dtype), power_of_two(shift, x.dtype)


def sum_over_devices(shards: Shards, rows: RowArrays, head: Head, needs_grad: NeedsGrad, sums: Products) -> Gradients:
    """The head's small sums from this device's share of them, beside the weight's as it came.

    A mode decides when hidden's and weight's are rounded and summed. The scale's gradient is made here, from hidden's
    and the bias's (see `scale_gradient`), and `down`'s from the rows' `low`.
    """
    scale = down = None
    if needs_grad.logit_scale:
        assert sums.hidden is not None
        scale = scale_gradient(rows.batch.hidden, sums.hidden, head.bias, sums.bias)
        scale = psum(scale, shards.sums.logit_scale)
    if needs_grad.down:
        assert sums.low is not None
        down = psum(_for_down(head, rows, sums.low), shards.sums.down)
    bias = None if sums.bias is None or not needs_grad.bias else shards.sum_entries(sums.bias, shards.sums.bias)
    up = None if sums.up is None else shards.sum_entries(sums.up, shards.sums.up)
    return Gradients(None, sums.weight, bias, scale, up, down)


def without_padding(head: Head, columns: int, sums: Products, *, weight: bool = True) -> Products:
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


def adds_in_place(head: Head, shards: Shards) -> bool:
    """Whether a device adds to its part of `head.running` what it makes, where it lies; else what all devices made."""
    running = head.running
    return (
        running is not None and running.dtype == head.spec.accumulator and not (shards.sums.weight or shards.gathered)
    )


def added(running: jax.Array, gradient: jax.Array) -> jax.Array:
    """`running` with a gradient in the accumulator dtype, rounded once."""
    return (running.astype(gradient.dtype) + gradient).astype(running.dtype)


def finish(
    operands: Operands, sums: Gradients, upstream: jax.Array | None = None, axes: Sums | None = None
) -> Gradients:
    """Gradients from their sums, times the upstream scalar (None: 1) and the logit scale, each rounded once.

    Where each device has a share of a gradient, the shares are added up over `axes`; the weight's, see `Shards`, when
    they have been rounded.
    """
    head, axes = operands.head, axes or Sums()
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

    return Gradients(
        rounded(sums.hidden, operands.batch.hidden, axes.hidden),
        None if (weight := rounded(sums.weight, head.weight, ())) is None else psum(weight, axes.weight),
        rounded(sums.bias, head.bias, axes.bias),
        None if sums.logit_scale is None else psum(upstream * sums.logit_scale, axes.logit_scale),
        rounded(sums.up, head.up, axes.up),
        rounded(sums.down, head.down, axes.down),
    )
