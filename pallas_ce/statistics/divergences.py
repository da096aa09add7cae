"""Divergences between the distributions of two heads, from pair statistics of their rows of logits.

With `b` the student's logits of a row, `a` the teacher's, both divided by the temperature, `p = softmax(b)`,
`q = softmax(a)` and `m = β·q + (1-β)·p`:

    forward_kl   KL(q‖p) = Σ q (log q - log p)             db_j = p_j - q_j
    reverse_kl   KL(p‖q) = Σ p (log p - log q)             db_j = p_j (log p_j - log q_j - KL(p‖q))
    jsd          β·KL(q‖m) + (1-β)·KL(p‖m)                 db_j = (1-β) p_j (log p_j - log m_j - KL(p‖m))

The last line: `d jsd / d p_j = (1-β)(log p_j - log m_j)`, since the terms that come from `dm = (1-β) dp` and from
`p·d log p` add up to `(1-β)(1 - (β·q_j + (1-β)·p_j)/m_j) = 0`; and `Σ_j x_j dp_j = Σ_j p_j (x_j - Σ p x) db_j`.

A Kullback-Leibler divergence takes one pass over the vocabulary, the others' mixture needs both log-sum-exps first.

"jsd" vanishes like β and like 1-β at the ends, and so do its terms as they are written here: `over_mixture` has no
difference of logarithms. A column's two terms add up to `p·f(q/p)` with `f(u) = β·u·log u - (1-β+β·u)·log(1-β+β·u)`,
which is never negative; `f(1) = f'(1) = 0`.

A row with a NaN has NaN normalisers on both sides. From there NaN reaches its value and all its gradients, as nothing
here selects by a comparison that NaN fails.
"""

import functools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.statistics.logits import Distances, present, product
from pallas_ce.statistics.row import Partial, gap, merge, partial_of_tile

Name = Literal["forward_kl", "reverse_kl", "jsd"]


class Divergence(NamedTuple):
    """Which divergence; static and hashable."""

    name: Name
    beta: float  # β of "jsd", the teacher's share of the mixture; unused by the others


class Normaliser(NamedTuple):
    """A row's log-sum-exp `m + log Σ e^{z-m}` in two parts, `[n]` each.

    Their sum would be rounded to the size of the logits: at logits of 1e4 log-probabilities would be off by 5e-4.
    """

    max: jax.Array
    log_sum: jax.Array

    def log_probs(self, tempered: jax.Array | Distances, valid: jax.Array | None) -> jax.Array:
        """Log-probabilities of a tile, in its shape, -inf in columns `[c]` that are not valid."""
        if isinstance(tempered, Distances):
            log_p = tempered.measured_from(self.max, self.log_sum)
            return log_p if valid is None else jnp.where(valid.reshape(log_p.shape[1:]), log_p, -jnp.inf)
        log_p = tempered - self.max[:, None] - self.log_sum[:, None]
        return log_p if valid is None else jnp.where(valid[None, :], log_p, -jnp.inf)


class PairStatistics(NamedTuple):
    """The numbers kept of each row, `[n]` each.

    A row in which either head's logits are all -inf has no pair of distributions. Its divergence is 0, and both its
    normalisers are +inf here, so that every probability computed from them is 0 and so are its gradients. In a row with
    a NaN or +inf of either head both are NaN.
    """

    value: jax.Array  # the divergence
    student: Normaliser  # of the student's tempered logits
    teacher: Normaliser  # and of the teacher's
    expected: jax.Array  # what the gradient subtracts: "reverse_kl": KL(p‖q), "jsd": KL(p‖m), "forward_kl": 0

    def log_probs[Logits: (jax.Array, Distances)](
        self, logits: tuple[Logits, Logits], valid: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """`(log p, log q)` from both heads' tempered logits, in their shape, -inf in columns that are not valid."""
        return self.student.log_probs(logits[0], valid), self.teacher.log_probs(logits[1], valid)

    def with_mixture(self, value: jax.Array, expected: jax.Array) -> Self:
        """With the sums of `mixture_sums` over the whole vocabulary."""
        return self._replace(value=not_negative(value), expected=expected)


class PairPartial(NamedTuple):
    """The sums of each row over part of the vocabulary.

    `cross` is `Σ e^{x-m_x} ((x-m_x) - (y-m_y))`, with x the logits of the side that the expectation is over, y the
    other side's and `m` the maxima; None for "jsd".
    """

    student: Partial  # maximum and sum of exponentials
    teacher: Partial
    cross: jax.Array | None = None


def partial_of_tiles(
    divergence: Divergence, student: jax.Array, teacher: jax.Array, columns: jax.Array, valid: jax.Array | None
) -> PairPartial:
    """The `PairPartial` of one tile of both heads' tempered logits `[n, c]`."""
    names = frozenset({"lse"})
    of_student, of_teacher = (partial_of_tile(z, columns, valid, None, None, names) for z in (student, teacher))
    if divergence.name == "jsd":
        return PairPartial(of_student, of_teacher)
    (x, of_x), (y, of_y) = _ordered(divergence, (student, of_student), (teacher, of_teacher))
    x = x if valid is None else jnp.where(valid[None, :], x, -jnp.inf)
    x, y = gap(x, present(of_x.max)[:, None]), gap(y, present(of_y.max)[:, None])
    return PairPartial(of_student, of_teacher, product(jnp.exp(x), x - y).sum(axis=1))


def partial_of_distances(divergence: Divergence, student: Distances, teacher: Distances) -> PairPartial:
    """The `PairPartial` of both heads' stored logits, in one pass over them: their maxima are known."""
    tops = [side.max.max(axis=0) for side in (student, teacher)]
    distances = [side.measured_from(top) for side, top in zip((student, teacher), tops, strict=True)]
    parts = [Partial(max=top, sum_exp=jnp.exp(d).sum(axis=(1, 2))) for top, d in zip(tops, distances, strict=True)]
    cross = None
    if divergence.name != "jsd":
        x, y = _ordered(divergence, *distances)
        cross = product(jnp.exp(x), x - y).sum(axis=(1, 2))
    return PairPartial(parts[0], parts[1], cross)


def merge_pairs(divergence: Divergence, a: PairPartial, b: PairPartial) -> PairPartial:
    """Joins the pair statistics of two disjoint sets of columns.

    With M the joint maxima, `f = e^{m_x - M_x}` and `S = Σ e^{x-m_x}`, each part's sum is measured anew:

        Σ e^{x-M_x} ((x-M_x) - (y-M_y)) = f·cross + f·S·((m_x - M_x) - (m_y - M_y))

    Only distances from the maxima enter, so that a common offset of either head's logits changes nothing. Columns that
    have no weight contribute 0 however far the other head's logit lies: 0·(±inf) = 0, selected.
    """
    student, teacher = merge(a.student, b.student), merge(a.teacher, b.teacher)
    if divergence.name == "jsd":
        return PairPartial(student, teacher)

    def measured_anew(part: PairPartial) -> jax.Array:
        x, y = _ordered(divergence, (part.student, student), (part.teacher, teacher))
        x_gap, y_gap = (gap(present(own.max), present(joint.max)) for own, joint in (x, y))
        weight = jnp.exp(x_gap)
        moved = product(weight * present(x[0].sum_exp), x_gap - y_gap)
        return product(weight, present(part.cross)) + moved

    return PairPartial(student, teacher, measured_anew(a) + measured_anew(b))


def _ordered[T](divergence: Divergence, student: T, teacher: T) -> tuple[T, T]:
    """First the side that the expectation is over."""
    return (teacher, student) if divergence.name == "forward_kl" else (student, teacher)


def finalise_pairs(divergence: Divergence, parts: Iterable[PairPartial]) -> PairStatistics:
    """The statistics, from the parts of the whole vocabulary; for "jsd" the normalisers only.

    `KL(x‖y) = E_x[(x - m_x) - (y - m_y)] - log S_x + log S_y`, in which both offsets have cancelled.
    """
    partial = functools.reduce(functools.partial(merge_pairs, divergence), parts)
    x, y = _ordered(divergence, present(partial.student.sum_exp), present(partial.teacher.sum_exp))
    both = x * y
    # 0 in a row with a distribution of each head, +inf where one has none, NaN where one has a NaN or +inf.
    fault = jnp.where(both == 0, jnp.inf, jnp.where(both < jnp.inf, 0.0, jnp.nan))
    value = jnp.zeros_like(both)
    if partial.cross is not None:
        x, y = (jnp.where(fault == 0, total, 1.0) for total in (x, y))
        value = not_negative(partial.cross / x - jnp.log(x) + jnp.log(y)) + fault
        value = jnp.where(fault == jnp.inf, 0.0, value)
    expected = value if divergence.name == "reverse_kl" else jnp.zeros_like(value)

    def normaliser(side: Partial) -> Normaliser:
        log_sum = jnp.log(jnp.where(fault == 0, present(side.sum_exp), 1.0)) + fault
        return Normaliser(jnp.where(fault == jnp.inf, 0.0, present(side.max)), log_sum)

    return PairStatistics(value, normaliser(partial.student), normaliser(partial.teacher), expected)


def not_negative(value: jax.Array) -> jax.Array:
    """`value`, and 0 where rounding alone has made it negative; with the gradient that it has."""
    return value - jax.lax.stop_gradient(jnp.where(value < 0, value, 0.0))


def over_mixture(beta: float, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`log(p/m)` and `log(q/m)` with `m = (1-β)·p + β·q`, to a few units in the last place of themselves.

    With `E = e^{|log q - log p|}` and `d = 1 - 1/E`, in which only positive numbers are added and multiplied:

        q ≤ p    m/p = 1 - β·d          log(p/m) = log1p(β·d / (1-β + β/E))
        q > p    m/p = 1 + β·(E - 1)    log(p/m) = -log1p(β·d·E)

    and likewise for q, with 1-β. So log(p/m) vanishes like β, and its rounding with it. E is kept below what overflows:
    there the smaller of p and q is 0 beside the other. NaN where both are 0.
    """
    ratio = log_q - log_p
    above = ratio > 0
    size = jnp.where(above, ratio, -ratio)
    most = np.log(np.finfo(ratio.dtype).max) - 2
    grown = jnp.exp(jnp.where(size > most, most, size))
    shrunk = 1.0 / grown
    change = 1.0 - shrunk

    def over(share_of_other: float, larger: jax.Array) -> jax.Array:
        part = share_of_other * change
        among = jnp.where(larger, part / ((1 - share_of_other) + share_of_other * shrunk), part * grown)
        return jnp.where(larger, 1.0, -1.0) * jnp.log1p(among)

    return over(beta, ~above), over(1 - beta, above)


def mixture_sums(divergence: Divergence, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A tile's share `[n]` of "jsd" and of KL(p‖m), from `[n, *c]` log-probabilities, -inf in columns not valid.

    Both sides' terms are added column by column: their sum is nowhere negative, so that little cancels.
    """
    beta = divergence.beta
    over = over_mixture(beta, log_p, log_q)
    student, teacher = (product(jnp.exp(log), x) for log, x in zip((log_p, log_q), over, strict=True))
    value = beta * teacher + (1 - beta) * student
    if value.ndim > 2:  # as one sum, of complex numbers: XLA would store what two have in common
        total = jax.lax.complex(value, student).sum(axis=(1, 2))
        return total.real, total.imag
    return value.sum(axis=1), student.sum(axis=1)


def slope(divergence: Divergence, log_p: jax.Array, log_q: jax.Array, expected: jax.Array) -> jax.Array:
    """`db` of the module's formulas, in the log-probabilities' shape `[n, *c]`."""
    if divergence.name == "forward_kl":
        return jnp.exp(log_p) - jnp.exp(log_q)
    expected = jnp.expand_dims(expected, range(1, log_p.ndim))
    if divergence.name == "reverse_kl":
        return product(jnp.exp(log_p), log_p - log_q - expected)
    beta = divergence.beta
    over, _ = over_mixture(beta, log_p, log_q)
    return (1 - beta) * product(jnp.exp(log_p), over - expected)


def largest_slope(divergence: Divergence, expected: jax.Array) -> jax.Array:
    """A bound `[n]` on |db|.

    `p log(p/r) ≥ p - r ≥ -1` for any distribution r, and the terms add up to `expected`, so that none exceeds
    `expected + 1`. For "jsd", `-β ≤ p - m` and `p log(p/m) ≤ -log(1-β)`, which is above β, and so is the bound of
    `expected`.
    """
    if divergence.name == "jsd":
        return jnp.full_like(expected, -2 * (1 - divergence.beta) * math.log1p(-divergence.beta))
    return 2 * expected + 1
