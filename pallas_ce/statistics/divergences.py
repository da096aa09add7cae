"""Divergences between the distributions of two heads, from pair statistics of their rows of logits.

With `b` the student's logits of a row, `a` the teacher's, both divided by the temperature, `p = softmax(b)`,
`q = softmax(a)` and `m = β·q + (1-β)·p`:

    forward_kl   KL(q‖p) = Σ q (log q - log p)             db_j = p_j - q_j
    reverse_kl   KL(p‖q) = Σ p (log p - log q)             db_j = p_j (log p_j - log q_j - KL(p‖q))
    jsd          β·KL(q‖m) + (1-β)·KL(p‖m)                 db_j = (1-β) p_j (log p_j - log m_j - KL(p‖m))

The last line: `d jsd / d p_j = (1-β)(log p_j - log m_j)`, since the terms that come from `dm = (1-β) dp` and from
`p·d log p` add up to `(1-β)(1 - (β·q_j + (1-β)·p_j)/m_j) = 0`; and `Σ_j x_j dp_j = Σ_j p_j (x_j - Σ p x) db_j`.

A Kullback-Leibler divergence takes one pass over the vocabulary, the others' mixture needs both log-sum-exps first.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.statistics.logits import present, product
from pallas_ce.statistics.row import Partial, gap, merge, partial_of_tile

Name = Literal["forward_kl", "reverse_kl", "jsd"]

_LSE = frozenset({"lse"})


class Divergence(NamedTuple):
    """Which divergence; static and hashable.

    Attributes:
        name: see the module.
        beta: β of "jsd", the teacher's share of the mixture; unused by the others.
    """

    name: Name
    beta: float

    @property
    def passes(self) -> int:
        """Passes of the forward over the vocabulary."""
        return 2 if self.name == "jsd" else 1


class Normaliser(NamedTuple):
    """A row's log-sum-exp `m + log Σ e^{z-m}` in two parts, `[n]` each.

    Their sum would be rounded to the size of the logits: at logits of 1e4 log-probabilities would be off by 5e-4.
    """

    max: jax.Array
    log_sum: jax.Array

    def log_probs(self, tempered: jax.Array, valid: jax.Array | None) -> jax.Array:
        """Log-probabilities of a tile `[n, c]`, -inf in columns that are not valid."""
        log_p = tempered - self.max[:, None] - self.log_sum[:, None]
        return log_p if valid is None else jnp.where(valid, log_p, -jnp.inf)


class PairStatistics(NamedTuple):
    """What is kept of each row, `[n]` each.

    A row in which either head's logits are all -inf has no pair of distributions. Its divergence is 0, and both its
    normalisers are +inf here, so that every probability computed from them is 0 and so are its gradients.

    Attributes:
        value: the divergence.
        student: the normaliser of the student's tempered logits.
        teacher: of the teacher's.
        expected: what the gradient subtracts: KL(p‖q) for "reverse_kl", KL(p‖m) for "jsd", 0 for "forward_kl".
    """

    value: jax.Array
    student: Normaliser
    teacher: Normaliser
    expected: jax.Array


class PairPartial(NamedTuple):
    """What is accumulated of each row over part of the vocabulary.

    Attributes:
        student: maximum and sum of exponentials of the student's logits.
        teacher: those of the teacher's.
        cross: `Σ e^{x-m_x} ((x-m_x) - (y-m_y))`, with x the logits of the side that the expectation is over, y the
            other side's and `m` the maxima; None for "jsd".
    """

    student: Partial
    teacher: Partial
    cross: jax.Array | None


def partial_of_tiles(
    divergence: Divergence, student: jax.Array, teacher: jax.Array, columns: jax.Array, valid: jax.Array | None
) -> PairPartial:
    """The `PairPartial` of one tile of both heads' tempered logits `[n, c]`."""
    parts = [partial_of_tile(z, columns, valid, None, None, _LSE) for z in (student, teacher)]
    cross = None
    if divergence.name != "jsd":
        (x, x_max), (y, y_max) = _ordered(
            divergence, (student, present(parts[0].max)), (teacher, present(parts[1].max))
        )
        x = x if valid is None else jnp.where(valid, x, -jnp.inf)
        x, y = gap(x, x_max[:, None]), gap(y, y_max[:, None])
        cross = product(jnp.exp(x), x - y).sum(axis=1)
    return PairPartial(parts[0], parts[1], cross)


def merge_pairs(divergence: Divergence, a: PairPartial, b: PairPartial) -> PairPartial:
    """Joins the pair statistics of two disjoint sets of columns.

    With M the joint maxima, `f = e^{m_x - M_x}` and `S = Σ e^{x-m_x}`, each part's sum is measured anew:

        Σ e^{x-M_x} ((x-M_x) - (y-M_y)) = f·cross + f·S·((m_x - M_x) - (m_y - M_y))

    Only distances from the maxima enter, so that a common offset of either head's logits changes nothing. Columns that
    have no weight contribute 0 however far the other head's logit lies: 0·(±inf) = 0, selected.
    """
    student, teacher = merge(a.student, b.student), merge(a.teacher, b.teacher)
    cross = None
    if a.cross is not None and b.cross is not None:
        cross = _measured_from(divergence, a, student, teacher) + _measured_from(divergence, b, student, teacher)
    return PairPartial(student, teacher, cross)


def _measured_from(divergence: Divergence, part: PairPartial, student: Partial, teacher: Partial) -> jax.Array:
    x, y = _ordered(divergence, (part.student, student), (part.teacher, teacher))
    x_gap, y_gap = (gap(present(own.max), present(joint.max)) for own, joint in (x, y))
    weight = jnp.exp(x_gap)
    moved = product(weight * present(x[0].sum_exp), x_gap - y_gap)
    return product(weight, present(part.cross)) + moved


def _ordered[T](divergence: Divergence, student: T, teacher: T) -> tuple[T, T]:
    """First the side that the expectation is over."""
    return (teacher, student) if divergence.name == "forward_kl" else (student, teacher)


def finalise_pairs(divergence: Divergence, partial: PairPartial) -> PairStatistics:
    """The statistics, from a `PairPartial` over the whole vocabulary; for "jsd" the normalisers only.

    `KL(x‖y) = E_x[(x - m_x) - (y - m_y)] - log S_x + log S_y`, in which both offsets have cancelled.
    """
    sums = _ordered(divergence, present(partial.student.sum_exp), present(partial.teacher.sum_exp))
    usable = (sums[0] > 0) & (sums[1] > 0)
    value = jnp.zeros_like(sums[0])
    if partial.cross is not None:
        x, y = (jnp.where(usable, total, 1.0) for total in sums)
        value = jnp.maximum(partial.cross / x - jnp.log(x) + jnp.log(y), 0.0)  # rounding alone makes it negative
        value = jnp.where(usable, value, 0.0)
    expected = value if divergence.name == "reverse_kl" else jnp.zeros_like(value)
    student, teacher = (_normaliser(side, usable) for side in (partial.student, partial.teacher))
    return PairStatistics(value, student, teacher, expected)


def _normaliser(partial: Partial, usable: jax.Array) -> Normaliser:
    log_sum = jnp.log(jnp.where(usable, present(partial.sum_exp), 1.0))
    return Normaliser(jnp.where(usable, present(partial.max), 0.0), jnp.where(usable, log_sum, jnp.inf))


def mixture_sums(divergence: Divergence, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A tile's share `[n]` of "jsd" and of KL(p‖m), from `[n, c]` log-probabilities, -inf in columns not valid.

    Both sides' terms are added column by column: their sum is nowhere negative, so that little cancels.
    """
    log_m = _log_mixture(divergence, log_p, log_q)
    student = product(jnp.exp(log_p), log_p - log_m)
    teacher = product(jnp.exp(log_q), log_q - log_m)
    value = divergence.beta * teacher + (1 - divergence.beta) * student
    return value.sum(axis=1), student.sum(axis=1)


def slope(divergence: Divergence, log_p: jax.Array, log_q: jax.Array, expected: jax.Array) -> jax.Array:
    """`db [n, c]` of the module's formulas."""
    if divergence.name == "forward_kl":
        return jnp.exp(log_p) - jnp.exp(log_q)
    other = log_q if divergence.name == "reverse_kl" else _log_mixture(divergence, log_p, log_q)
    share = 1.0 if divergence.name == "reverse_kl" else 1 - divergence.beta
    return share * product(jnp.exp(log_p), log_p - other - expected[:, None])


def largest_slope(expected: jax.Array) -> jax.Array:
    """A bound `[n]` on |db|.

    `p log(p/r) ≥ p - r ≥ -1` for any distribution r, and the terms add up to `expected`, so that none exceeds
    `expected + 1`.
    """
    return 2 * expected + 1


def _log_mixture(divergence: Divergence, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.logaddexp(math.log(divergence.beta) + log_q, math.log1p(-divergence.beta) + log_p)
