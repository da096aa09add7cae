"""Tiles and row blocks: everything is covered once, whatever the sizes and whichever rows count."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.blocks import RowBlock, Rows, Tiles


@st.composite
def sizes(draw: Any) -> tuple[int, int]:
    total = draw(st.integers(1, 40))
    return total, draw(st.integers(1, total))


@st.composite
def masks(draw: Any) -> np.ndarray | None:
    """Which of some rows count; None: all of 11."""
    return None if draw(st.booleans()) else np.array(draw(st.lists(st.booleans(), min_size=1, max_size=20)))


@hypothesis.given(sizes())
def test_tiles_cover_every_column_once(size: tuple[int, int]) -> None:
    tiles = Tiles(*size)
    x = jnp.arange(2 * tiles.total).reshape(2, tiles.total)

    @jax.jit
    def walk(x: jax.Array) -> Any:
        def body(i: jax.Array, carry: Any) -> Any:
            covered, copy, ids = carry
            tile = tiles.tile(i)
            live = jnp.ones(tile.size, jnp.int32) if tile.live is None else tile.live
            return (
                tile.add(covered, live),
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


@hypothesis.given(mask=masks(), data=st.data())
def test_row_blocks_visit_every_counted_row_once_and_no_other(mask: np.ndarray | None, data: Any) -> None:
    n = 11 if mask is None else len(mask)
    size = data.draw(st.integers(1, n))
    counts = np.ones(n, bool) if mask is None else mask
    x = np.arange(1.0, n + 1)

    @jax.jit
    def walk(x: jax.Array) -> Any:
        def body(block: RowBlock, carry: Any) -> Any:
            visits, copy, trips = carry
            live = block.select(jnp.ones(size), 0.0)
            visits = visits.at[block.take(jnp.arange(n))].add(live)
            return visits, block.put(copy, block.take(x)), trips + 1

        blocks = Rows.counted(None if mask is None else jnp.asarray(mask)).blocks(n, size)
        return blocks.for_each(body, (jnp.zeros(n), jnp.zeros(n), jnp.int32(0)))

    visits, copy, trips = walk(x)
    np.testing.assert_array_equal(visits, counts)
    np.testing.assert_array_equal(copy, x * counts)
    assert int(trips) == -(-counts.sum() // size)


@hypothesis.given(mask=masks())
def test_visiting_order_and_row_order_are_inverse(mask: np.ndarray | None) -> None:
    n = 11 if mask is None else len(mask)
    counts = np.ones(n, bool) if mask is None else mask
    x = np.arange(2.0 * n).reshape(n, 2) + 1

    @jax.jit
    def there_and_back(x: jax.Array) -> Any:
        rows = Rows.counted(None if mask is None else jnp.asarray(mask))
        visited = rows.visit(x)
        return visited, rows.in_row_order(visited), rows.select(visited[:, 0])

    visited, by_row, selected = there_and_back(x)
    np.testing.assert_array_equal(visited[: counts.sum()], x[counts])
    if counts.any():
        # Behind the last counted row stand counted rows too, so that no stand-in value can turn into nan.
        np.testing.assert_array_equal(visited[counts.sum() :], np.broadcast_to(x[counts][-1], (n - counts.sum(), 2)))
    np.testing.assert_array_equal(by_row, x * counts[:, None])
    np.testing.assert_array_equal(selected, np.r_[x[counts, 0], np.zeros(n - counts.sum())])


def test_no_rows_at_all_are_visited_as_none() -> None:
    rows = Rows.counted(jnp.zeros(0, bool))
    assert rows.visit(jnp.zeros((0, 3))).shape == (0, 3)
    assert rows.in_row_order(jnp.zeros(0)).shape == (0,)


@pytest.mark.parametrize("counts", [False, True])
def test_a_guard_selects_gradient_zero_where_no_row_counts(counts: bool) -> None:
    rows = Rows.counted(jnp.full(3, counts))
    gradient = jax.grad(lambda x: rows.guard({"x": x})["x"] * jnp.inf)(2.0)
    assert float(gradient) == (np.inf if counts else 0.0)
    assert float(rows.guard(jnp.float32(2.0))) == 2.0
