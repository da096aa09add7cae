"""What a kernel does by itself, beside `test_backend.py`: under the GPU interpreter with race detection."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import reference
from pallas_ce.backends.mosaic_gpu.backend import MosaicBlock
from pallas_ce.backends.mosaic_gpu.kernels import forward_kernel, operands
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import DlogitsEpilogue
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import finalise
from pallas_ce.streaming.tiles import Columns
from tests.mosaic_gpu.conftest import Problem, make_problem
from tests.pallas_ce.kernel_cases import CAPPED, HEAD, Case

LSE = frozenset({"lse"})


def all_coefficients(n: int) -> coef.Coefficients:
    """Each term's coefficient; the entropy is no row's, which the formula need not know."""
    keys = jax.random.split(jax.random.key(3), len(coef.Coefficients._fields))
    return coef.Coefficients(*(jax.random.normal(key, (n,)) for key in keys))


def wanted(names: frozenset[str], p: Problem) -> Any:
    return reference.row_statistics(names, Batch(p.hidden, p.labels), p.head, None)


def test_offsets_and_large_logits_lose_nothing(interpreted: Any) -> None:
    plain = make_problem(Case((64, 64, 192)))
    run = interpreted(lambda head, h: forward_kernel.statistics(head, h, LSE))
    for scale, offset in ((1.0, 256.0), (300.0, 0.0)):
        head = dataclasses.replace(plain.head, bias=jnp.full(192, offset / scale), logit_scale=jnp.float32(scale))
        p = plain._replace(head=head)
        np.testing.assert_allclose(finalise(run(head, p.hidden), LSE)["lse"], wanted(LSE, p)["lse"], rtol=1e-6)


def test_rows_that_are_not_live_are_skipped(interpreted: Any) -> None:
    p = make_problem(Case((512, 64, 192), ignored=0.0))

    def lse(head: Any, h: jax.Array, valid: jax.Array) -> jax.Array:
        partial = forward_kernel.statistics(head, h, LSE, filled=valid)
        # No other statistic is computed.
        assert [name for name, x in partial._asdict().items() if x is not None] == ["max", "sum_exp"]
        return finalise(partial, LSE)["lse"]

    want = wanted(LSE, p)["lse"]
    got = interpreted(lse)(p.head, p.hidden, jnp.int32(130))
    np.testing.assert_allclose(got[:130], want[:130], rtol=1e-5)
    assert np.isnan(np.asarray(got[256:])).all()  # the interpreter's uninitialised memory


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("most", [16, 1])
def test_a_budget_for_few_partial_statistics_changes_no_bit(
    most: int, interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_kernel, "_MOST_WITHOUT_LOOP", most)
    p = make_problem(Case((300, 64, 584)))

    def run(budget: int, valid: int) -> Any:
        def statistics(head: Any, h: jax.Array, valid: jax.Array) -> Any:
            return forward_kernel.statistics(head, h, LSE, budget, valid)

        return jax.tree.map(lambda x: x[:valid], interpreted(statistics)(p.head, p.hidden, jnp.int32(valid)))

    for valid in (300, 130):
        jax.tree.map(np.testing.assert_array_equal, run(4 * 2 * 10 * 128, valid), run(2**20, valid))


def test_every_number_is_stored_once(monkeypatch: pytest.MonkeyPatch, tiles: Any, interpreted: Any) -> None:
    """Shown by adding in place of storing: nothing may be written twice, even if it is right in the end."""
    monkeypatch.setattr(DlogitsEpilogue, "store", functools.partialmethod(DlogitsEpilogue.store, add=True))
    p = make_problem(Case((150, 272, 584)))
    tiles(columns=128, piece=64)
    lse = jnp.zeros(150)  # so that a product of 0 would store 1

    def run(head: Any, h: jax.Array, lse: jax.Array) -> jax.Array:
        zeros = jnp.zeros(operands.stored_shape(150, 584), h.dtype)
        gradient = Gradient(coef.Coefficients(prob=jnp.ones(150)), lse)
        return MosaicBlock(head, Batch(h), None).dlogits(gradient, into=zeros)

    got = interpreted(run)(p.head, p.hidden, lse)
    exact = np.exp(np.asarray(p.hidden, np.float64) @ np.asarray(p.head.weight, np.float64).T)
    np.testing.assert_allclose(got[:150, :584].astype(jnp.float32), exact, rtol=6e-3)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("vocab_axis", "columns"), [(0, 192), (1, 64)])  # tiles reach beyond a part, or divide it
def test_dlogits_of_a_part_are_those_columns_of_the_whole(
    vocab_axis: int, columns: int, tiles: Any, interpreted: Any
) -> None:
    p = make_problem(Case((96, 64, 336), CAPPED, HEAD, axis=vocab_axis), weights=True)
    tiles(columns=columns)
    lse, coefficients = wanted(LSE, p)["lse"], all_coefficients(96)._replace(target=None, argmax=None)

    def run(head: Any, h: jax.Array, lse: jax.Array, first: Any, valid: Any) -> Any:
        block, gradient = MosaicBlock(head, Batch(h), None), Gradient(coefficients, lse)
        return block.dlogits(gradient), block.dlogits(gradient, Columns(first, 128, count=valid))

    for first, valid in ((0, 128), (128, 128), (256, 80)):
        whole, part = interpreted(run)(p.head, p.hidden, lse, jnp.int32(first), jnp.int32(valid))
        assert part.shape == (96, 128)
        np.testing.assert_array_equal(part[:, :valid], whole[:, first : first + valid])
