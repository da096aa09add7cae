"""Row statistics: parts of the vocabulary merge to the whole, and a table lists all that there are."""

import functools
import inspect
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import RowStatistics
from pallas_ce.statistics.row import (
    STATISTICS,
    add,
    finalise,
    from_primitives,
    from_reference,
    merge,
    partial_of_tile,
    primitive_names,
)
from pallas_ce.statistics.table import DERIVED, FIELDS, PRIMITIVES, Partial

N, V = 6, 24
NAMES = primitive_names(STATISTICS)
COLUMNS = jnp.arange(V, dtype=jnp.int32)

join = jax.jit(merge)


@jax.jit
def part(rows: Any, start: Any, stop: Any) -> Partial:
    """Statistics of the columns from `start` on and before `stop`."""
    columns = COLUMNS
    valid = (columns >= start) & (columns < stop)
    return partial_of_tile(rows["logits"], columns, valid, rows["labels"], rows["u"], NAMES)


@st.composite
def rows_of_logits(draw: Any) -> dict[str, Any]:
    """Logits with ties, common offsets, columns of -inf, a row of -inf only, NaN and +inf; u with zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    logits = rng.normal(size=(N, V)) * draw(st.sampled_from([0.0, 1.0, 30.0])) + draw(st.sampled_from([0.0, -700.0]))
    u = rng.uniform(size=V)
    for column in draw(st.lists(st.integers(0, V - 1), max_size=V)):
        logits[:, column], u[column] = -np.inf, 0.0
    if draw(st.booleans()):
        logits[2] = -np.inf
    one_more = draw(st.sampled_from([3, 4])), draw(st.sampled_from([np.nan, np.inf]))
    for row, bad in ((3, np.nan), (4, np.inf), one_more) if u.any() else ():
        logits[row, draw(st.sampled_from(np.flatnonzero(u)))] = bad
        logits[5, np.flatnonzero(u)[[0, -1]]] = np.nan
    return {"logits": logits.astype(np.float32), "labels": rng.integers(-1, V, N).astype(np.int32), "u": u}


def assert_same(got: Partial, want: Partial, logits: np.ndarray) -> None:
    """Up to the rounding of sums whose terms are of the logits' size and may cancel."""
    size = np.max(np.abs(logits), where=np.isfinite(logits), initial=1.0)
    ours, theirs = finalise(got, NAMES), finalise(want, NAMES)
    assert set(ours) == set(theirs) == NAMES
    for name in NAMES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=3e-6, atol=3e-6 * size, err_msg=name)


def assert_are_maximum_and_lse(found: Partial, logits: np.ndarray) -> None:
    """As NumPy and JAX have them of whole rows."""
    values = finalise(found, NAMES)
    np.testing.assert_array_equal(values["argmax"], np.argmax(logits, axis=1))
    np.testing.assert_array_equal(values["max_logit"], np.max(logits, axis=1))
    np.testing.assert_allclose(values["lse"], jax.nn.logsumexp(logits, axis=1), rtol=3e-6, atol=3e-6)


@hypothesis.given(rows=rows_of_logits(), cuts=st.tuples(st.integers(0, V), st.integers(0, V)))
def test_merge_is_associative_and_gives_the_whole(rows: dict[str, Any], cuts: tuple[int, int]) -> None:
    first, second = sorted(cuts)
    a, b, c = part(rows, 0, first), part(rows, first, second), part(rows, second, V)
    logits, whole = rows["logits"], part(rows, 0, V)
    for merged in (join(join(a, b), c), join(c, join(b, a)), whole):
        assert_same(merged, whole, logits)
        assert_are_maximum_and_lse(merged, logits)
    not_finite = np.any(np.isnan(logits) | np.isposinf(logits), axis=1)
    for name in ("entropy", "sum_sq_probs", "varentropy"):
        np.testing.assert_array_equal(np.isnan(finalise(whole, NAMES)[name]), not_finite)


@hypothesis.given(rows=rows_of_logits(), cut=st.integers(0, V))
def test_sums_that_are_measured_from_another_number_are_added_and_moved_to_the_maximum(
    rows: dict[str, Any], cut: int
) -> None:
    logits = rows["logits"]
    reference = 4 + np.max(logits, axis=1, where=np.isfinite(logits), initial=-700)

    def measured(start: int, stop: int) -> Partial:
        found, sums = part(rows, start, stop), jnp.exp(logits[:, start:stop] - reference[:, None]).sum(axis=1)
        return Partial(max=found.max, sum_exp=sums, argmax=found.argmax)

    assert_are_maximum_and_lse(from_reference(add(measured(0, cut), measured(cut, V)), reference), logits)


@hypothesis.given(rows=rows_of_logits())
def test_a_part_without_columns_is_neutral(rows: dict[str, Any]) -> None:
    nothing, whole = part(rows, V, V), part(rows, 0, V)
    for merged in (join(nothing, whole), join(whole, nothing)):
        for name, got, want in zip(Partial._fields, merged, whole, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)
    empty = finalise(join(nothing, nothing), NAMES)
    assert np.all(np.isneginf(empty["lse"]))
    assert not np.any(empty["entropy"])
    assert not np.any(empty["sum_sq_probs"])
    assert not np.any(empty["varentropy"])


@pytest.mark.parametrize("name", STATISTICS)
def test_only_what_a_statistic_needs_is_kept(name: str) -> None:
    names = primitive_names((name,))
    logits = jnp.zeros((N, V))
    partial = partial_of_tile(logits, COLUMNS, None, jnp.zeros(N, jnp.int32), jnp.ones(V), names)
    joined = merge(partial, partial)
    kept = {field for field, value in joined._asdict().items() if value is not None}
    assert kept == {field for primitive in names for field in PRIMITIVES[primitive].fields}
    returned = from_primitives(finalise(joined, names), (name,))
    assert [field for field, value in returned._asdict().items() if value is not None] == [name]


VARENTROPY = frozenset({"varentropy"})
FLAT = np.random.default_rng(0).normal(size=4096) * 0.01


def test_every_public_statistic_has_one_entry_and_every_entry_is_read() -> None:
    assert {*RowStatistics._fields, "log_sum", "sum_weights"} == {*PRIMITIVES, *DERIVED}
    assert not PRIMITIVES.keys() & DERIVED.keys()
    assert {field for entry in PRIMITIVES.values() for field in entry.fields} == {*FIELDS} == {*Partial._fields}
    described = inspect.getdoc(RowStatistics) or ""
    for name in RowStatistics._fields:
        assert f"\n    {name}: " in described


@pytest.mark.parametrize(
    "row",
    [
        FLAT,
        FLAT * 100,
        FLAT * 3000,
        np.round(FLAT * 2**14) / 2**10 + 5000,
        *(np.where(np.arange(4096) == 777, high, FLAT) for high in (2.0, 8.0, 20.0)),
        np.where(np.arange(4096) % 2, FLAT, -np.inf),
    ],
    ids=["flat", "normal", "peaked", "offset", "outlier 2", "outlier 8", "outlier 20", "columns of -inf"],
)
def test_varentropy_is_accurate_however_little_of_the_row_the_maximum_holds(row: np.ndarray) -> None:
    """Measured from the maximum instead of the mean, the outlier of 2 alone would cost three digits."""
    z = row.astype(np.float32)[None]
    wide = z.astype(np.float64) - z.max()
    p = np.exp(wide) / np.exp(wide).sum()
    finite = np.where(p > 0, wide, 0)
    want = (p * (finite - (p * finite).sum()) ** 2).sum()
    columns = jnp.arange(4096, dtype=jnp.int32)

    @jax.jit
    def part(z: jax.Array, columns: jax.Array) -> Partial:
        return partial_of_tile(z, columns, None, None, None, VARENTROPY)

    parts = (part(z[:, i : i + 512], columns[i : i + 512]) for i in range(0, 4096, 512))
    got = finalise(functools.reduce(merge, parts), VARENTROPY)["varentropy"]
    np.testing.assert_allclose(got[0], want, rtol=1e-5)


def test_an_unknown_statistic_is_answered_with_those_there_are():
    with pytest.raises(
        AttributeError, match=r"no 'logprob'; its statistics are lse, target_logit, log_prob, .*varentropy"
    ):
        _ = RowStatistics().logprob
