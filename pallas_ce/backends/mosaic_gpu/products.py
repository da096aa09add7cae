"""The in-forward mode's second half: gradient products of one block from its stash.

There are two ways, one of which is chosen when compiling (E is the stash, A to G the terms of the gradient's formula):

* *Scaled*, where only A, D and F appear and there is no soft cap. E itself is the products' operand, and the row
  factors `s` are applied to small operands and results. The target's and the argmax's entries of E are replaced by
  their exact dlogits divided by s. So no pass over `[rows, V]` is made.
* *Formed*, for all others. One elementwise pass turns E into dlogits, with `z = e + log E`. Exact entries are put in
  afterwards, and `s = 1`.

A third way is chosen when running, for the whole block. If some row's reference was too far from its lse for 16 bits,
or a replaced entry would not fit, a kernel recomputes dlogits into the same memory, and `s = 1` again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ce.backends.mosaic_gpu.kernels import (
    dlogits_kernel,
    entries,
    forward_kernel,
    operands,
    product_kernel,
    stash_kernel,
)
from pallas_ce.backends.mosaic_gpu.schedule.config import Config, GradientConfigs
from pallas_ce.backends.protocol import Gradient, HeadSums
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.powers import exponent_above, power_of_two
from pallas_ce.statistics.row import Partial, finalise, merge
from pallas_ce.streaming.loops import device_cond
from pallas_ce.streaming.rows import RowBlock

# Vocabulary entries, evenly spaced, from which a row's lse is guessed; their exponentials may reach e^80 each.
_SAMPLE = 64
_FARTHEST_ABOVE = 80.0


class Range(NamedTuple):
    """What a 16-bit format bears.

    Attributes:
        below: how far below the guessed lse the reference is put.
        low: least `lse - reference` at which E keeps its accuracy.
        high: largest one at which it does not overflow.
        largest: of entries that are replaced.
        logarithms: whether logits can be read back from exponentials; else dlogits that need them are recomputed.
    """

    below: float
    low: float
    high: float
    largest: float
    logarithms: bool


# bfloat16 has float32's exponents, so hardly any guess is too bad. float16 keeps its accuracy over 30 powers of two:
# probabilities down to 1e-6 are normal numbers, and the largest exponential and a replaced entry stay below 2**15.
_RANGES = {"bfloat16": Range(0.0, -60.0, 60.0, 1e30, True), "float16": Range(5.0, -1.0, 10.0, 2.0**15, False)}


class Stash(NamedTuple):
    """What one block's products need of its logits.

    Attributes:
        exponentials: E, of `operands.stored_shape`.
        reference: `[n]`, e.
        bad_rows: `[]` int32: 0 where E can be used, else n.
        target_logit: `[n]` or None.
        max_logit: `[n]` or None.
    """

    exponentials: jax.Array
    reference: jax.Array
    bad_rows: jax.Array
    target_logit: jax.Array | None
    max_logit: jax.Array | None


def make(
    head: Head, batch: Batch, names: frozenset[str], config: Config, forward_config: Config, block: RowBlock
) -> tuple[Partial, Stash]:
    """Statistics of one block, and its stash; those of rows that are not valid mean nothing, but are finite."""
    spec, wide, hidden = head.spec, head.spec.accumulator, batch.hidden
    valid_rows = _skipped_from(spec, block)
    bounds = _RANGES[spec.dtype.name]
    reference = _guess_lse(head, hidden) - bounds.below
    reference = jnp.where(jnp.isfinite(reference), reference, 0.0).astype(wide)
    partial, exponentials = stash_kernel.stash(head, hidden, reference, names, config, valid_rows)
    if valid_rows is not None:
        valid = jnp.arange(hidden.shape[0]) < valid_rows
        partial = jax.tree.map(lambda x: jnp.where(valid, x, jnp.ones((), x.dtype)), partial)
        reference = jnp.where(valid, reference, 1.0)

    if (rest := operands.tail(head, hidden)) is not None:
        of_tail = rest.partial(names)
        partial = merge(partial, of_tail)
        exponentials = _put_tail(exponentials, jnp.exp(rest.logits - reference[:, None]), operands.covered(spec))

    lse = finalise(partial, frozenset({"lse"}))["lse"]
    fits = (lse - reference >= bounds.low) & (lse - reference <= bounds.high)
    if head.valid_columns is not None:  # a shard of padding only has nothing to be measured
        fits |= head.valid_columns == 0
    # Sums measured from a bad reference may have overflowed: then the forward kernel's are taken.
    bad_rows = _all_rows_unless(fits, valid_rows)
    again = forward_kernel.statistics(head, hidden, names | {"lse"}, forward_config, valid_rows=bad_rows)
    if rest is not None:
        again = merge(again, of_tail)
    partial = entries.with_targets(_select(bad_rows == 0, partial, again), head, batch, names)
    stash = Stash(
        exponentials, reference, bad_rows, partial.target_logit, partial.max if "max_logit" in names else None
    )
    return partial, stash


def products(
    head: Head,
    batch: Batch,
    gradient: Gradient,
    stash: Stash,
    sums: HeadSums,
    block: RowBlock,
    configs: GradientConfigs,
) -> tuple[jax.Array | None, HeadSums]:
    """See `Backend.stash_products`."""
    spec, hidden, rows = head.spec, batch.hidden, batch.hidden.shape[0]
    coefficients, lse, argmax, needs, factor = gradient
    adds, valid_rows = block.number != 0, _skipped_from(spec, block)
    work = _Work(head, hidden, valid_rows, configs)
    bounds = _RANGES[spec.dtype.name]
    others = entries.without(coefficients)._replace(prob=None)
    scaled = coefficients.prob is not None and spec.softcap is None and all(c is None for c in others)
    bad_rows, scale = stash.bad_rows, jnp.ones(rows, spec.accumulator)
    operand = stash.exponentials
    if scaled:
        assert lse is not None
        assert coefficients.prob is not None
        scale = jnp.where(bad_rows == 0, coefficients.prob * jnp.exp(stash.reference - lse), 1.0)
    elif bounds.logarithms:
        operand = _form(head, lse, entries.without(coefficients), stash)
    else:
        bad_rows = jnp.int32(rows) if valid_rows is None else valid_rows
    replaced = []
    for columns, logits in ((batch.labels, stash.target_logit), (argmax, stash.max_logit)):
        if columns is not None and logits is not None:
            exact = entries.gradients(head, columns, logits, batch.labels, gradient)
            replaced.append((columns, exact))
            fits = (columns < 0) | (jnp.abs(exact) <= bounds.largest * jnp.abs(scale))
            bad_rows = jnp.maximum(bad_rows, _all_rows_unless(fits, valid_rows))

    operand = work.recomputed(gradient, operand, bad_rows)
    scale = jnp.where(bad_rows == 0, scale, 1.0)
    for columns, exact in replaced:
        # Rows that do not count have coefficients and hence scale 0, and no entry to replace.
        operand = entries.put(operand, columns, jnp.where(exact == 0, 0.0, exact / scale))
    operand = operand[:rows, : spec.vocab_size]
    for_hidden, (weight_sum, bias_sum) = None, sums
    if needs.hidden_product:
        for_hidden = scale[:, None] * work.for_hidden(operand)
    if weight_sum is not None:
        weight_sum = work.for_weight(operand, scale, factor, weight_sum, adds)
    if bias_sum is not None:
        counted = operand if valid_rows is None else jnp.where(jnp.arange(rows)[:, None] < valid_rows, operand, 0)
        summed = (counted.astype(spec.accumulator) * scale[:, None]).sum(axis=0)
        share = operands.pad(factor * summed, bias_sum.shape)
        bias_sum = share + jnp.where(jnp.asarray(adds), bias_sum, 0)
    return for_hidden, HeadSums(weight_sum, bias_sum)


def _guess_lse(head: Head, hidden: jax.Array) -> jax.Array:
    """`[n]`: the lse that every row would have if the rest of its logits were like those of a few columns."""
    spec = head.spec
    stride = max(1, spec.vocab_size // _SAMPLE)
    stop = min(spec.vocab_size, stride * _SAMPLE)
    weight = lax.slice_in_dim(head.weight, 0, stop, stride, spec.vocab_axis)
    bias = None if head.bias is None else head.bias[:stop:stride]
    logits = head.logits(hidden, weight, bias)
    if head.valid_columns is not None:
        logits = jnp.where(jnp.arange(0, stop, stride) < head.valid_columns, logits, -jnp.inf)
    # One reduction: measured from a logit of the sample, whatever it is, rather than from the largest. A sample that
    # lies so far above it that float32 would overflow makes the guess a bad one, as it would most likely be anyway.
    first = jnp.where(jnp.isfinite(logits[:, :1]), logits[:, :1], 0.0)
    total = jnp.exp(jnp.minimum(logits - first, _FARTHEST_ABOVE)).sum(axis=1)
    return first[:, 0] + jnp.log(total * (spec.vocab_size / logits.shape[1]))


def _skipped_from(spec: HeadSpec, block: RowBlock) -> jax.Array | None:
    """`[]` int32: rows from there on are skipped; None where all are computed."""
    return block.filled if product_kernel.skips(spec, block) else None


def _all_rows_unless(fits: jax.Array, valid_rows: jax.Array | None) -> jax.Array:
    """`[]` int32: 0 where every valid row of `fits [n]` does, else how many are valid."""
    rows = fits.shape[0]
    if valid_rows is None:
        return jnp.max(jnp.where(fits, 0, rows))
    return jnp.max(jnp.where(fits | (jnp.arange(rows) >= valid_rows), 0, valid_rows))


def _select(good: jax.Array, a: Partial, b: Partial) -> Partial:
    """`a` where good, else `b`, in the fields that both have."""
    return Partial(*(None if x is None or y is None else jnp.where(good, x, y) for x, y in zip(a, b, strict=True)))


def _put_tail(stored: jax.Array, tail: jax.Array, first: int) -> jax.Array:
    """Sets the columns from `first` on to `tail [n, c]`, and to 0 behind it."""
    values = operands.pad(tail.astype(stored.dtype), (stored.shape[0], stored.shape[1] - first))
    return lax.dynamic_update_slice(stored, values, (0, first))


def _form(head: Head, lse: jax.Array | None, coefficients: Coefficients, stash: Stash) -> jax.Array:
    """dlogits from exponentials, without single entries, rounded; one elementwise pass."""
    spec, rows = head.spec, stash.reference.shape[0]
    exponentials = stash.exponentials
    logits = stash.reference[:, None] + jnp.log(exponentials[:rows, : spec.vocab_size].astype(spec.accumulator))
    if spec.softcap is not None:
        logits = jnp.clip(logits, -spec.softcap, spec.softcap)  # what rounding E may have carried beyond
    u = None if coefficients.logit_weights is None else head.tile_logit_weights(0, spec.vocab_size)
    columns = jnp.arange(spec.vocab_size, dtype=jnp.int32)
    valid = None if head.valid_columns is None else columns < head.valid_columns
    formed = coef.dlogits(coefficients, logits, lse, columns, valid, None, None, u, spec.softcap)
    return operands.pad(formed.astype(spec.dtype), exponentials.shape)


class _Work(NamedTuple):
    """The products of one block; rows from `valid_rows` on are skipped, None: none."""

    head: Head
    hidden: jax.Array
    valid_rows: jax.Array | None
    configs: GradientConfigs

    def recomputed(self, gradient: Gradient, operand: jax.Array, bad_rows: jax.Array) -> jax.Array:
        """`operand`, or dlogits without single entries in its place where `bad_rows []` is n and not 0."""
        (head, hidden, *_), (coefficients, lse, *_) = self, gradient
        coefficients = entries.without(coefficients)

        def write(stored: Any) -> None:
            config = self.configs.dlogits
            dlogits_kernel.dlogits(head, hidden, lse, coefficients, config, into=stored, valid_rows=bad_rows)

        operand = pl.run_state(write)(operand)
        if (rest := operands.tail(head, hidden)) is not None:
            u, cap, first = rest.head.logit_weights, head.spec.softcap, operands.covered(head.spec)
            exact = coef.dlogits(coefficients, rest.logits, lse, rest.columns, None, None, None, u, cap)
            old = operand[: hidden.shape[0], first : head.spec.vocab_size]
            operand = _put_tail(operand, jnp.where(bad_rows > 0, exact.astype(operand.dtype), old), first)
        return operand

    def for_hidden(self, operand: jax.Array) -> jax.Array:
        """`operand·weight [n, H]`: by the kernel where that is faster or rows are skipped, else by XLA."""
        head, spec, config, rows = self.head, self.head.spec, self.configs.hidden, operand.shape[0]

        def by_kernel() -> jax.Array:
            return product_kernel.for_hidden(
                operand, operands.weight_of(head), spec.vocab_axis, config, self.valid_rows
            )

        def by_xla() -> jax.Array:
            weight = lax.slice_in_dim(operands.own_weight(head), 0, spec.vocab_size, axis=spec.vocab_axis)
            return head.matmul(operand, weight, (1, spec.vocab_axis))

        faster = product_kernel.faster_for_hidden(config, rows, spec.hidden_size, spec.vocab_size)
        skips_few = self.valid_rows is not None and rows <= product_kernel.LEAST_ROWS
        if skips_few or (faster and product_kernel.serves(spec, rows)):
            return by_kernel()
        if self.valid_rows is None:
            return by_xla()
        return device_cond(self.valid_rows == rows, by_xla, by_kernel)

    def for_weight(
        self, operand: jax.Array, scale: jax.Array, factor: jax.Array | float, total: jax.Array, adds: jax.Array | bool
    ) -> jax.Array:
        """`factor·operandᵀ·(scale∘hidden)` in the weight's layout: in place of `total`, or added to it."""
        spec, valid_rows = self.head.spec, self.valid_rows
        rows = jnp.where(scale[:, None] == 0, 0.0, self.hidden.astype(spec.accumulator) * scale[:, None])
        # The factor, a power of two, rides on the scaled hidden states, so that the product itself can add to the
        # total. float16 has no room for it: there another power of two keeps them in range, and both are applied
        # afterwards.
        late: jax.Array | None = None
        if spec.dtype == jnp.float16:
            shift = exponent_above(jnp.max(jnp.abs(rows))) - 13
            late, factor = factor * power_of_two(shift, rows.dtype), power_of_two(-shift, rows.dtype)
        rows = (rows * factor).astype(spec.dtype)
        if valid_rows is None and (adds is False or not product_kernel.serves(spec, rows.shape[0])):
            a, b = (operand, rows) if spec.vocab_axis == 0 else (rows, operand)
            product = self.head.matmul(a, b, (0, 0), total.dtype if adds is False and late is None else None)
            product = operands.pad(product if late is None else late * product, total.shape)
            return (product if adds is False else jnp.where(adds, total, 0) + product).astype(total.dtype)
        into = jax.ShapeDtypeStruct(total.shape, total.dtype) if adds is False else total
        return product_kernel.for_weight(
            operand,
            rows,
            spec.vocab_axis,
            self.configs.weight,
            into,
            replaced=not adds if isinstance(adds, bool) else jnp.logical_not(adds),
            valid_rows=valid_rows,
            multiplier=late,
        )
