"""What the gradient products' kernels do beside the cases of `test_backend.py`, under the GPU interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends.mosaic_gpu.kernels import product_kernel
from pallas_ce.backends.mosaic_gpu.schedule import COLUMN_STEP, Config, cost
from pallas_ce.streaming.gradient_products import WeightGradient
from tests.mosaic_gpu.conftest import block_of


def matrices(n: int, v: int, h: int, vocab_axis: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stored `[n, V]`, weight in its layout, rows `[n, H]`."""
    keys = jax.random.split(jax.random.key(0), 3)
    stored, weight, rows = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, ((n, v), (v, h), (n, h)), strict=True)
    )
    return stored, laid_out(weight, vocab_axis), rows


def laid_out(weight: Any, vocab_axis: int) -> Any:
    """A weight `[V, H]` as the other layout has it, or one of that as `[V, H]`."""
    return weight if vocab_axis == 0 else weight.T


def exact(a: Any, b: Any) -> np.ndarray:
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def assert_summed(got: Any, want: Any) -> None:
    """As far apart as sums in float32 may be."""
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("vocab_axis", "parts", "live"), [(0, 1, None), (1, 2, 100), (0, 3, 0), (1, 3, None)])
def test_for_hidden(
    vocab_axis: int, parts: int, live: int | None, monkeypatch: pytest.MonkeyPatch, interpreted: Any
) -> None:
    """Blocks of rows that are not live are skipped; 528 entries are nine steps, and the last of two parts has four."""
    monkeypatch.setattr(product_kernel, "parts", lambda *given: parts)
    stored, weight, rows = matrices(192, 528, 272, vocab_axis)
    valid, scale = None if live is None else jnp.int32(live), jnp.linspace(0.5, 2, 192)

    def run(stored: jax.Array, weight: jax.Array) -> jax.Array:
        return block_of(weight, rows, vocab_axis, valid).for_hidden(stored, scale, np.dtype(np.float32))

    got = interpreted(run)(stored, weight)
    assert_summed(got[:live], scale[:live, None] * exact(stored[:live], laid_out(weight, vocab_axis)))
    if live is not None:  # the interpreter's uninitialised memory
        assert np.isnan(np.asarray(got[-(-live // 128) * 128 :])).all()


@pytest.mark.parametrize(("vocab_axis", "first", "second"), [(0, 192, 70), (1, 192, 192), (1, 0, 0)])
def test_weight_sums_go_on_from_block_to_block(vocab_axis: int, first: int, second: int, interpreted: Any) -> None:
    """The first block replaces undefined memory, without rows by zeros; rows behind the valid ones are never read."""
    stored, weight, rows = matrices(192, 272, 256, vocab_axis)
    blocks = [
        (stored.at[-(-valid // 64) * 64 :].set(jnp.nan), rows.at[valid:].set(0), jnp.int32(valid))
        for valid in (first, second)
    ]

    def run(blocks: Any) -> jax.Array:
        total = jnp.full(weight.shape, jnp.nan, jnp.float32)
        for i, (stored, rows, valid) in enumerate(blocks):
            to = WeightGradient(total, jnp.bool_(i > 0))
            total = block_of(weight, rows, vocab_axis, valid).for_weight(stored, rows, to).array
        return total

    want = sum(exact(stored[:valid].T, rows[:valid]) for valid in (first, second))
    assert_summed(laid_out(interpreted(run)(blocks), vocab_axis), want)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("vocab_axis", "options", "lives"),
    [(0, {}, (None,) * 4), (1, {"stages": 2}, (192, 0, 70, 0)), (0, {"row_group": 1}, (0, 192))],
)
def test_narrow_sums_are_off_by_less_than_a_32768th_at_each_block(
    vocab_axis: int, options: dict[str, Any], lives: tuple[int | None, ...], interpreted: Any, monkeypatch: Any
) -> None:
    """Beside float32 sums; blocks without a valid row change nothing, but the last one rounds."""
    stored, weight, rows = matrices(192, 272, 320, vocab_axis)
    monkeypatch.setattr(
        product_kernel, "NARROW_CONFIG", Config(rows=64, columns=256, sms=4, **{"stages": 3, **options})
    )

    def run(stored: jax.Array, rows: jax.Array) -> Any:
        shape = product_kernel.lower_shape(*weight.shape)
        upper, lower = jnp.full(weight.shape, jnp.nan, jnp.bfloat16), jnp.full(shape, jnp.nan, jnp.bfloat16)
        total = WeightGradient(upper, scale=jnp.float32(0.5), bits=lower)
        for i, live in enumerate(lives):
            given = rows if live is None else rows.at[live:].set(0)
            valid, last = None if live is None else jnp.int32(live), jnp.bool_(i == len(lives) - 1)
            block = block_of(weight, given, vocab_axis, valid, last)
            total = block.for_weight(stored * (i + 1), given, total._replace(adds=jnp.bool_(i > 0)))
        return total.array

    got = np.asarray(laid_out(interpreted(run)(stored, rows), vocab_axis), np.float64)
    want, slack = np.zeros((272, 320)), np.zeros((272, 320))
    for i, live in enumerate(lives):
        want += 0.5 * exact((stored[:live] * (i + 1)).T, rows[:live])
        slack += 2.0**-15 * np.abs(want) + 1e-4
    assert np.all(np.abs(got - want) <= slack + 2.0**-8 * np.abs(want))


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("columns", [256, 2816, 5376, 11264, 19200, 131072])
def test_tiles_of_the_weights_gradient_end_where_parts_do(columns: int, vocab_axis: int) -> None:
    config = product_kernel.weight_config(columns, 4096, vocab_axis)
    assert COLUMN_STEP % (config.tile_rows if vocab_axis == 0 else config.columns) == 0


@pytest.mark.parametrize(
    ("rows", "hidden_size", "parts"), [(1024, 4096, 1), (1024, 1024, 4), (256, 512, 8), (8192, 4096, 1)]
)
def test_the_vocabulary_is_cut_where_too_few_tiles_would_leave_multiprocessors_idle(
    rows: int, hidden_size: int, parts: int
) -> None:
    config = product_kernel.hidden_config(rows, hidden_size)
    assert product_kernel.parts(config, rows, hidden_size, 65536) == parts


def test_tiles_are_those_that_lose_least_to_their_edges() -> None:
    for rows, columns in ((1024, 4096), (4096, 4096), (16384, 4096), (640, 768)):
        chosen = product_kernel.hidden_config(rows, columns)
        assert all(cost(chosen, rows, columns) <= cost(c, rows, columns) for c in product_kernel._TILES)
