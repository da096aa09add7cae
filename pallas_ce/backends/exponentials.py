"""The in-forward mode's work on a block of rows whose logits are kept as exponentials in the operands' dtype.

With a reference `e_i` near row i's lse, `E_ij = e^{z_ij - e_i}` needs no maximum to be known in advance. Beside the
largest logit m, which gradients are measured from, `e^{z_ij - m_i} = e^{e_i - m_i}·E_ij`: a factor by row, which both
gradient products can apply to an operand or to a result of theirs. So dlogits need not be formed: with
`s_i = A_i·e^{e_i - m_i}`, the term `A·e^{z-m}` contributes

    s_i·(E·W)_i  to the gradient of h_i        (Eᵀ·(s∘h))_j  to the gradient of W_j

and the target's term changes one entry of each row of E. Rounding E is the rounding that dlogits would have had.
The statistics come from the unrounded values.

There are two ways, chosen between when compiling (A to G are the terms of the gradient's formula):

* *Scaled*, where only A, D and F appear and there is no soft cap. E itself is the products' operand, and the row
  factors `s` are applied to small operands and results. The targets' and the argmax's entries of E are replaced by
  their exact dlogits divided by s. So no pass over `[rows, V]` is made.
* *Formed*, for all others. One elementwise pass turns E into dlogits, with `z = e + log E`. Exact entries are put in
  afterwards, and `s = 1`.

Two things show when running, and for either the block's E is made again, in the same memory and by the same kernel. If
some row's reference was too far from its lse for E, references are the rows' largest logits, which are found with the
sums. If a replaced entry `d` would not fit because A is small beside it, they are `m + log max(1, |d|/|A|)`, which
makes `|s| >= |d|`.

float16 has no range for logarithms, so there dlogits that need them are not formed but recomputed, by another kernel.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import entries
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.row import Partial, from_reference, spread
from pallas_ce.statistics.table import log_sum
from pallas_ce.streaming.gradient_products import NO_ARRAYS, Arrays, WeightGradient
from pallas_ce.streaming.tiles import Columns, pad

# Vocabulary entries, evenly spaced, from which an lse is guessed; their exponentials may reach e^80 each.
_SAMPLE = 64
_FARTHEST_ABOVE = 80.0

# A reference from which all exponentials are 0.
_HIGHEST = 1e30


class Range(NamedTuple):
    """The range of a format."""

    above_target: float | None  # how far above a target's logit the reference is put; None: the range is too narrow
    below: float  # how far below a guessed lse it is put in that case, and where there are no targets
    low: float  # least `lse - reference` at which E keeps its accuracy
    high: float  # largest one at which it does not overflow
    largest: float  # of entries that are replaced
    logarithms: bool  # whether logits can be read back from E; else dlogits that need them are recomputed


# bfloat16 has float32's exponents. They are to hold the squares of exponentials too: e^(2·high) at most, and in the
# flattest of rows e^(2·low)/V². A loss is never negative, so a reference above the target's logit fits up to one of 63;
# were it higher, logits that a soft cap of 30 keeps near each other would be too far below it. float16 keeps its
# accuracy over 30 powers of two: probabilities down to 1e-6 are normal numbers, and the largest exponential and a
# replaced entry stay below 2**15.
_FLOAT32 = Range(20.0, 0.0, -30.0, 43.0, 1e30, True)
_RANGES = {"bfloat16": _FLOAT32, "float16": Range(None, 5.0, -1.0, 10.0, 2.0**15, False), "float32": _FLOAT32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stash:
    """One block's logits, as its products need them."""

    exponentials: jax.Array  # E, `[n, V]` or with padding in either axis
    reference: jax.Array  # `[n]`, e
    target_logit: jax.Array | None  # in the labels' shape
    max_logit: jax.Array | None  # `[n]`
    names: frozenset[str] = dataclasses.field(metadata={"static": True})  # of the statistics that were made with it


@dataclasses.dataclass(frozen=True)
class Block(abc.ABC):
    """One block's work; a backend brings two kernels, for exponentials and for dlogits, and two products."""

    head: Head
    batch: Batch
    valid_rows: jax.Array | None  # `[]` int32: rows from there on are skipped; None: none

    @abc.abstractmethod
    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        """What makes the `Partial` without targets, and E in the compute dtype; `reference [n]` is finite.

        Nothing is left of a `Partial` that is not asked for: compilers of jax 0.11 crash on some reductions that none
        reads. It has a maximum and sums of exponentials, whatever `names`, and these are measured from `reference`.

        E's padding is undefined, and so are rows that are skipped. Given an earlier E and the number of rows, `[]`,
        that are made `again`, the result has these rows and lies in the earlier one's memory. If the number is 0, the
        result is the earlier E, and the `Partial` is undefined.
        """

    @abc.abstractmethod
    def dlogits(self, gradient: Gradient, part: Columns | None = None, into: jax.Array | None = None) -> jax.Array:
        """dlogits without single entries, recomputed: `[n, c]` of a part, or of all columns in place of `into`."""

    @abc.abstractmethod
    def for_hidden(self, operand: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
        """`scale∘operand·weight [n, H]`, with `scale [n]`; it may be rounded to `dtype`."""

    @abc.abstractmethod
    def for_weight(
        self, operand: jax.Array, rows: jax.Array, total: WeightGradient, part: Columns | None = None
    ) -> WeightGradient:
        """`total` with `operandᵀ·rows` of a part or all columns, in the weight's layout, in its array and bits."""

    def _all_rows_unless(self, fits: jax.Array) -> jax.Array:
        """`[]` int32: 0 where all of every valid row of `fits`, `[n]` or `[n, K]`, does, else how many are valid."""
        rows, bad = fits.shape[0], self.valid_rows
        if bad is None:
            return jnp.max(jnp.where(fits, 0, rows))
        return jnp.max(jnp.where(fits | (spread(jnp.arange(rows), fits) >= bad), 0, bad))

    def make(self, names: frozenset[str]) -> tuple[Partial, Stash]:
        """Statistics, and the stash; statistics of rows that are not valid mean nothing, but are finite."""
        head, rows = self.head, self.batch.hidden.shape[0]
        bounds = _RANGES[head.spec.dtype.name]
        reference = _usable(_reference(head, self.batch, bounds)).astype(head.spec.accumulator)
        joined, exponentials = self.exponentials(reference, names)
        partial = joined()
        height = log_sum(present(partial.sum_exp))  # lse - reference
        # A row with a NaN stays as it is: no reference would help.
        fits = ~((height < bounds.low) | (height > bounds.high))
        if head.valid_columns is not None:  # a shard of padding only has nothing to be measured
            fits |= head.valid_columns == 0
        bad_rows = self._all_rows_unless(fits)
        # Sums measured from a bad reference may have overflowed; the maxima are what they are.
        reference = jnp.where(bad_rows == 0, reference, _usable(present(partial.max)))
        again, exponentials = self.exponentials(reference, names, (bad_rows, exponentials))
        partial = jax.tree.map(lambda first, second: jnp.where(bad_rows == 0, first, second), partial, again())
        partial = from_reference(partial, reference)
        if self.valid_rows is not None:
            valid = jnp.arange(rows) < self.valid_rows
            partial = jax.tree.map(lambda x: jnp.where(valid, x, jnp.ones((), x.dtype)), partial)
            reference = jnp.where(valid, reference, 1.0)
        partial = entries.with_targets(partial, head, self.batch, names)
        largest = partial.max if "max_logit" in names else None
        return partial, Stash(exponentials, reference, partial.target_logit, largest, names)

    def products(self, gradient: Gradient, stash: Stash, sums: Arrays) -> tuple[Arrays, jax.Array | None]:
        """`Backend.stash_products` of this block, whose stash is `make`'s."""
        head, batch, spec, rows = self.head, self.batch, self.head.spec, self.batch.hidden.shape[0]
        replaced, gradient = entries.exact(head, batch, gradient, stash.target_logit, stash.max_logit)
        _, _, _, needs, factor, total, hidden_dtype = gradient
        scale = jnp.ones(rows, spec.accumulator)
        terms = {name for name, c in gradient.coefficients._asdict().items() if c is not None}
        if spec.softcap is None and terms == {"prob"}:
            operand, scale = self._with_scale(gradient, stash, replaced)
        elif _RANGES[spec.dtype.name].logarithms:
            operand = self._formed(gradient, stash)
        else:
            operand = self.dlogits(gradient, into=stash.exponentials)
        for columns, exact in replaced:
            # Rows that do not count have coefficients and hence scale 0, and no entry to replace.
            operand = entries.put(operand, columns, jnp.where(exact == 0, 0.0, exact / spread(scale, exact)))
        operand = operand[:rows, : spec.vocab_size]
        if head.up is not None:
            operand = entries.zeroed(operand, self.valid_rows)
        for_hidden, for_down, weight, bits, bias_sum, up_sum = None, None, None, None, sums.bias, sums.up
        if needs.hidden:
            for_hidden = self.for_hidden(operand, scale, hidden_dtype or spec.accumulator)
        if head.up is not None and needs.down:
            for_down = scale[:, None] * head.matmul(operand, head.up[: spec.vocab_size], (1, 0))
        if total is not None:
            scaled, late = self._scaled(batch.hidden, scale, factor)
            weight, *_, bits = self.for_weight(operand, scaled, total._replace(scale=late))
        if up_sum is not None:
            scaled, late = self._scaled(present(batch.low), scale, factor)
            product = head.matmul(operand, scaled, (0, 0))
            up_sum += pad(product if late is None else late * product, up_sum.shape)
        if bias_sum is not None:
            counted = operand
            if self.valid_rows is not None:
                counted = jnp.where(jnp.arange(rows)[:, None] < self.valid_rows, operand, 0)
            summed = (counted.astype(spec.accumulator) * scale[:, None]).sum(axis=0)
            bias_sum += pad(factor * summed, bias_sum.shape)
        return NO_ARRAYS._replace(hidden=for_hidden, weight=weight, bias=bias_sum, up=up_sum, down=for_down), bits

    def _with_scale(self, gradient: Gradient, stash: Stash, replaced: entries.Entries) -> tuple[jax.Array, jax.Array]:
        """E and s, `[n]`, from references by which the entries that are to be replaced fit."""
        bounds, largest = _RANGES[self.head.spec.dtype.name], present(gradient.reference)
        prob = present(gradient.coefficients.prob)
        # With a logit of +inf the others' exponentials are 0 by any factor.
        scale = prob * jnp.exp(jnp.where(jnp.isinf(largest), 0.0, stash.reference - largest))
        bad_rows, least = jnp.int32(0), jnp.abs(prob)
        for columns, exact in replaced:
            size = jnp.where((columns < 0) | jnp.isnan(exact), 0.0, jnp.abs(exact))  # NaN is NaN by any factor
            fits = ~(size > bounds.largest * jnp.abs(spread(scale, size)))
            bad_rows = jnp.maximum(bad_rows, self._all_rows_unless(fits))
            least = jnp.maximum(least, size if size.ndim == 1 else size.max(axis=1))
        beyond = jnp.where(least > jnp.abs(prob), least / jnp.abs(prob), 1.0)
        reference = _usable(largest - bounds.below + jnp.log(beyond))
        _, exponentials = self.exponentials(reference, stash.names, (bad_rows, stash.exponentials))
        again = math.exp(-bounds.below) * jnp.where(prob < 0, -least, least)
        return exponentials, jnp.where((bad_rows == 0) | jnp.isnan(scale), scale, again)

    def _formed(self, gradient: Gradient, stash: Stash) -> jax.Array:
        """dlogits from exponentials, without single entries, rounded; one elementwise pass."""
        head, spec, rows = self.head, self.head.spec, stash.reference.shape[0]
        coefficients, largest = gradient.coefficients, gradient.reference
        logits = jnp.log(stash.exponentials[:rows, : spec.vocab_size].astype(spec.accumulator))
        logits, bound = stash.reference[:, None] + logits, head.bound(self.batch.inverse_temperature)
        if bound is not None:
            logits = jnp.clip(logits, -bound, bound)  # what rounding E may have carried beyond
        u = None if coefficients.logit_weights is None else head.tile_logit_weights(0, spec.vocab_size)
        columns = jnp.arange(spec.vocab_size, dtype=jnp.int32)
        valid = None if head.valid_columns is None else columns < head.valid_columns
        formed = coef.dlogits(coefficients, logits, largest, columns, valid, None, None, u, bound)
        return pad(formed.astype(spec.dtype), stash.exponentials.shape)

    def _scaled(
        self, rows: jax.Array, scale: jax.Array, factor: jax.Array | float
    ) -> tuple[jax.Array, jax.Array | None]:
        """The operand `factor·scale∘rows` of E's product with them, and what multiplies that product afterwards."""
        spec = self.head.spec
        rows = jnp.where(scale[:, None] == 0, 0.0, rows.astype(spec.accumulator) * scale[:, None])
        # The factor, a power of two, rides on the rows, so that the product itself can add to the total. float16 has no
        # room for it: there another power of two keeps them in range, and both are applied afterwards.
        late: jax.Array | None = None
        if spec.dtype == jnp.float16:
            shift = coef.exponent_above(rows) - 13
            late, factor = factor * coef.power_of_two(shift, rows.dtype), coef.power_of_two(-shift, rows.dtype)
        return (rows * factor).astype(spec.dtype), late


def _reference(head: Head, batch: Batch, bounds: Range) -> jax.Array:
    """`[n]`: what each row's exponentials are measured from at first.

    With labels it comes from the target's logit, which is computed anyway. Else it is below a guess of the lse, as it
    would be if a few columns stood for all: that takes a product, and XLA a second to choose one by timing many.
    """
    spec, labels = head.spec, batch.labels
    if bounds.above_target is not None and labels is not None:
        # A row without a target may count all the same: it takes the vocabulary's first entry.
        one_each = jnp.maximum(labels if labels.ndim == 1 else labels[:, 0], 0)
        return entries.existing(head, batch, one_each) + bounds.above_target
    stride = max(1, spec.vocab_size // _SAMPLE)
    stop = min(spec.vocab_size, stride * _SAMPLE)
    logits = head.columns(lambda x, axis: jax.lax.slice_in_dim(x, 0, stop, stride, axis)).logits(batch)
    if head.valid_columns is not None:
        logits = jnp.where(jnp.arange(0, stop, stride) < head.valid_columns, logits, -jnp.inf)
    # One reduction: measured from a logit of the sample, whatever it is, rather than from the largest. A sample that
    # lies so far above it that float32 would overflow makes the guess a bad one, as it would most likely be anyway.
    first = jnp.where(jnp.isfinite(logits[:, :1]), logits[:, :1], 0.0)
    total = jnp.exp(jnp.minimum(logits - first, _FARTHEST_ABOVE)).sum(axis=1)
    return first[:, 0] + jnp.log(total * (spec.vocab_size / logits.shape[1])) - bounds.below


def _usable(reference: jax.Array) -> jax.Array:
    """A finite reference: 0 for -inf, a row without logits; for +inf one that makes E 0, except at logits of +inf."""
    return jnp.where(jnp.isfinite(reference), reference, jnp.where(reference > 0, _HIGHEST, 0.0))
