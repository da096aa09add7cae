"""The table of row statistics: everything that is known of one stands in its entry.

`PRIMITIVES` and `DERIVED` have an entry for each field of `RowStatistics`, and for what only derivatives read; `FIELDS`
for each of `Partial`. A new statistic is a field of `RowStatistics` and an entry here, with a field of `Partial` or a
term of `gradient`'s formula where those that exist do not serve. `row` and `gradient` hold the rules that read this. A
backend with a language of its own translates fields and terms; tests compare its translations with these.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.statistics.logits import LogitsTile, Row, present, product, reference_of
from pallas_ce.streaming.rows import spread


class RowStatistics(NamedTuple):
    """Statistics of rows `z [V]` of logits with label `t`, where `p = softmax(z)`.

    Every field has hidden's leading shape, float32 (float64 for float64 inputs; `argmax` int32), or is None where it
    was not asked for. Rows that a `row_mask` turns off hold 0 everywhere. With labels `[..., K]`, K targets for each
    row, `target_logit` and `log_prob` have that shape.

    Attributes:
        lse: `log Σ_v exp z_v`.
        target_logit: `z_t`; 0 where `t` is not in `[0, V)`.
        log_prob: `target_logit - lse`, but not as a difference of these rounded numbers: a common offset of the logits
            costs it nothing. -inf in a row of -inf only.
        mean_logit: `Σ_v u_v z_v` with the given `logit_weights` u, or `1/V` each.
        entropy: `-Σ_v p_v log p_v`, in nats.
        expected_logit: `Σ_v p_v z_v = lse - entropy`.
        sum_sq_probs: `Σ_v p_v²`.
        max_logit: `max_v z_v`.
        argmax: the index of the largest logit, the lowest one where several tie; the first NaN's, where one is.
        varentropy: `Σ_v p_v log² p_v - entropy²`, the variance of `log p` under `p`, in nats².
        mean_log_prob: `Σ_v u_v log p_v`, with u as for `mean_logit`; an offset costs it nothing either.
    """

    lse: jax.Array | None = None
    target_logit: jax.Array | None = None
    log_prob: jax.Array | None = None
    mean_logit: jax.Array | None = None
    entropy: jax.Array | None = None
    expected_logit: jax.Array | None = None
    sum_sq_probs: jax.Array | None = None
    max_logit: jax.Array | None = None
    argmax: jax.Array | None = None
    varentropy: jax.Array | None = None
    mean_log_prob: jax.Array | None = None

    # A type checker finds unknown names itself, unless it sees a `__getattr__`.
    if not TYPE_CHECKING:  # type: ignore[misc]

        def __getattr__(self, name: str) -> jax.Array:
            raise AttributeError(
                f"RowStatistics has no {name!r}; its statistics are {', '.join(self._fields)}", name=name, obj=self
            )


class Partial(NamedTuple):
    """The numbers kept of each row while streaming over columns; None where no requested statistic needs them.

    With `m` the maximum over the columns seen so far, sums are relative to it, so nothing overflows and a common offset
    of all logits changes only `max` and `target_logit`. A row whose m is infinite is measured from 0.
    """

    max: jax.Array | None = None  # m; NaN where a logit is, as in the sums
    sum_exp: jax.Array | None = None  # Σ e^{z-m}
    sum_exp_shifted: jax.Array | None = None  # Σ e^{z-m} (z-m): for the entropy, without the cancellation of Σ e^z z
    sum_exp_sq: jax.Array | None = None  # Σ e^{2(z-m)}
    target_logit: jax.Array | None = None  # z_t where a column seen is the target, else 0; [n] or [n, K]
    weighted_sum: jax.Array | None = None  # Σ u (z-m)
    argmax: jax.Array | None = None  # lowest column where z = m; the first NaN's
    # Σ e^{z-m} (z-μ)² with μ the mean of z under the weights e^{z-m} of the columns seen. Measured from m instead, the
    # variance of 65536 equal logits and one that is 2 to 5 larger would be off by 1e-4 to 4e-3 of it in float32; so it
    # is by 1e-6.
    sum_exp_deviation_sq: jax.Array | None = None
    sum_weights: jax.Array | None = None  # Σ u of the columns seen

    def map(self, function: Callable[["Field", jax.Array], jax.Array]) -> "Partial":
        """`function(field, x)` of each number x that is kept."""
        return Partial(**{name: function(FIELDS[name], x) for name, x in self._asdict().items() if x is not None})


class Coefficients(NamedTuple):
    """Per-row numbers `[n]` of `gradient`'s formula; None for a term that is absent, whose work is not done."""

    prob: jax.Array | None = None  # A; None where `p`, hence the row's lse, does not appear at all
    prob_log_prob: jax.Array | None = None  # B
    prob_sq: jax.Array | None = None  # C
    target: jax.Array | None = None  # D, [n] or [n, K]
    logit_weights: jax.Array | None = None  # E
    argmax: jax.Array | None = None  # F
    prob_deviation_sq: jax.Array | None = None  # G
    entropy: jax.Array | None = None  # H: where G's term is measured from, no coefficient itself

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Coefficients":
        """`function` of each coefficient; the entropy stays what it is."""
        return jax.tree.map(function, self._replace(entropy=None))._replace(entropy=self.entropy)


# The least normal number of float32: keeps a quotient finite where the weight that divides it is 0.
_TINY = 2.0**-126


def mean_distance(part: Partial) -> jax.Array:
    """`μ - m`; 0 where there is no weight. A NaN is in the numerator, whatever a maximum makes of it."""
    return present(part.sum_exp_shifted) / jnp.maximum(present(part.sum_exp), _TINY)


class Field(NamedTuple):
    """How a field of `Partial` is accumulated."""

    tile: Callable[[LogitsTile, Partial], jax.Array]  # `[n]` for one tile; it may read the fields before it
    # `(part, f, d)`: measured from `M` instead of m, with `d = m - M` and `f = e^d`; None: it depends on no m.
    moved: Callable[[Partial, jax.Array, jax.Array], jax.Array] | None = None
    added: Callable[[Partial, Partial], jax.Array] | None = None  # of two measured from the same m; None: their sum
    neutral: float = 0.0  # its value without columns


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger of the two, NaN where either is: `jnp.maximum` drops NaN on a CPU."""
    return jnp.where((a > b) | jnp.isnan(a), a, b)


def as_large(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether they are equal in the order of maxima, in which NaN comes last."""
    return (a == b) | (jnp.isnan(a) & jnp.isnan(b))


def _lowest_argmax(a: Partial, b: Partial) -> jax.Array:
    (a_top, a_place), (b_top, b_place) = ((present(x.max), present(x.argmax)) for x in (a, b))
    lowest = jnp.where(as_large(a_top, b_top), jnp.minimum(a_place, b_place), a_place)
    return jnp.where((b_top > a_top) | (jnp.isnan(b_top) & (a_top == a_top)), b_place, lowest)


def _added_deviation_sq(a: Partial, b: Partial) -> jax.Array:
    """Chan, Golub and LeVeque: `Q_a + Q_b + S_a S_b / (S_a + S_b) · (μ_a - μ_b)²`, with S the sums of exponentials."""
    share = present(a.sum_exp) / jnp.maximum(present(a.sum_exp) + present(b.sum_exp), _TINY)
    between = share * present(b.sum_exp) * jnp.square(mean_distance(a) - mean_distance(b))
    return present(a.sum_exp_deviation_sq) + present(b.sum_exp_deviation_sq) + between


# By the names of `Partial`, in an order in which `tile` finds what it reads.
FIELDS: dict[str, Field] = {
    "max": Field(lambda tile, _: tile.top, None, lambda a, b: larger(present(a.max), present(b.max)), -jnp.inf),
    "sum_exp": Field(lambda tile, _: tile.sum_exp, lambda part, f, d: f * present(part.sum_exp)),
    "sum_exp_shifted": Field(
        lambda tile, _: product(tile.exp, tile.distance).sum(axis=1),
        lambda part, f, d: f * present(part.sum_exp_shifted) + product(f * present(part.sum_exp), d),
    ),
    "sum_exp_sq": Field(
        lambda tile, _: (tile.exp * tile.exp).sum(axis=1), lambda part, f, d: f * f * present(part.sum_exp_sq)
    ),
    "target_logit": Field(lambda tile, _: tile.target()),
    "weighted_sum": Field(
        lambda tile, _: tile.weighted(tile.reference),
        lambda part, f, d: present(part.weighted_sum) + jnp.where(d == 0, 0.0, product(present(part.sum_weights), d)),
    ),
    "sum_weights": Field(lambda tile, _: tile.sum_weights()),
    "argmax": Field(lambda tile, _: tile.columns[0] + tile.z.argmax(axis=1).astype(jnp.int32), added=_lowest_argmax),
    "sum_exp_deviation_sq": Field(
        lambda tile, found: product(tile.exp, jnp.square(tile.distance - mean_distance(found)[:, None])).sum(axis=1),
        lambda part, f, d: f * present(part.sum_exp_deviation_sq),
        _added_deviation_sq,
    ),
}


Values = dict[str, jax.Array]


class Statistic(NamedTuple):
    """A primitive statistic."""

    fields: tuple[str, ...]  # of `Partial`, which it is made of
    finalise: Callable[..., jax.Array]  # from these fields over the whole vocabulary
    definition: Callable[[Row], jax.Array]  # from whole rows: what the reference computes and differentiates
    saved: tuple[str, ...] = ()  # the statistics that the backward needs where it is differentiated
    # `(g, saved)`: what a cotangent g adds to `Coefficients`, by name.
    coefficients: Callable[[jax.Array, Values], Values] = lambda g, saved: {}


def total(sum_exp: jax.Array) -> jax.Array:
    """`Σ e^{z-m}`; 1 if all logits are -inf, so that its log and quotients by it are finite."""
    return jnp.where(sum_exp == 0, 1.0, sum_exp)


def log_sum(sum_exp: jax.Array) -> jax.Array:
    """`l = lse - m`, from 0 to log V."""
    return jnp.log(total(sum_exp))


# The parts m and l of `log p = (z - m) - l`. Their sum, the lse, is rounded to the size of the logits: at 1e5 to 4e-3.
_NORMALISER = ("max_logit", "log_sum")


def _log_prob(target: jax.Array, m: jax.Array, log_sum: jax.Array) -> jax.Array:
    m, log_sum = spread(m, target), spread(log_sum, target)
    return jnp.where(jnp.isneginf(m), m, (target - reference_of(m)) - log_sum)


# With `S0 = Σ e^{z-m}` and `S1 = Σ e^{z-m}(z-m)`: `lse = m + log S0`; `entropy = lse - Σ p z = log S0 - S1/S0`.
PRIMITIVES: dict[str, Statistic] = {
    "lse": Statistic(
        ("max", "sum_exp"),
        finalise=lambda m, sum_exp: m + log_sum(sum_exp),
        definition=lambda row: row.lse,
        saved=_NORMALISER,
        coefficients=lambda g, saved: {"prob": g},
    ),
    # Not to be asked for, and so the next one: constants that derivatives read.
    "log_sum": Statistic(("max", "sum_exp"), lambda m, sum_exp: log_sum(sum_exp), lambda row: row.log_sum),
    "sum_weights": Statistic(("sum_weights",), lambda sum_weights: sum_weights, lambda row: row.tile.sum_weights()),
    "log_prob": Statistic(
        ("max", "sum_exp", "target_logit"),
        finalise=lambda m, sum_exp, target: _log_prob(target, m, log_sum(sum_exp)),
        definition=lambda row: _log_prob(
            row.tile.target(), jnp.where(jnp.isneginf(row.lse), row.lse, row.reference), row.log_sum
        ),
        saved=_NORMALISER,
        coefficients=lambda g, saved: {"prob": -g.reshape(g.shape[0], -1).sum(axis=1), "target": g},
    ),
    "target_logit": Statistic(
        ("target_logit",),
        finalise=lambda target: target,
        definition=lambda row: row.tile.target(),
        coefficients=lambda g, saved: {"target": g},
    ),
    "mean_logit": Statistic(
        ("max", "weighted_sum", "sum_weights"),
        finalise=lambda m, weighted, sum_weights: weighted + product(sum_weights, reference_of(m)),
        definition=lambda row: row.tile.weighted(jnp.zeros_like(row.lse)),
        coefficients=lambda g, saved: {"logit_weights": g},
    ),
    "mean_log_prob": Statistic(
        ("max", "sum_exp", "weighted_sum", "sum_weights"),
        finalise=lambda m, sum_exp, weighted, sum_weights: weighted - product(sum_weights, log_sum(sum_exp)),
        definition=lambda row: row.tile.weighted(row.reference) - product(row.tile.sum_weights(), row.log_sum),
        saved=(*_NORMALISER, "sum_weights"),
        coefficients=lambda g, saved: {"prob": -g * saved["sum_weights"], "logit_weights": g},
    ),
    "entropy": Statistic(
        ("max", "sum_exp", "sum_exp_shifted"),
        finalise=lambda m, sum_exp, shifted: log_sum(sum_exp) - shifted / total(sum_exp),
        definition=Row.entropy,
        saved=(*_NORMALISER, "entropy"),
        coefficients=lambda g, saved: {"prob": -g * saved["entropy"], "prob_log_prob": -g},
    ),
    "sum_sq_probs": Statistic(
        ("max", "sum_exp", "sum_exp_sq"),
        finalise=lambda m, sum_exp, squares: squares / (total(sum_exp) * total(sum_exp)),
        definition=lambda row: (row.p * row.p).sum(axis=1),
        saved=(*_NORMALISER, "sum_sq_probs"),
        coefficients=lambda g, saved: {"prob": -2 * g * saved["sum_sq_probs"], "prob_sq": 2 * g},
    ),
    "max_logit": Statistic(
        ("max",),
        finalise=lambda m: m,
        definition=lambda row: jnp.take_along_axis(row.tile.logits, row.argmax()[:, None], axis=1)[:, 0],
        saved=("argmax",),
        coefficients=lambda g, saved: {"argmax": g},
    ),
    "argmax": Statistic(("max", "argmax"), finalise=lambda m, argmax: argmax, definition=Row.argmax),
    # With y = log p + H, which is z less its mean: V = Σ p y², and `dV/dz_j = p_j·(y_j² + 2·y_j - V)`.
    "varentropy": Statistic(
        ("max", "sum_exp", "sum_exp_shifted", "sum_exp_deviation_sq"),
        finalise=lambda m, sum_exp, shifted, deviation_sq: deviation_sq / total(sum_exp),
        definition=lambda row: (row.p * jnp.square(row.log_p + row.entropy()[:, None])).sum(axis=1),
        saved=(*_NORMALISER, "entropy", "varentropy"),
        coefficients=lambda g, saved: {
            "prob": g * (2 * saved["entropy"] - saved["varentropy"]),
            "prob_log_prob": 2 * g,
            "prob_deviation_sq": g,
            "entropy": saved["entropy"],
        },
    ),
}


# Statistics that are the first primitive one less the second; backends never see their names.
DERIVED: dict[str, tuple[str, str]] = {"expected_logit": ("lse", "entropy")}
