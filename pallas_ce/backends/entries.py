"""Single entries of the logits and of dlogits: each row's targets, and its largest.

A logit is a product of two vectors, which XLA gathers and sums. To look for one column of a row in every tile would
cost a kernel a comparison, a selection and an addition for each logit: two to four per cent of a call.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.row import Partial, fields_of, spread
from pallas_ce.streaming.loops import chosen_by_device

# The bits of a float32 number that TF32 has: sign, exponent and a part of the significand.
_TF32_BITS = 0xFFFFE000

# Columns of rows, `[n]` or `[n, K]` with -1 for none, and a number for each.
Entries = list[tuple[jax.Array, jax.Array]]


def logits(head: Head, batch: Batch, columns: jax.Array) -> jax.Array:
    """The logits of `columns`, `[n]` or `[n, K]`, 0 where one is -1, from operands as the kernels round them."""
    if columns.ndim == 2:
        return lax.map(lambda of_rows: logits(head, batch, of_rows), columns.T).T
    return jnp.where(columns < 0, 0.0, existing(head, batch, jnp.maximum(columns, 0)))


def existing(head: Head, batch: Batch, columns: jax.Array) -> jax.Array:
    """The logits of `columns [n]`, none of them -1."""
    spec, hidden = head.spec, batch.hidden
    if spec.vocab_axis == 0:
        entries = head.weight.at[columns].get(mode="promise_in_bounds")
    else:
        entries, hidden = head.weight.at[:, columns].get(mode="promise_in_bounds"), hidden.T
    products = (_operand(hidden, spec) * _operand(entries, spec)).sum(axis=1 - spec.vocab_axis)
    if head.up is not None:
        ups = head.up.at[columns].get(mode="promise_in_bounds")
        products += (_operand(present(batch.low), spec) * _operand(ups, spec)).sum(axis=1)
    bias = None if head.bias is None else head.bias[columns]
    found = head.cap(products, bias)
    return found if batch.inverse_temperature is None else found * batch.inverse_temperature


def _operand(x: jax.Array, spec: HeadSpec) -> jax.Array:
    """As the kernels multiply it: tensor cores read the first 10 bits of a significand in TF32, and no others.

    With more bits than the logits in its lse a target would have a probability above 1.
    """
    x = x.astype(spec.dtype)
    if spec.tf32:
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(_TF32_BITS)
        x = lax.bitcast_convert_type(bits, x.dtype)
    return x.astype(spec.accumulator)


def with_targets(partial: Partial, head: Head, batch: Batch, names: frozenset[str]) -> Partial:
    """`partial` with the targets' logits, if they are among the statistics in `names`."""
    if "target_logit" not in fields_of(names):
        return partial
    return partial._replace(target_logit=logits(head, batch, present(batch.labels)))


def exact(
    head: Head,
    batch: Batch,
    gradient: Gradient,
    target_logit: jax.Array | None = None,
    max_logit: jax.Array | None = None,
) -> tuple[Entries, Gradient]:
    """The entries of dlogits to which `target` and `argmax` add, each whole, and the gradient without these terms.

    Logits that are not given are computed.
    """
    c, found = gradient.coefficients, []
    for columns, given, logit in ((batch.labels, c.target, target_logit), (gradient.argmax, c.argmax, max_logit)):
        if columns is not None and given is not None:
            logit = logits(head, batch, columns) if logit is None else logit
            found.append((columns, gradients(head, batch, columns, logit, gradient)))
    return found, gradient._replace(coefficients=c._replace(target=None, argmax=None))


def gradients(head: Head, batch: Batch, columns: jax.Array, logits: jax.Array, gradient: Gradient) -> jax.Array:
    """Exact dlogits of `columns`, `[n]` or `[n, K]` as the labels are, whose logits are given."""
    spec, (c, reference, argmax, *_) = head.spec, gradient
    u, target = None, None
    if c.logit_weights is not None:
        given = head.logit_weights
        u = jnp.full(columns.shape, spec.uniform_weight) if given is None else given[jnp.maximum(columns, 0)]
    if c.target is not None:  # of a row's K each stands once
        labels = present(batch.labels)
        values = jnp.where(spread(columns, labels) == labels, c.target, 0.0)
        target = values.sum(axis=1) if columns.ndim < labels.ndim else values

    def one(column: Any, logit: Any, u: Any, target: Any, *of_row: Any) -> jax.Array:
        column, logit, u, target, (c, reference, argmax, inverse) = jax.tree.map(
            lambda x: x[None], (column, logit, u, target, of_row)
        )
        c = c._replace(target=target)
        return coef.dlogits(c, logit[None], reference, column, None, column, argmax, u, head.bound(inverse))[0, 0]

    of_rows = (c._replace(target=None), reference, argmax, batch.inverse_temperature)
    every = jax.vmap(one)
    if columns.ndim == 2:
        every = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, 0, *[None] * len(of_rows))))
    return every(columns, logits, u, target, *of_rows)


def put(stored: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """Sets each row's entries of `stored [n', c]` in `columns` that are not negative: below c, none twice."""
    rows = spread(jnp.arange(columns.shape[0]), columns)
    beyond = stored.shape[1] + lax.broadcasted_iota(jnp.int32, columns.shape, columns.ndim - 1)
    places = jnp.where(columns >= 0, columns, beyond)  # no two of a row are equal here, too
    return stored.at[rows, places].set(values.astype(stored.dtype), mode="drop", unique_indices=True)


def put_among(stored: jax.Array, entries: Entries, start: jax.Array | int, first: jax.Array, count: Any) -> jax.Array:
    """`stored`, whose columns begin at `start`, with those entries that are among `count` columns from `first` on."""
    for columns, values in entries:
        inside = (columns >= first) & (columns < first + count)
        stored = put(stored, jnp.where(inside, columns - start, -1), values)
    return stored


def weights_that_count(head: Head) -> jax.Array:
    """u `[V]`, 0 in a shard's padding."""
    u = head.tile_logit_weights(0, head.spec.vocab_size)
    return u if head.valid_columns is None else jnp.where(jnp.arange(u.shape[0]) < head.valid_columns, u, 0.0)


def zeroed(dlogits: jax.Array, rows: jax.Array | None, columns: jax.Array | None = None) -> jax.Array:
    """`dlogits [n, c]` with 0 in rows from `rows []` and in columns from `columns []` on, where kernels stored nothing.

    None: they stored all. In the array's own memory, and no work where all counts.
    """
    bounds = [(axis, count) for axis, count in enumerate((rows, columns)) if count is not None]
    if not bounds:
        return dlogits
    whole = functools.reduce(operator.and_, (count >= dlogits.shape[axis] for axis, count in bounds))

    def blanked() -> jax.Array:
        counts = (lax.broadcasted_iota(jnp.int32, dlogits.shape, axis) < count for axis, count in bounds)
        return jnp.where(functools.reduce(operator.and_, counts), dlogits, 0)

    return lax.cond(chosen_by_device(whole), lambda: dlogits, blanked)
