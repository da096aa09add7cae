"""Single entries of the logits and of dlogits: each row's target, and its largest.

A logit is a product of two vectors, which XLA gathers and sums. To look for one column of a row in every tile would
cost the kernels a comparison, a selection and an addition for each logit: two to four per cent of a call.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.row import Partial


def logits(head: Head, hidden: jax.Array, columns: jax.Array) -> jax.Array:
    """The logit `[n]` of one column a row, 0 where its column is -1, from operands as the kernels round them."""
    spec = head.spec
    known = jnp.maximum(columns, 0)
    if spec.vocab_axis == 0:
        entries = head.weight.at[known].get(mode="promise_in_bounds")
    else:
        entries, hidden = head.weight.at[:, known].get(mode="promise_in_bounds"), hidden.T
    products = _wide(hidden, spec) * _wide(entries, spec)
    bias = None if head.bias is None else head.bias[known]
    return jnp.where(columns < 0, 0.0, head.cap(products.sum(axis=1 - spec.vocab_axis), bias))


def _wide(x: jax.Array, spec: Any) -> jax.Array:
    return x.astype(spec.dtype).astype(spec.accumulator)


def with_targets(partial: Partial, head: Head, batch: Batch, names: frozenset[str]) -> Partial:
    """`partial` with the targets' logits, if they are among the statistics in `names`."""
    if "target_logit" not in names:
        return partial
    assert batch.labels is not None
    return partial._replace(target_logit=logits(head, batch.hidden, batch.labels))


def gradients(
    head: Head, columns: jax.Array, logits: jax.Array, labels: jax.Array | None, gradient: Gradient
) -> jax.Array:
    """Exact dlogits `[n]` of one column a row, whose logits `[n]` are given."""
    spec, (coefficients, lse, argmax, *_) = head.spec, gradient
    u = None
    if coefficients.logit_weights is not None:
        given = head.logit_weights
        u = jnp.full(columns.shape, spec.uniform_weight) if given is None else given[jnp.maximum(columns, 0)]

    def one(*of_row: Any) -> jax.Array:
        coefficients, logit, lse, column, label, argmax, u = jax.tree.map(lambda x: x[None], of_row)
        return coef.dlogits(coefficients, logit[None], lse, column, None, label, argmax, u, spec.softcap)[0, 0]

    return jax.vmap(one)(coefficients, logits, lse, columns, labels, argmax, u)


def without(coefficients: Coefficients) -> Coefficients:
    """What is left of the coefficients for the kernels."""
    return coefficients._replace(target=None, argmax=None)


def put(stored: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """Sets one entry of each row of `stored [n', c]`; none where its column is not among those `c`."""
    rows = jnp.arange(columns.shape[0])
    inside = jnp.where(columns >= 0, columns, stored.shape[1])
    return stored.at[rows, inside].set(values.astype(stored.dtype), mode="drop", unique_indices=True)
