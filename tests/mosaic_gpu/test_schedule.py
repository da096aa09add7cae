"""Which tiles there are, who makes them, and in which order their statistics are joined; nothing of it by the rows."""

import dataclasses
import itertools
import re
from typing import Any, get_args
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_ce.backends.mosaic_gpu.backend import MosaicBlock
from pallas_ce.backends.mosaic_gpu.gemm.loop import Walk, corrected
from pallas_ce.backends.mosaic_gpu.kernels import forward_kernel
from pallas_ce.backends.mosaic_gpu.schedule import Config, Kernel, Product, cost, rule
from pallas_ce.head import Batch, HeadSpec
from pallas_ce.statistics.row import FIELDS, Partial, add, joined
from pallas_ce.statistics.table import PRIMITIVES
from tests.mosaic_gpu.conftest import make_problem
from tests.pallas_ce.kernel_cases import CAPPED, HEAD, Case

EVERY = frozenset(PRIMITIVES)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_quotient_that_a_gpu_rounds_is_corrected(off: int) -> None:
    """A CPU divides exactly, so that no other test would see a wrong correction."""
    x, by = (v.ravel() for v in np.meshgrid(np.r_[0:40, 2**24 - 9 : 2**24], np.r_[1:20, 4096, 2**20], indexing="ij"))
    found = corrected(jnp.int32(x // by + off), jnp.int32(x), jnp.int32(by))
    for got, want in zip(found, np.divmod(x, by), strict=True):
        np.testing.assert_array_equal(got, want)


def walked(product: Product, refs: dict[str, Any]) -> list[list[tuple[int, int, int]]]:
    """Of each thread block, the row, column and part of its tiles, in order."""

    def tiles(worker: int) -> list[tuple[int, int, int]]:
        with mock.patch.object(lax, "axis_index", return_value=jnp.int32(worker)):
            walk = Walk(product, refs)
            if not int(walk.tiles):
                return []
            places = jax.vmap(walk.place)(jnp.arange(walk.tiles))
        assert (places.column == places.block * product.config.columns).all()
        return list(zip(places.row.tolist(), places.column.tolist(), places.part.tolist(), strict=True))

    return [tiles(worker) for worker in range(product.workers)]


@hypothesis.given(
    row_blocks=st.integers(1, 9), column_blocks=st.integers(1, 9), parts=st.integers(1, 3), sms=st.integers(1, 12),
    row_group=st.integers(1, 5), valid_rows=st.none() | st.integers(0, 9 * 128),
    valid_columns=st.none() | st.integers(0, 9 * 64),
)  # fmt: skip
def test_every_tile_is_handed_out_once_and_to_no_thread_block_more_than_its_share(
    row_blocks: int, column_blocks: int, parts: int, sms: int, row_group: int, valid_rows: Any, valid_columns: Any
) -> None:
    product = Product(
        Config(columns=64, row_group=row_group, sms=sms), row_blocks, column_blocks, length=512, parts=parts
    )
    refs = {}
    if valid_rows is not None:
        refs["valid_rows"] = jnp.asarray([valid_rows := min(valid_rows, 128 * row_blocks)])
        row_blocks = -(-valid_rows // 128)
    if valid_columns is not None:
        refs["valid_columns"] = jnp.asarray([valid_columns := min(valid_columns, 64 * column_blocks)])
        column_blocks = -(-valid_columns // 64)
    found = walked(product, refs)
    every = {(128 * r, 64 * c, p) for r in range(row_blocks) for c in range(column_blocks) for p in range(parts)}
    assert sorted(tile for tiles in found for tile in tiles) == sorted(every)
    assert max(map(len, found)) <= -(-len(every) // product.workers)


def test_thread_blocks_at_work_share_a_few_row_blocks_and_come_back_the_way_they_went() -> None:
    product = Product(Config(columns=64, row_group=3, sms=6), row_blocks=7, column_blocks=8, length=64)
    order = [tile for turn in zip(*walked(product, {}), strict=False) for tile in turn]
    rows, columns = ([tile[axis] for tile in order] for axis in (0, 1))
    assert set(rows[:24]) == {0, 128, 256}
    assert columns[:24] == [64 * (i // 3) for i in range(24)]
    assert columns[24:48] == [448 - 64 * (i // 3) for i in range(24)]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("sets", [1, 7, 9, 64, 100])
def test_statistics_of_tiles_are_joined_in_one_order_whatever_the_rows(sets: int) -> None:
    """Entry by entry: in a reduction XLA might choose another order for other sizes."""
    rng = np.random.default_rng(sets)
    parts = Partial(**{field: jnp.asarray(rng.uniform(0.1, 9, (sets, 97)), jnp.float32) for field in FIELDS})
    traced = jax.make_jaxpr(joined)(parts)
    assert not re.findall(r"reduce\w*|cum\w+|dot\w*|scan|while|sort", str(traced))
    # Without exponentials, whose last bit may be another in a vector of the CPU.
    together = jax.jit(lambda parts: joined(parts, add))
    whole = together(parts)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 70), slice(90, 97)):
        some = together(jax.tree.map(lambda x, rows=rows: x[:, rows], parts))
        jax.tree.map(lambda x, y, rows=rows: np.testing.assert_array_equal(x[rows], y), whole, some)
    found = joined(parts)
    want = np.sum(np.exp(np.asarray(parts.max, np.float64)) * parts.sum_exp, axis=0)
    np.testing.assert_allclose(np.exp(np.asarray(found.max, np.float64)) * found.sum_exp, want, rtol=1e-5)


def test_only_the_height_of_tiles_that_make_logits_depends_on_the_rows() -> None:
    """Else a row's statistics would be joined from others than in a batch of another size."""
    for kernel in get_args(Kernel):
        for vocab_size, given in itertools.product((32768, 50304, 131072), ((1, 0), (9, 0), (1, 4))):
            spec = HeadSpec(4096, vocab_size, vocab_size, 0, np.dtype(jnp.bfloat16), None)
            found = [rule(kernel, spec, rows, *given) for rows in (1, 300, 1024, 8192)]
            assert len({(c.columns, c.piece) for c in found}) == 1
            assert found[0].columns % 64 == 0
    assert found[0] != rule("forward", spec, 8192, 1, 0)


def test_work_is_counted_in_full_tiles_and_full_rounds() -> None:
    config = Config(columns=128, sms=10)
    assert cost(config, 128, 1280) == 10 * 128 * 128
    assert cost(config, 129, 1280) == 20 * 128 * 128
    assert cost(config, 1, 1281) == 20 * 128 * 128


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kernel", ["forward", "stash"])
def test_a_rows_statistics_are_the_same_bits_alone_in_any_batch_and_at_any_place(kernel: str, interpreted: Any) -> None:
    p = make_problem(Case((300, 80, 584), CAPPED, HEAD))
    # Exact products: a CPU may sum one in another order at another place of a tile, where a GPU does not.
    hidden, weight = (jnp.round(8 * x.astype(jnp.float32)).astype(x.dtype) / 8 for x in (p.hidden, p.head.weight))
    given = dataclasses.replace(p.head, weight=weight)
    budget = 2**16  # several launches for 300 rows

    def run(head: Any, hidden: jax.Array) -> Any:
        if kernel == "forward":
            return forward_kernel.statistics(head, hidden, EVERY, budget)
        reference = jnp.full(hidden.shape[0], 4.0)
        partial, stored = MosaicBlock(head, Batch(hidden), None).exponentials(reference, EVERY)
        return partial(), stored[: hidden.shape[0], :584]

    whole = interpreted(run)(given, hidden)
    for places in (np.array([170]), np.arange(200, 70, -1), np.array([299, 0, 170] * 50)):
        some = interpreted(run)(given, hidden[places])
        jax.tree.map(lambda x, y, places=places: np.testing.assert_array_equal(x[places], y), whole, some)
