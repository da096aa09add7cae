"""From the cotangents of row statistics to the gradient of the logits: one formula for every loss.

For a row `z` of logits with label `t`, `p = softmax(z)` and entropy H, differentiating the statistics gives

    dz_j = p_j·(A + B·log p_j + C·p_j + G·(log p_j + H)²) + D·1[j = t] + E·u_j + F·1[j = argmax]

with per-row numbers only, to which each statistic's entry in `table` adds. In `log p_j` it is invariant to a common
shift of the logits; written in `z_j` it would cancel. `log p_j = y_j - l` with `y_j = z_j - m`, m the row's largest
logit and `l = log Σ e^y`; their sum, the lse, is never subtracted, as it is rounded to the size of the logits. So
tiles are measured from m alone, and l goes into the coefficients (`measured_from_largest`):

    dz_j = e^{y_j}·(A' + B'·y_j + C'·e^{y_j} + G'·(y_j + H')²) + …
    A' = e^{-l}·(A - B·l),  B' = e^{-l}·B,  C' = e^{-2l}·C,  G' = e^{-l}·G,  H' = H - l

A row with K targets has K of D, and repeated targets add up. Logits are
`z = softcap(scale·(vocab_scale·(hidden·weight) + bias)) / T`: `Coefficients` are divided by T and so belong to the
capped logits, `dlogits` also applies the cap's derivative `1 - (z·T/c)²`, and the scale is applied in float32 at the
end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.head import Batch
from pallas_ce.statistics.labels import NO_TARGET, repeated
from pallas_ce.statistics.logits import places_in_tile, present, reference_of
from pallas_ce.statistics.row import primitive_names
from pallas_ce.statistics.table import PRIMITIVES, Values
from pallas_ce.statistics.table import Coefficients as Coefficients
from pallas_ce.streaming.rows import spread, zeroed


def saved_statistics(names: frozenset[str]) -> frozenset[str]:
    """The statistics that `from_cotangents` and `dlogits` read when those in `names` are differentiated."""
    return frozenset(saved for name in primitive_names(names) for saved in PRIMITIVES[name].saved)


def from_cotangents(
    cotangents: Values, statistics: Values, inverse_temperature: jax.Array | None = None
) -> Coefficients:
    """Coefficients from the statistics' cotangents (absent where zero), and those that `saved_statistics` names.

    Each target has its own, equal ones too.
    """
    found: Values = {}
    for name, statistic in PRIMITIVES.items():
        if name in cotangents:
            for term, value in statistic.coefficients(cotangents[name], statistics).items():
                found[term] = found[term] + value if term in found else value
    coefficients = Coefficients(**found)
    if inverse_temperature is not None:
        coefficients = coefficients.map(lambda c: c * spread(inverse_temperature, c))
    if coefficients.prob is None:
        return coefficients
    # A row of -inf only has no distribution to change: gradient 0.
    return zeroed(~jnp.isneginf(statistics["max_logit"]), coefficients)


def of_batch(cotangents: Values, statistics: Values, batch: Batch) -> tuple[Coefficients, Batch]:
    """`from_cotangents` at the batch's temperatures, and the batch. A target that has a coefficient stands once."""
    coefficients, labels = from_cotangents(cotangents, statistics, batch.inverse_temperature), batch.labels
    if coefficients.target is not None and labels is not None and labels.ndim == 2:
        target, labels = each_once(coefficients.target, labels)
        coefficients, batch = coefficients._replace(target=target), batch._replace(labels=labels)
    return coefficients, batch


def measured_from_largest(coefficients: Coefficients, log_sum: jax.Array | None) -> Coefficients:
    """A' to H' of the module, with which `dlogits` is given m as its reference; `log_sum [n]` is l.

    Where a logit is +inf, so is l, and the others have probability 0 by any factor.
    """
    c = coefficients
    if c.prob is None:
        return c
    log_sum = reference_of(present(log_sum))
    scale = jnp.exp(-log_sum)
    found = {"prob": scale * c.prob}
    if c.prob_log_prob is not None:
        shift, found["prob_log_prob"] = -scale * c.prob_log_prob * log_sum, scale * c.prob_log_prob
        found["prob"] += shift
    if c.prob_sq is not None:
        found["prob_sq"] = scale * scale * c.prob_sq
    if c.prob_deviation_sq is not None:
        found |= {"prob_deviation_sq": scale * c.prob_deviation_sq, "entropy": present(c.entropy) - log_sum}
    return c._replace(**found)


def each_once(values: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each label of a row once: its first place has the sum of its `values [n, K]`, the others 0 and `NO_TARGET`.

    Adding them into dlogits then has the same result in any order: same inputs, same bits, also where a device
    scatters with atomic additions.
    """
    pick = functools.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    # Sorted, equal ones are neighbours, and K may be a thousand: sums of 2 places, then of 4, 8, and so on.
    order = jnp.argsort(labels, axis=1)
    ids, totals, step = pick(labels, order), pick(values, order), 1
    while step < labels.shape[1]:
        further = jnp.where(ids[:, step:] == ids[:, :-step], totals[:, step:], 0)
        totals, step = totals + jnp.pad(further, ((0, 0), (0, step))), 2 * step
    counts, back = ~repeated(ids) & (ids != NO_TARGET), jnp.argsort(order, axis=1)
    return pick(jnp.where(counts, totals, 0), back), pick(jnp.where(counts, ids, NO_TARGET), back)


# Exponents are read and written as bits: `jnp.frexp` and `jnp.ldexp` of JAX 0.12.0 do not tell over which mesh axes
# their results vary, which a checked `shard_map` refuses.
def exponent_above(x: jax.Array) -> jax.Array:
    """`[]` int32: the least e with `|x| < 2**e` for all of `x` that are finite; 1 where none is a normal number but 0.

    Numbers that are not finite fit no range, and must not decide how the others fit.
    """
    facts = np.finfo(x.dtype)
    x = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0), initial=0.0)
    x = jnp.where(x == 0, jnp.ones((), x.dtype), x)
    return (jax.lax.bitcast_convert_type(x, _integers(facts)) >> facts.nmant).astype(jnp.int32) - (facts.maxexp - 2)


def power_of_two(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    """`2**exponent`, exact; the nearest normal number of `dtype` where that is none."""
    facts = np.finfo(dtype)
    biased = jnp.clip(exponent, facts.minexp, facts.maxexp - 1) + (facts.maxexp - 1)
    return jax.lax.bitcast_convert_type(biased.astype(_integers(facts)) << facts.nmant, dtype)


def _integers(facts: "np.finfo[Any]") -> np.dtype:  # in quotes: NumPy 2.1 cannot subscript it
    return np.dtype(f"int{facts.bits}")


# Normalised coefficients bound the entries of dlogits by 2**13: inside float16 (65504), with the most room below.
_TARGET_EXPONENT = 13


def normalise(coefficients: Coefficients, logit_weights_max: jax.Array | float) -> tuple[Coefficients, jax.Array]:
    """Divides by a power of two so that dlogits use the operand dtype's range; returns that power too.

    A mean over N tokens has coefficients of 1/N and entries of p/N, which underflow in float16 from N = 1e4 on. A power
    of two costs no accuracy, and the product is multiplied back in float32.
    """
    c = coefficients
    bounds = [] if c.prob is None else [abs(c.prob)]
    if c.prob_log_prob is not None:  # -p log p ≤ 1/e
        bounds.append(0.37 * abs(c.prob_log_prob))
    if c.prob_sq is not None:
        bounds.append(abs(c.prob_sq))
    if c.prob_deviation_sq is not None:  # |log p + H| is at most the larger of -log p and H, and p·log²p ≤ 4/e²
        bounds.append(jnp.maximum(0.55, jnp.square(present(c.entropy))) * abs(c.prob_deviation_sq))
    # Each of K targets has a column of its own, where no other adds to it.
    bounds += [jnp.max(abs(x), axis=1) if x.ndim == 2 else abs(x) for x in (c.target, c.argmax) if x is not None]
    if c.logit_weights is not None:
        bounds.append(abs(c.logit_weights) * logit_weights_max)
    bound = sum(bounds[1:], bounds[0])
    # Within the exponents whose powers are normal float32 numbers, in both directions.
    shift = jnp.clip(exponent_above(bound) - _TARGET_EXPONENT, -120, 120)
    down = power_of_two(-shift, bound.dtype)
    return coefficients.map(lambda c: c * down), power_of_two(shift, bound.dtype)


def dlogits(
    coefficients: Coefficients,
    logits: jax.Array,
    reference: jax.Array | None,
    columns: jax.Array,
    valid: jax.Array | None,
    labels: jax.Array | None,
    argmax: jax.Array | None,
    logit_weights: jax.Array | None,
    softcap: jax.Array | float | None,
) -> jax.Array:
    """The gradient `[n, c]` with respect to `scale·(hidden·weight + bias)` of one tile, in the logits' dtype.

    The arguments are as `row.partial_of_tile` has them. The `reference [n]`, not less than the logits, is m for
    coefficients that are `measured_from_largest`, or the lse. `softcap` is what bounds the logits, `Head.bound`.
    """
    c, terms = coefficients, []
    if c.prob is not None:
        assert reference is not None
        # A row of -inf only has no distribution: p = 0 throughout, hence gradient 0.
        # Rounding can make log p positive, by up to 64 at logits of 1e9, which low temperatures make: it is clamped.
        # A NaN stays, which `jnp.minimum` on a CPU would make a probability of 1.
        log_p = logits - jnp.where(jnp.isneginf(reference), 0.0, reference)[:, None]
        log_p = jnp.where(log_p > 0, 0.0, log_p)
        p = jnp.exp(log_p)
        inner, log_p = c.prob[:, None], jnp.where(p == 0, 0.0, log_p)
        if c.prob_log_prob is not None:
            inner = inner + c.prob_log_prob[:, None] * log_p
        if c.prob_sq is not None:
            inner = inner + c.prob_sq[:, None] * p
        if c.prob_deviation_sq is not None:
            # Measured from the mean of log p: as p·log²p beside the others, a flat row's would cancel and lose a digit.
            inner = inner + c.prob_deviation_sq[:, None] * jnp.square(log_p + present(c.entropy)[:, None])
        terms.append(p * inner)
    if c.target is not None and c.target.ndim == 1:
        terms.append(jnp.where(columns[None, :] == present(labels)[:, None], c.target[:, None], 0.0))
    if c.logit_weights is not None:
        terms.append(c.logit_weights[:, None] * present(logit_weights)[None, :])
    if c.argmax is not None:
        terms.append(jnp.where(columns[None, :] == present(argmax)[:, None], c.argmax[:, None], 0.0))
    total = sum(terms[1:], terms[0]) if terms else jnp.zeros_like(logits)
    if c.target is not None and c.target.ndim == 2:
        assert labels is not None
        place, inside = places_in_tile(labels, columns, valid)
        rows = jnp.arange(labels.shape[0])[:, None]
        total = total.at[rows, place].add(jnp.where(inside, c.target, 0.0), mode="promise_in_bounds")
    if softcap is not None:
        total = total * (1.0 - jnp.square(logits / softcap))
    return total if valid is None else jnp.where(valid, total, 0.0)
