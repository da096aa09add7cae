"""Tiles and row blocks: everything is covered once, whatever the sizes and whichever rows count."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.streaming import rows
from pallas_ce.streaming.rows import RowBlock, Rows, constant_unless_any, with_placeholder_rows, zeroed
from pallas_ce.streaming.tiles import Tiles


@st.composite
def sizes(draw: Any) -> tuple[int, int]:
    total = draw(st.integers(1, 40))
    return total, draw(st.integers(1, total))


@st.composite
def masks(draw: Any) -> tuple[np.ndarray, jax.Array | None]:
    """Which of some rows count, and the mask that says so; None: all of 11."""
    if draw(st.booleans()):
        return np.ones(11, bool), None
    counts = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=20)))
    return counts, jnp.asarray(counts)


@hypothesis.given(sizes())
def test_tiles_cover_every_column_once(size: tuple[int, int]) -> None:
    tiles = Tiles(*size)
    x = jnp.arange(2 * tiles.total).reshape(2, tiles.total)

    @jax.jit
    def walk(x: jax.Array) -> Any:
        def body(i: jax.Array, carry: Any) -> Any:
            covered, copy, ids = carry
            tile = tiles.tile(i)
            valid = jnp.ones(tile.size, jnp.int32) if tile.valid is None else tile.valid
            return (
                tile.add(covered, valid),
                tile.put(copy, tile.take(x, 1), 1),
                ids & jnp.all(tile.take(jnp.arange(tiles.total)) == tile.columns),
            )

        return jax.lax.fori_loop(0, tiles.count, body, (jnp.zeros(tiles.total), jnp.zeros_like(x), jnp.bool(True)))

    covered, copy, ids_agree = walk(x)
    np.testing.assert_array_equal(covered, 1)
    np.testing.assert_array_equal(copy, x)
    assert ids_agree


@pytest.mark.parametrize("size", [0, 6])
def test_a_tile_of_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size={size} must lie between 1 and total=5"):
        Tiles(5, size)


@hypothesis.given(masked=masks(), data=st.data())
def test_row_blocks_visit_every_counted_row_once_and_no_other(masked: Any, data: Any) -> None:
    counts, mask = masked
    n = len(counts)
    size, skipped, unrolled = data.draw(st.integers(1, n)), data.draw(st.booleans()), data.draw(st.booleans())
    x = np.arange(1.0, n + 1)

    @jax.jit
    def walk(x: jax.Array) -> Any:
        def body(block: RowBlock, carry: Any) -> Any:
            visits, copy, trips = carry
            valid = block.select(jnp.ones(size), 0.0)
            visits = visits.at[block.take(jnp.arange(n))].add(valid)
            return visits, block.put(copy, block.take(x)), trips + 1

        blocks = Rows.counted(mask).blocks(n, size, skipped=skipped)
        return blocks.for_each(body, (jnp.zeros(n), jnp.zeros(n), jnp.int32(0)), unrolled=unrolled)

    visits, copy, trips = walk(x)
    np.testing.assert_array_equal(visits, counts)
    np.testing.assert_array_equal(copy, x * counts)
    all_visited = skipped or size == n or n - counts.sum() <= n // 16
    assert int(trips) == -(-(n if all_visited else counts.sum()) // size)


def test_blocks_without_a_loop_are_traced_once() -> None:
    """A kernel takes Python tens of milliseconds, and there may be 22 blocks."""
    traced = []

    def body(block: RowBlock, found: jax.Array) -> jax.Array:
        traced.append(block)
        return block.put(found, block.take(jnp.arange(64)))

    def walk() -> jax.Array:
        return Rows.counted(None).blocks(64, 3).for_each(body, jnp.zeros(64, jnp.int32), unrolled=True)

    assert " while(" not in jax.jit(walk).lower().as_text("hlo")
    assert len(traced) == 1


def test_no_rows_at_all_are_visited_as_none() -> None:
    assert Rows.counted(jnp.zeros(0, bool)).put_all(0, jnp.zeros(0)).shape == (0,)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("wide", [False, True])
@hypothesis.given(masked=masks())
def test_few_rows_have_the_places_of_many(masked: Any, wide: bool) -> None:
    with jax.enable_x64(wide), pytest.MonkeyPatch.context() as patch:
        given = jnp.asarray(masked[0])
        few = Rows.counted(given)
        patch.setattr(rows, "_FEW_ROWS", 0)
        many = Rows.counted(given)
    for found in (few, many):
        assert found.order is not None
        assert given[found.order].all() or not given.any()
        np.testing.assert_array_equal(found.put_all(0, found.order), jnp.where(given, jnp.arange(given.size), 0))
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(same, (few.filled, few.valid, few.place), (many.filled, many.valid, many.place))


@pytest.mark.parametrize("ignored", [0, 1, 4, 5, 63, 64])
def test_few_ignored_rows_give_their_places_to_others_and_more_of_them_are_packed(ignored: int) -> None:
    """Either way no ignored row is read, unless there is no other; the first row is among them."""
    mask = np.ones(64, bool)
    mask[[0, *(1 + np.random.default_rng(ignored).permutation(63))][:ignored]] = False
    found = Rows.counted(jnp.asarray(mask))
    assert found.order is not None
    few = ignored <= 4
    places = mask if few else np.arange(64) < 64 - ignored
    np.testing.assert_array_equal(found.order[places], np.flatnonzero(mask))
    np.testing.assert_array_equal(found.valid, places)
    assert found.filled == (64 if few else 64 - ignored)
    assert ignored == 64 or mask[found.order].all()
    assert bool(rows.few_ignored(jnp.sum(mask), mask.size)) == few


@pytest.mark.parametrize("function", [zeroed, with_placeholder_rows])
@hypothesis.given(masked=masks())
def test_zeros_or_a_counted_row_take_the_place_of_rows_that_do_not_count(masked: Any, function: Any) -> None:
    counts, mask = masked
    n = len(counts)
    given = {"x": np.where(counts[:, None], np.arange(2.0 * n).reshape(n, 2), np.nan), "id": np.arange(n)}
    found = function(mask, jax.tree.map(jnp.asarray, given))
    for name, value in given.items():
        other = 0 if function is zeroed else value[np.argmax(counts)]
        assert found[name].dtype == jnp.asarray(value).dtype
        want = np.where(counts.reshape(-1, *[1] * (value.ndim - 1)), value, other)
        np.testing.assert_array_equal(found[name], want)


def test_placeholder_rows_carry_no_gradient() -> None:
    mask = jnp.array([False, True, False, True])
    gradient = jax.grad(lambda x: jnp.sum(jnp.inf * with_placeholder_rows(mask, x)))(jnp.ones(4))
    np.testing.assert_array_equal(gradient, [0, np.inf, 0, np.inf])


@pytest.mark.parametrize("counts", [False, True])
def test_what_rows_share_has_gradient_zero_where_no_row_counts(counts: bool) -> None:
    mask = jnp.full(3, counts)
    gradient = jax.grad(lambda x: constant_unless_any(mask, {"x": x})["x"] * jnp.inf)(2.0)
    assert float(gradient) == (np.inf if counts else 0.0)
    assert float(constant_unless_any(mask, jnp.float32(2.0))) == 2.0


@pytest.mark.parametrize("n", [1, 2048, 2049, 2176, 20_001])
def test_counted_rows_are_added_up_whatever_their_number(n: int) -> None:
    mask = np.random.default_rng(n).random(n) < 0.7
    found = jax.jit(rows._prefix_sum)(mask)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.cumsum(mask))
