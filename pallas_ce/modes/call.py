"""What the modes share: a call as data, the derivatives of its row loss, and how sums become gradients."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head
from pallas_ce.modes.how import How
from pallas_ce.parallel.shards import NO_AXES, Axes, Local, RowArrays, Shards, psum
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.logits import product
from pallas_ce.statistics.row import only, struct
from pallas_ce.streaming.gradient_products import BY_COLUMN, NO_ARRAYS, Arrays, PerInput, scale_gradient
from pallas_ce.streaming.loops import vary_like
from pallas_ce.streaming.rows import RowBlock, present, zeroed

Statistics = dict[str, jax.Array]


class RowTotal(Protocol):
    """`(statistics [n], (by_row, shared)) -> [n]`, each row's share of the total."""

    # Whether its values and derivatives are finite where statistics and inputs by row are 0. It is then given zeros for
    # rows that do not count, else what a row that counts holds.
    defined_at_zero: ClassVar[bool]

    @property
    def names(self) -> frozenset[str]:
        """The statistics that it reads."""

    def __call__(self, statistics: Statistics, inputs: tuple[Any, Any], /) -> jax.Array:
        """Each row by itself."""


class Known(NamedTuple):
    """A forward's results, given to a later evaluation of the same problem so that they are not made again.

    For callers whose differentiation keeps arrays from forward to backward and not closures: `evaluate.keep` makes it,
    and the functions there that take it have the same values and gradients with it as without.
    """

    statistics: Any  # a tree of `[N]`, those that the loss reads and those that its derivatives do
    sums: Arrays = NO_ARRAYS  # in_forward's, that the gradients come from, before upstream scalar and scale


class Operands(NamedTuple):
    """The arrays of a call."""

    batch: Batch
    head: Head
    mask: jax.Array | None  # `[...]` bool, which rows count; None: all
    # What else is read; by a `row_total` as `(by_row, shared)`: pytrees of `[..., *K]`, and of arrays that all rows
    # share.
    inputs: Any = ((), ())
    known: Known | None = None  # what `evaluate.keep` has found for the same call
    cotangent: jax.Array | None = None  # `[]`, of the sum of the row totals, where gradients are made at once
    weight_sum: jax.Array | None = None  # like the weight, float32 or of its dtype: what its gradient is then added to

    @property
    def rows(self) -> RowArrays:
        """Which are streamed."""
        return RowArrays(self.batch, self.mask)

    @property
    def differentiable(self) -> Arrays:
        """The inputs that can be differentiated."""
        return PerInput.by_name(lambda name: getattr(self.batch if name == "hidden" else self.head, name))

    def replaced(self, inputs: PerInput[Any]) -> Self:
        """Puts `inputs`, arrays or not, in place of the differentiable ones."""
        of_head = dict(vars(inputs))
        batch = self.batch._replace(hidden=of_head.pop("hidden"))
        return self._replace(batch=batch, head=dataclasses.replace(self.head, **of_head))

    def finish(self, sums: Arrays, upstream: jax.Array | None = None, axes: PerInput[Axes] = NO_AXES) -> Arrays:
        """Gradients from their sums, times the upstream scalar (None: 1) and the logit scale, each rounded once.

        Where each device has a share of a gradient, the shares are added up over `axes`; the weight's, see `Shards`,
        when they have been rounded.
        """
        head, arrays = self.head, self.differentiable
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

        found = sums._replace(logit_scale=None).map(rounded, arrays, axes._replace(weight=()))
        if found.weight is not None:
            found = found._replace(weight=psum(found.weight, axes.weight))
        if sums.logit_scale is not None:
            found = found._replace(logit_scale=psum(upstream * sums.logit_scale, axes.logit_scale))
        return found


@dataclasses.dataclass(frozen=True)
class Call:
    """Static facts of a call."""

    how: How  # how it is carried out
    names: frozenset[str]  # the primitive statistics to return
    row_total: RowTotal | None = None  # makes the sum over the rows; None where the call returns the statistics

    @property
    def in_forward(self) -> bool:
        """Whether a handle carries the gradients, made in the forward."""
        return self.how.mode == "in_forward" and self.row_total is not None

    @property
    def read(self) -> frozenset[str]:
        """The `names` that `row_total` reads and that have a derivative."""
        return frozenset() if self.row_total is None else self.row_total.names - {"argmax"}

    def with_handle(self, operands: Operands, found: Statistics) -> tuple[Statistics, jax.Array]:
        """Statistics and handle, made to depend on each other and on what the row total reads beside.

        Under vmap each example then has a handle of its own, and a function and its forward rule, which also reads the
        inputs, agree on which outputs are batched, as JAX requires.
        """
        leaves = jax.tree.leaves((found, operands.inputs))
        firsts = (jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim) for x in leaves)
        zero = sum((jnp.sum(jnp.where(x != x, 0, 0), dtype=jnp.int32) for x in firsts), jnp.zeros((), jnp.int32))
        found = {k: x + zero.astype(x.dtype) for k, x in found.items()}
        return found, self.how.total(zero.astype(operands.head.spec.accumulator))

    def row_cotangents(self, statistics: Statistics, block: RowBlock, inputs: tuple[Any, Any]) -> Statistics:
        """d Σ row_total / d statistics, of those that it reads, for the block's valid rows; exactly 0 for others."""

        def summed(varied: Statistics) -> jax.Array:
            return jnp.sum(present(self.row_total)({**statistics, **varied}, inputs))

        # Declared to vary as the inputs do: their cotangents are wanted as they are, and not added up over devices.
        varied = {name: vary_like(x, inputs) for name, x in only(statistics, self.read).items()}
        return jax.tree.map(lambda g: block.select(g, 0.0), jax.grad(summed)(varied))


def empty_statistics(names: frozenset[str], batch: Batch, head: Head) -> Statistics:
    """Zeros for each statistic: what ignored rows keep."""
    shapes = batch.leading, batch.targets
    return {name: jnp.zeros_like(struct(name, *shapes, head.spec.accumulator)) for name in sorted(names)}


def gradient_of(
    cotangents: Statistics,
    statistics: Statistics,
    shards: Shards,
    batch: Batch,
    head: Head,
    mask: jax.Array | None = None,
) -> tuple[Gradient, Batch]:
    """What kernels are given of the statistics' cotangents, 0 in rows not in `mask`, and the rows as `of_batch` has."""
    coefficients, batch = coef.of_batch(cotangents, statistics, batch)
    coefficients, factor = coef.normalise(zeroed(mask, coefficients), head.largest_logit_weight)
    coefficients = coef.measured_from_largest(coefficients, statistics.get("log_sum"))
    reference = statistics["max_logit"] if coefficients.prob is not None else None
    argmax = shards.columns(statistics["argmax"], head) if coefficients.argmax is not None else None
    return Gradient(coefficients, reference, argmax, factor=factor), batch


def through_down(head: Head, for_hidden: jax.Array | None, for_down: jax.Array | None) -> jax.Array | None:
    """`for_hidden [n, H]` with what a low-rank term adds to it, `for_down [n, r]·down`."""
    if for_hidden is None or for_down is None:
        return for_hidden
    operand, factor = _fitted(for_down, head)
    return for_hidden + factor * head.matmul(operand, present(head.down), (1, 0))


def _fitted(x: jax.Array, head: Head) -> tuple[jax.Array, jax.Array]:
    """`x` as an operand, divided by the power of two that comes with it, so that it fits every dtype's range."""
    shift = coef.exponent_above(x)
    return (x * coef.power_of_two(-shift, x.dtype)).astype(head.spec.dtype), coef.power_of_two(shift, x.dtype)


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
    Hidden's and the weight's are rounded to `dtypes`, hidden's after `hidden_scale`, the weight's before devices add it
    up. It is added to the given one, unless it `adds_in_place`; `scattered` where it is this device's part already.
    """
    (shards, rows, head, given), hidden, weight, scale, down = local, None, sums.weight, None, None
    if needs_grad.logit_scale:
        scale = scale_gradient(rows.batch.hidden, present(sums.hidden), head.bias, sums.bias)
        scale = psum(scale, shards.sums.logit_scale)
    if needs_grad.down:
        operand, factor = _fitted(present(sums.down), head)
        # Behind a barrier: XLA would keep until now what it zeroed to find `low`, or as many zeros.
        zero = jnp.zeros((), rows.batch.hidden.dtype)
        operand, counted, zero = jax.lax.optimization_barrier((operand, rows.batch.hidden, zero))
        counted = counted if rows.mask is None else jnp.where(rows.mask[..., None], counted, zero)
        down = psum(factor * head.matmul(operand, counted, (0, 0)), shards.sums.down)
    own_sums = sums.where(needs_grad).of(BY_COLUMN, shards.sum_entries, shards.sums)
    if needs_grad.hidden:
        hidden = present(sums.hidden)
        hidden = shards.sum_hidden(hidden if hidden_scale is None else product(hidden, hidden_scale), dtypes[0])
    if weight is not None and not local.adds_in_place:
        own = weight.astype(dtypes[1])
        own = psum(own if scattered else shards.scatter_weight(own, head.spec.vocab_axis), shards.sums.weight)
        weight = own if given.weight is None else added(given.weight, own)
    return hidden, own_sums._replace(hidden=None, weight=weight, logit_scale=scale, down=down)


def added(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """`total` with a gradient in the accumulator dtype, rounded once."""
    wide = jnp.promote_types(total.dtype, gradient.dtype)
    return (total.astype(wide) + gradient.astype(wide)).astype(total.dtype)
