"""Row statistics: the few numbers per row of logits through which every loss of this library is computed.

`RowStatistics` is what callers see. `Partial` is what a kernel accumulates over part of the vocabulary, and `merge` is
the one associative rule that joins two parts: vocabulary tiles, windows, chunks and shards all use it. What each
statistic is stands in `table`.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.statistics.logits import LogitsTile, present, reference_of
from pallas_ce.statistics.table import DERIVED, FIELDS, PRIMITIVES, Field, Values, larger
from pallas_ce.statistics.table import Partial as Partial
from pallas_ce.statistics.table import RowStatistics as RowStatistics
from pallas_ce.streaming.rows import spread as spread

STATISTICS = RowStatistics._fields


def primitive_names(names: Iterable[str]) -> frozenset[str]:
    """The statistics a kernel must compute so that those in `names` can be derived."""
    return frozenset(part for name in names for part in DERIVED.get(name, (name,)))


def only[T](values: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """The `values` in `names`, in one order for every process.

    Python's hash seed orders a set of names: traced in that order, a program would be another each time.
    """
    return {name: values[name] for name in sorted(names)}


def needs_labels(name: str) -> bool:
    """Whether a statistic is one of targets, and so has one entry for each target of a row."""
    return "target_logit" in fields_of(primitive_names((name,)))


def struct(name: str, rows: tuple[int, ...], targets: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a statistic of rows of that shape with labels `[*rows, *targets]`."""
    shape = (*rows, *targets) if needs_labels(name) else rows
    return jax.ShapeDtypeStruct(shape, jnp.int32 if name == "argmax" else dtype)


def from_primitives(primitives: Values, names: Iterable[str]) -> RowStatistics:
    """`RowStatistics` holding just `names`, from the primitive ones."""
    parts = {name: [primitives[part] for part in DERIVED.get(name, (name,))] for name in names}
    return RowStatistics(**{name: functools.reduce(operator.sub, values) for name, values in parts.items()})


def fields_of(names: Iterable[str], targets: bool = True) -> tuple[str, ...]:
    """The fields of `Partial` that primitive statistics are made of, in order, with or without the targets' logits."""
    needed = {field for name in names for field in PRIMITIVES[name].fields}
    return tuple(field for field in FIELDS if field in needed and (targets or field != "target_logit"))


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
        labels: `[n]` or `[n, K]` int32, -1 for no target; None: the targets' logits are added elsewhere.
        logit_weights: `[c]`, the u of `mean_logit`.
        names: primitive statistics to prepare.
    """
    fields = fields_of(names, targets=labels is not None)
    tile, found = LogitsTile(logits, columns, valid, labels, logit_weights, fields), Partial()
    for field in fields:
        found = found._replace(**{field: FIELDS[field].tile(tile, found)})
    return found


def merge(*parts: Partial) -> Partial:
    """Joins the partial statistics of disjoint sets of columns, in any order.

    All are measured from the largest maximum M: `f = e^{m-M}`, then `Σ e^{z-M} = f·Σ e^{z-m}`,
    `Σ e^{z-M}(z-M) = f·(Σ e^{z-m}(z-m) + (m-M)·Σ e^{z-m})` and `Σ e^{2(z-M)} = f²·Σ e^{2(z-m)}`.
    Associative up to rounding, and commutative. `Partial`s without columns (m = -inf) are neutral. A NaN in one is one
    of the whole, and so is +inf.
    """
    if parts[0].max is None:
        return add(*parts)
    each = [(part, present(part.max)) for part in parts]
    top = functools.reduce(larger, (m for _, m in each))
    return add(*(moved(part, gap(m, top)) for part, m in each))


# How many of the partial statistics are joined at once.
_JOINED = 8


def joined(parts: Partial, join: Callable[..., Partial] = merge) -> Partial:
    """The `Partial` of all columns from partials of sets of columns, `[sets, ...]`, in one order whatever the rows.

    Eight are joined entry by entry, and then their results: a reduction of XLA's might choose its order by the number
    of rows, and so would the bits of a row depend on the others.
    """
    while (count := len(jax.tree.leaves(parts)[0])) > 1:
        sets = min(count, _JOINED)
        size = -(-count // sets)

        def padded(field: Field, x: jax.Array, missing: int = sets * size - count) -> jax.Array:
            return jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)], constant_values=field.neutral)

        whole, starts = parts.map(padded), range(0, sets * size, size)
        parts = join(*(jax.tree.map(operator.itemgetter(slice(i, i + size)), whole) for i in starts))
    return jax.tree.map(lambda x: x[0], parts)


def without_columns(like: Partial) -> Partial:
    """The neutral `Partial` with the fields, shapes and dtypes of another one."""
    return like.map(lambda field, x: jnp.full(x.shape, field.neutral, x.dtype))


def moved(part: Partial, distance: jax.Array) -> Partial:
    """The sums measured from M, where `distance = m - M`; `max` stays."""
    scale = jnp.exp(distance)
    return part.map(lambda field, x: x if field.moved is None else field.moved(part, scale, distance))


def add(*parts: Partial) -> Partial:
    """Joins `Partial`s whose sums of exponentials are measured from one and the same number, one after the other."""
    return functools.reduce(_add, parts)


def _add(a: Partial, b: Partial) -> Partial:
    joined = {}
    for field, rule in FIELDS.items():
        x, y = getattr(a, field), getattr(b, field)
        if x is not None and y is not None:
            joined[field] = x + y if rule.added is None else rule.added(a, b)
    return Partial(**joined)


def from_reference(partial: Partial, reference: jax.Array) -> Partial:
    """A `Partial` as statistics are made of it, from one whose sums are measured from `reference [rows]`.

    They are moved to the maximum, as `merge` would. An infinite one is measured from whatever number.
    """
    assert partial.max is not None
    return moved(partial, jnp.where(jnp.isinf(partial.max), 0.0, reference - partial.max))


def gap(part_max: jax.Array, joint_max: jax.Array) -> jax.Array:
    """m - M; ±inf, and not nan, where both are."""
    return part_max - reference_of(joint_max)


def finalise(partial: Partial, names: frozenset[str]) -> Values:
    """The primitive statistics in `names` whose fields a `Partial` over the whole vocabulary holds.

    A row of -inf only has lse -inf, and 0 for whatever comes from its probabilities. A row with a NaN has NaN in all.
    """
    read = {
        name: [getattr(partial, field) for field in PRIMITIVES[name].fields] for name in PRIMITIVES if name in names
    }
    return {name: PRIMITIVES[name].finalise(*values) for name, values in read.items() if None not in values}
