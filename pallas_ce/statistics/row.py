"""Row statistics: the few numbers per row of logits through which every loss of this library is computed.

`RowStatistics` is what callers see. `Partial` is what a kernel accumulates over part of the vocabulary, and
`merge` is the one associative rule that joins two parts: vocabulary tiles, windows, chunks and shards all use it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STATISTICS = (
    "lse",
    "target_logit",
    "log_prob",
    "mean_logit",
    "entropy",
    "expected_logit",
    "sum_sq_probs",
    "max_logit",
    "argmax",
)

# Statistics that are sums and differences of others; kernels never see their names.
_DERIVED = {"log_prob": ("target_logit", "lse"), "expected_logit": ("lse", "entropy")}

# Those that have one entry for each target of a row.
_OF_TARGETS = ("target_logit", "log_prob")


class RowStatistics(NamedTuple):
    """Statistics of rows `z [V]` of logits with label `t`, where `p = softmax(z)`.

    Every field has hidden's leading shape, float32 (float64 for float64 inputs; `argmax` int32), or is None where it
    was not asked for. Rows that a `row_mask` turns off hold 0 everywhere. With labels `[..., K]`, K targets for each
    row, `target_logit` and `log_prob` have that shape.

    Attributes:
        lse: `log Σ_v exp z_v`.
        target_logit: `z_t`; 0 where `t` is not in `[0, V)`.
        log_prob: `target_logit - lse`; -inf in a row of -inf only.
        mean_logit: `Σ_v u_v z_v` with the given `logit_weights` u, or `1/V` each.
        entropy: `-Σ_v p_v log p_v`, in nats.
        expected_logit: `Σ_v p_v z_v = lse - entropy`.
        sum_sq_probs: `Σ_v p_v²`.
        max_logit: `max_v z_v`.
        argmax: the index of the largest logit, the lowest one where several tie.
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


def struct(name: str, rows: tuple[int, ...], targets: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a statistic of rows of that shape with labels `[*rows, *targets]`."""
    shape = (*rows, *targets) if name in _OF_TARGETS else rows
    return jax.ShapeDtypeStruct(shape, jnp.int32 if name == "argmax" else dtype)


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x [...]` with axes of 1 behind, so that it broadcasts with `like [..., *K]`."""
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def primitive_names(names: Iterable[str]) -> frozenset[str]:
    """The statistics a kernel must compute so that those in `names` can be derived."""
    return frozenset(part for name in names for part in _DERIVED.get(name, (name,)))


def from_primitives(primitives: dict[str, jax.Array], names: Iterable[str]) -> RowStatistics:
    """`RowStatistics` holding just `names`, from the primitive ones."""
    values = dict(primitives)
    if "log_prob" in names:
        lse = spread(values["lse"], values["target_logit"])
        values["log_prob"] = jnp.where(jnp.isneginf(lse), lse, values["target_logit"] - lse)
    if "expected_logit" in names:
        values["expected_logit"] = values["lse"] - values["entropy"]
    return RowStatistics(**{name: values[name] for name in names})


class Partial(NamedTuple):
    """What is kept of each row while streaming over columns; None where no requested statistic needs it.

    With `m` the maximum over the columns seen so far, sums of exponentials are relative to it, so nothing overflows and
    a common offset of all logits changes only `max` and `weighted_sum`.
    """

    max: jax.Array | None = None  # m
    sum_exp: jax.Array | None = None  # Σ e^{z-m}
    sum_exp_shifted: jax.Array | None = None  # Σ e^{z-m} (z-m): for the entropy, without the cancellation of Σ e^z z
    sum_exp_sq: jax.Array | None = None  # Σ e^{2(z-m)}
    target_logit: jax.Array | None = None  # z_t where a column seen is the target, else 0; [n] or [n, K]
    weighted_sum: jax.Array | None = None  # Σ u z
    argmax: jax.Array | None = None  # lowest column where z = m


def partial_of_tile(
    logits: jax.Array,
    columns: jax.Array,
    valid: jax.Array | None,
    labels: jax.Array | None,
    logit_weights: jax.Array | None,
    names: frozenset[str],
) -> Partial:
    """The `Partial` of one tile.

    Args:
        logits: `[n, c]`, float32 or float64.
        columns: `[c]` int32, ascending vocabulary ids of the tile's columns.
        valid: `[c]` bool, False for columns that another tile covers; None where all are valid.
        labels: `[n]` or `[n, K]` int32, -1 for no target; needed for `target_logit`.
        logit_weights: `[c]`, the u of `mean_logit`.
        names: primitive statistics to prepare.
    """
    z = logits if valid is None else jnp.where(valid, logits, -jnp.inf)
    top = total = shifted = squares = target = weighted = arg = None
    if names & {"lse", "entropy", "sum_sq_probs", "max_logit", "argmax"}:
        top = z.max(axis=1)
    if names & {"lse", "entropy", "sum_sq_probs"}:
        assert top is not None
        # A row of -inf only has m = -inf; measured from 0 its exponentials are 0 instead of exp(nan).
        distance = z - jnp.where(jnp.isneginf(top), 0.0, top)[:, None]
        exp = jnp.exp(distance)
        total = exp.sum(axis=1)
        if "entropy" in names:
            shifted = jnp.where(exp > 0, exp * distance, 0.0).sum(axis=1)
        if "sum_sq_probs" in names:
            squares = (exp * exp).sum(axis=1)
    if "target_logit" in names:
        assert labels is not None
        if labels.ndim == 1:
            hit = columns[None, :] == labels[:, None]
            hit = hit if valid is None else hit & valid[None, :]
            target = jnp.where(hit, logits, 0.0).sum(axis=1)
        else:
            place, inside = places_in_tile(labels, columns, valid)
            target = jnp.where(inside, jnp.take_along_axis(logits, place, axis=1, mode="clip"), 0.0)
    if "mean_logit" in names:
        assert logit_weights is not None
        counts = logit_weights != 0 if valid is None else valid & (logit_weights != 0)
        weighted = jnp.where(counts[None, :], logit_weights[None, :] * logits, 0.0).sum(axis=1)
    if "argmax" in names:
        arg = columns[0] + z.argmax(axis=1).astype(jnp.int32)
    return Partial(top, total, shifted, squares, target, weighted, arg)


def places_in_tile(labels: jax.Array, columns: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Where in a tile the targets `labels [n, K]` lie, `[n, K]`, and whether they do, in a column that is valid.

    The places of those that do not mean nothing, but lie in the tile.
    """
    last = columns.shape[0] - 1
    offset = labels - columns[0]
    place = jnp.clip(offset, 0, last)
    inside = (offset >= 0) & (offset <= last)
    return place, inside if valid is None else inside & valid[place]


def merge(a: Partial, b: Partial) -> Partial:
    """Joins the partial statistics of two disjoint sets of columns, in either order.

    Both sides are measured from the larger maximum M: `f = e^{m-M}`, then `Σ e^{z-M} = f·Σ e^{z-m}`,
    `Σ e^{z-M}(z-M) = f·(Σ e^{z-m}(z-m) + (m-M)·Σ e^{z-m})` and `Σ e^{2(z-M)} = f²·Σ e^{2(z-m)}`.
    Associative up to rounding, and commutative. `Partial`s without columns (m = -inf) are neutral.
    """
    top = total = shifted = squares = arg = None
    if a.max is not None and b.max is not None:
        top = jnp.maximum(a.max, b.max)
        gap_a, gap_b = gap(a.max, top), gap(b.max, top)
        scale_a, scale_b = jnp.exp(gap_a), jnp.exp(gap_b)
        if a.sum_exp is not None and b.sum_exp is not None:
            total = scale_a * a.sum_exp + scale_b * b.sum_exp
            if a.sum_exp_shifted is not None and b.sum_exp_shifted is not None:
                shifted_a = scale_a * a.sum_exp_shifted + _product(scale_a * a.sum_exp, gap_a)
                shifted_b = scale_b * b.sum_exp_shifted + _product(scale_b * b.sum_exp, gap_b)
                shifted = shifted_a + shifted_b
        if a.sum_exp_sq is not None and b.sum_exp_sq is not None:
            squares = scale_a * scale_a * a.sum_exp_sq + scale_b * scale_b * b.sum_exp_sq
        if a.argmax is not None and b.argmax is not None:
            lowest = jnp.where(b.max == a.max, jnp.minimum(a.argmax, b.argmax), a.argmax)
            arg = jnp.where(b.max > a.max, b.argmax, lowest)
    return Partial(
        top, total, shifted, squares, _sum(a.target_logit, b.target_logit), _sum(a.weighted_sum, b.weighted_sum), arg
    )


def gap(part_max: jax.Array, joint_max: jax.Array) -> jax.Array:
    """m - M, and 0 where both are -inf."""
    return part_max - jnp.where(jnp.isneginf(joint_max), 0.0, joint_max)


def _product(weight: jax.Array, distance: jax.Array) -> jax.Array:
    """weight·distance with 0·(-inf) = 0."""
    return jnp.where(weight > 0, weight * distance, 0.0)


def _sum(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    return None if a is None or b is None else a + b


def finalise(partial: Partial, names: frozenset[str]) -> dict[str, jax.Array]:
    """The primitive statistics in `names`, from a `Partial` over the whole vocabulary.

    With `S0 = Σ e^{z-m}` and `S1 = Σ e^{z-m}(z-m)`: `lse = m + log S0`; `entropy = lse - Σ p z = log S0 - S1/S0`;
    `Σ p² = Σ e^{2(z-m)} / S0²`. A row of -inf only has lse -inf, entropy 0 and Σ p² 0.
    """
    out: dict[str, jax.Array | None] = {
        "target_logit": partial.target_logit,
        "mean_logit": partial.weighted_sum,
        "max_logit": partial.max,
        "argmax": partial.argmax,
    }
    if partial.sum_exp is not None:
        assert partial.max is not None
        any_finite = partial.sum_exp > 0
        total = jnp.where(any_finite, partial.sum_exp, 1.0)
        out["lse"] = partial.max + jnp.log(total)
        if partial.sum_exp_shifted is not None:
            out["entropy"] = jnp.log(total) - partial.sum_exp_shifted / total
        if partial.sum_exp_sq is not None:
            out["sum_sq_probs"] = partial.sum_exp_sq / (total * total)
    return {name: value for name, value in out.items() if name in names and value is not None}
