"""The specification: materialised logits and JAX's own differentiation. For tests, small inputs and any derivative."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.divergences import Divergence, not_negative, over_mixture
from pallas_ce.statistics.logits import LogitsTile, Row, present, reference_of
from pallas_ce.statistics.row import fields_of, only
from pallas_ce.statistics.table import PRIMITIVES
from pallas_ce.streaming.rows import zeroed


def logits(batch: Batch, head: Head, mask: jax.Array | None) -> jax.Array:
    """Logits `[N, V]`; 0 in rows that `mask [N]` turns off."""
    spec = head.spec
    hidden, inverse_temperature = batch.hidden, batch.inverse_temperature
    hidden = zeroed(mask, hidden)  # even a nan there must not reach the weight's gradient
    if mask is not None and inverse_temperature is not None:
        inverse_temperature = jnp.where(mask, inverse_temperature, 1)
    head = head.columns(lambda x, axis: jax.lax.slice_in_dim(x, 0, spec.vocab_size, axis=axis))
    z = _product(hidden, head.weight, 1 - spec.vocab_axis, spec)
    if head.up is not None:
        z = z + _product(_product(hidden, present(head.down), 1, spec), head.up, 1, spec)
    # 0·inf of the weight's is nan, and so are the derivatives of what a cap or an infinite scale makes of it.
    z = zeroed(mask, z)
    if (scale := head.logit_scale) is not None and head.bias is not None:
        # Of a column that is banned by its bias 0·(-inf) is 0, also in the scale's derivative.
        scale = jnp.where(jnp.isinf(head.bias), jax.lax.stop_gradient(scale), scale)[None, :]
    z = dataclasses.replace(head, logit_scale=scale).cap(z, head.bias, inverse_temperature)
    return zeroed(mask, z)


def _product(a: jax.Array, b: jax.Array, axis: int, spec: HeadSpec) -> jax.Array:
    """`a [N, k]` times `b`, whose `axis` has k entries; by default products of narrow operands are exact.

    Operands are rounded to the compute dtype, and their gradients to the operands' own dtypes only.
    """

    def operand(x: jax.Array) -> jax.Array:
        wide = x.astype(spec.accumulator)
        rounding = jnp.where(jnp.isinf(wide), 0, x.astype(spec.dtype).astype(spec.accumulator) - wide)  # not inf - inf
        return wide + jax.lax.stop_gradient(rounding)

    exact = spec.dtype != spec.accumulator and spec.precision == jax.lax.Precision.DEFAULT
    precision = jax.lax.Precision.HIGHEST if exact else spec.precision
    return jnp.tensordot(operand(a), operand(b), axes=(1, axis), precision=precision)


def row_statistics(names: frozenset[str], batch: Batch, head: Head, mask: jax.Array | None) -> dict[str, jax.Array]:
    """Primitive statistics of the N rows of `batch`, each by its definition; 0 where `mask [N]` is False."""
    spec = head.spec
    z = logits(batch, head, mask)
    # Rows that are -inf throughout have no distribution, and columns of probability 0 contribute 0·(-inf) = 0. Both are
    # replaced before the logarithm is differentiated, since 0·nan is not 0.
    some = jnp.any(z != -jnp.inf, axis=1, keepdims=True)
    if "sum_exp" in fields_of(names):
        z = jnp.where(some, z, jax.lax.stop_gradient(z))
    reference = reference_of(jax.lax.stop_gradient(z.max(axis=1)))
    distance = jnp.where(some, z - reference[:, None], 0.0)
    log_sum = jax.nn.logsumexp(distance, axis=1)
    log_p = jnp.where(some, distance - log_sum[:, None], -jnp.inf)
    p = jnp.exp(log_p)
    log_p = jnp.where(p == 0, 0.0, log_p)
    lse, log_sum = jnp.where(some[:, 0], reference + log_sum, -jnp.inf), jnp.where(some[:, 0], log_sum, 0.0)
    columns = jnp.arange(spec.vocab_size, dtype=jnp.int32)
    tile = LogitsTile(z, columns, None, batch.labels, head.tile_logit_weights(0, spec.vocab_size))
    row = Row(tile, log_p, p, lse, reference, log_sum)
    return zeroed(mask, {name: statistic.definition(row) for name, statistic in only(PRIMITIVES, names).items()})


def divergences(
    divergence: Divergence, batch: Batch, head: Head, mask: jax.Array | None, teacher_hidden: jax.Array, teacher: Head
) -> jax.Array:
    """The divergence `[N]` of two heads, both at the batch's temperatures; 0 where `mask [N]` is False."""
    beta, z = divergence.beta, logits(batch, head, mask)
    of_teacher = logits(batch._replace(hidden=teacher_hidden), teacher, mask).astype(z.dtype)
    usable = ~jnp.all(jnp.isneginf(z), axis=1) & ~jnp.all(jnp.isneginf(of_teacher), axis=1)
    usable = usable if mask is None else usable & mask
    log_p, log_q = map(jax.nn.log_softmax, zeroed(usable, (z, of_teacher)))
    if divergence.name == "forward_kl":
        values = _kl(log_q, log_p)
    elif divergence.name == "reverse_kl":
        values = _kl(log_p, log_q)
    else:
        neither = jnp.isneginf(log_p) & jnp.isneginf(log_q)  # where log m cannot be differentiated, and is not needed
        p_side, q_side = jnp.where(neither, 0.0, log_p), jnp.where(neither, 0.0, log_q)
        p_over, q_over = over_mixture(beta, p_side, q_side)
        values = (beta * jnp.exp(log_q) * q_over + (1 - beta) * jnp.exp(log_p) * p_over).sum(axis=1)
    return jnp.where(usable, not_negative(values), 0.0)


def _kl(log_x: jax.Array, log_y: jax.Array) -> jax.Array:
    """KL(x‖y) of rows `[N, V]`; +inf with derivative 0 where y lacks a column that x has."""
    infinite = jnp.any((log_x > -jnp.inf) & jnp.isneginf(log_y), axis=1)
    some = ~jnp.isneginf(log_x) & ~infinite[:, None]
    log_x, log_y = jnp.where(some, log_x, 0.0), jnp.where(some, log_y, 0.0)
    terms = jnp.where(some, jnp.exp(log_x) * (log_x - log_y), 0.0)
    return jnp.where(infinite, jnp.inf, terms.sum(axis=1))
