"""Row statistics: the few numbers per row of logits through which every loss of this library is computed.

`RowStatistics` is what callers see. `Partial` is what a kernel accumulates over part of the vocabulary, and `merge` is
the one associative rule that joins two parts: vocabulary tiles, windows, chunks and shards all use it. What each
statistic is stands in `table`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.statistics.logits import LogitsTile, present, reference_of
from pallas_ce.statistics.table import DERIVED, FIELDS, PRIMITIVES, Values, larger
from pallas_ce.statistics.table import Partial as Partial
from pallas_ce.statistics.table import RowStatistics as RowStatistics
from pallas_ce.statistics.table import spread as spread

STATISTICS = RowStatistics._fields


def primitive_names(names: Iterable[str]) -> frozenset[str]:
    """The statistics a kernel must compute so that those in `names` can be derived."""
    return frozenset(part for name in names for part in (DERIVED[name].parts if name in DERIVED else (name,)))


def only[T](values: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """The `values` in `names`, in one order for every process.

    Python's hash seed orders a set of names: traced in that order, a program would be another each time.
    """
    return {name: values[name] for name in sorted(names)}


def needs_labels(name: str) -> bool:
    """Whether a statistic is one of targets, and so has one entry for each target of a row."""
    return any(PRIMITIVES[part].of_targets for part in primitive_names((name,)))


def struct(name: str, rows: tuple[int, ...], targets: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a statistic of rows of that shape with labels `[*rows, *targets]`."""
    shape = (*rows, *targets) if needs_labels(name) else rows
    return jax.ShapeDtypeStruct(shape, jnp.int32 if name == "argmax" else dtype)


def from_primitives(primitives: Values, names: Iterable[str]) -> RowStatistics:
    """`RowStatistics` holding just `names`, from the primitive ones."""
    values = {name: DERIVED[name].value(primitives) if name in DERIVED else primitives[name] for name in names}
    return RowStatistics(**values)


def fields_of(names: Iterable[str]) -> tuple[str, ...]:
    """The fields of `Partial` that primitive statistics are made of, in order."""
    needed = {field for name in names for field in PRIMITIVES[name].fields}
    return tuple(field for field in FIELDS if field in needed)


def reads_logit_weights(names: Iterable[str]) -> bool:
    """Whether some primitive statistic is one of `logit_weights`."""
    return "sum_weights" in fields_of(names)


def fields_for(names: frozenset[str]) -> tuple[str, ...]:
    """The fields of `Partial` that the statistics in `names` need beside the targets' logits, in order."""
    return tuple(field for field in fields_of(names) if field != "target_logit")


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
    fields = fields_for(names) if labels is None else fields_of(names)
    tile, found = LogitsTile(logits, columns, valid, labels, logit_weights, "sum_exp" in fields), Partial()
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
        size = -(-count // _JOINED)
        whole = {
            field: jnp.pad(
                x,
                [(0, min(count, _JOINED) * size - count), *[(0, 0)] * (x.ndim - 1)],
                constant_values=FIELDS[field].neutral,
            )
            for field, x in parts._asdict().items()
            if x is not None
        }
        each = (
            Partial(**{field: x[start : start + size] for field, x in whole.items()})
            for start in range(0, min(count, _JOINED) * size, size)
        )
        parts = join(*each)
    return jax.tree.map(lambda x: x[0], parts)


def without_columns(like: Partial) -> Partial:
    """The neutral `Partial` with the fields, shapes and dtypes of another one."""
    fields = {field: x for field, x in like._asdict().items() if x is not None}
    return Partial(**{field: jnp.full(x.shape, FIELDS[field].neutral, x.dtype) for field, x in fields.items()})


def moved(part: Partial, distance: jax.Array) -> Partial:
    """The sums measured from M, where `distance = m - M`; `max` stays."""
    scale, rules = jnp.exp(distance), ((f, FIELDS[f].moved) for f, x in part._asdict().items() if x is not None)
    return part._replace(**{field: rule(part, scale, distance) for field, rule in rules if rule is not None})


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
    return {
        name: statistic.finalise(partial)
        for name, statistic in PRIMITIVES.items()
        if name in names and all(getattr(partial, field) is not None for field in statistic.fields)
    }
