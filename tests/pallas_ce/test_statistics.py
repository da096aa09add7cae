"""Merging partial statistics: any split of the vocabulary gives what the whole vocabulary gives."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.statistics.row import (
    STATISTICS,
    Partial,
    finalise,
    from_primitives,
    merge,
    partial_of_tile,
    primitive_names,
)
from pallas_ce.statistics.table import PRIMITIVES

N, V = 5, 24
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
    """Logits with ties, common offsets, columns of -inf and a row of -inf only; u with zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    logits = rng.normal(size=(N, V)) * draw(st.sampled_from([0.0, 1.0, 30.0])) + draw(st.sampled_from([0.0, -700.0]))
    u = rng.uniform(size=V)
    for column in draw(st.lists(st.integers(0, V - 1), max_size=V)):
        logits[:, column], u[column] = -np.inf, 0.0
    if draw(st.booleans()):
        logits[2] = -np.inf
    return {"logits": logits.astype(np.float32), "labels": rng.integers(-1, V, N).astype(np.int32), "u": u}


def assert_same(got: Partial, want: Partial, logits: np.ndarray) -> None:
    """Up to the rounding of sums whose terms are of the logits' size and may cancel."""
    size = np.max(np.abs(logits), where=np.isfinite(logits), initial=1.0)
    ours, theirs = finalise(got, NAMES), finalise(want, NAMES)
    assert set(ours) == set(theirs) == NAMES
    for name in NAMES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=3e-6, atol=3e-6 * size, err_msg=name)


@hypothesis.given(rows=rows_of_logits(), cuts=st.tuples(st.integers(0, V), st.integers(0, V)))
def test_merge_is_associative_and_gives_the_whole(rows: dict[str, Any], cuts: tuple[int, int]) -> None:
    first, second = sorted(cuts)
    a, b, c = part(rows, 0, first), part(rows, first, second), part(rows, second, V)
    left, right = join(join(a, b), c), join(a, join(b, c))
    assert_same(left, right, rows["logits"])
    assert_same(left, part(rows, 0, V), rows["logits"])
    np.testing.assert_array_equal(left.argmax, np.argmax(rows["logits"], axis=1))


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
