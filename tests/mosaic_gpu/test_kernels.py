"""Each kernel against plain arithmetic, under the GPU interpreter with race detection."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import entries, reference
from pallas_ce.backends.mosaic_gpu.gemm import layouts
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, operands
from pallas_ce.head import Batch
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import finalise, from_reference
from pallas_ce.statistics.table import PRIMITIVES
from pallas_ce.streaming.tiles import Columns
from tests.mosaic_gpu.conftest import Problem, logits_of, make_problem

EVERY = frozenset(PRIMITIVES)
LOSS = frozenset({"lse", "target_logit"})
LSE = frozenset({"lse"})

ALL_OPTIONS: dict[str, Any] = {"bias": True, "scale": 1.3, "weights": True, "softcap": 5.0}

# Every option, layout, schedule and ragged edge at least once.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 96, "h": 64, "v": 192}, {}),
    ({"n": 96, "h": 64, "v": 192, "vocab_axis": 1}, {"stages": 4}),
    ({"n": 150, "h": 80, "v": 248, **ALL_OPTIONS}, {"row_group": 1}),
    ({"n": 70, "h": 144, "v": 333, "rows": 352, "vocab_axis": 1, **ALL_OPTIONS}, {"sms": 3}),
    ({"n": 70, "h": 80, "v": 200, "rows": 232, "bias": True}, {"columns": 128, "piece": 64}),
    ({"n": 70, "h": 80, "v": 264, "dtype": jnp.float16, "scale": 0.7}, {"columns": 192}),
    ({"n": 9, "h": 16, "v": 5, "rows": 16, "vocab_axis": 1, "softcap": 3.0}, {"rows": 128}),
    ({"n": 129, "h": 64, "v": 320, "weights": True}, {"row_group": 1, "stages": 2}),
    ({"n": 9, "h": 16, "v": 5, "rows": 8, "bias": True}, {}),
    ({"n": 400, "h": 272, "v": 328, "scale": -1.3}, {"row_group": 2, "columns": 128}),
    ({"n": 150, "h": 80, "v": 584, **ALL_OPTIONS}, {"columns": 128, "piece": 64, "sms": 7}),
    ({"n": 300, "h": 336, "v": 640, "vocab_axis": 1}, {"rows": 128, "columns": 192, "piece": 64, "row_group": 2}),
]


@pytest.fixture(params=CASES)
def p(request: pytest.FixtureRequest, tiles: Any) -> Problem:
    problem, config = request.param
    tiles(**config)
    return make_problem(**problem)


def all_coefficients(n: int) -> coef.Coefficients:
    """Each term's coefficient; the entropy is no row's, which the formula need not know."""
    keys = jax.random.split(jax.random.key(3), len(coef.Coefficients._fields))
    return coef.Coefficients(*(jax.random.normal(key, (n,)) for key in keys))


def wanted(names: frozenset[str], p: Problem) -> Any:
    return reference.row_statistics(names, Batch(p.hidden, p.labels), p.head, None)


def assert_statistics(partial: Any, want: Any, names: frozenset[str], p: Problem) -> Any:
    """Returns them, as they are when the targets' logits have been added."""
    got = finalise(entries.with_targets(partial, p.head, Batch(p.hidden, p.labels), names), names)
    for name in names - {"argmax"}:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-4, err_msg=name)
    return got


def assert_stored(stored: Any, exact: Any, atol: float) -> None:
    """As far apart as rounding to the stored dtype brings them."""
    n, v = exact.shape
    resolution = 2.0**-8 if stored.dtype == jnp.bfloat16 else 2.0**-10
    np.testing.assert_allclose(stored[:n, :v].astype(jnp.float32), exact, rtol=1.5 * resolution, atol=atol)


@pytest.mark.nightly(keep=4)
def test_statistics(p: Problem, interpreted: Any) -> None:
    partial = interpreted(lambda head, h: forward_kernel.statistics(head, h, EVERY))(p.head, p.hidden)
    assert partial.target_logit is None
    got = assert_statistics(partial, wanted(EVERY, p), EVERY, p)
    z = logits_of(p)
    chosen = jnp.take_along_axis(z, got["argmax"][:, None], axis=1)[:, 0]
    np.testing.assert_allclose(chosen, z.max(axis=1), rtol=1e-5, atol=1e-5)


def test_offsets_and_large_logits_lose_nothing(interpreted: Any) -> None:
    plain = make_problem(64, 64, 192)
    run = interpreted(lambda head, h: forward_kernel.statistics(head, h, LSE))
    for scale, offset in ((1.0, 256.0), (300.0, 0.0)):
        head = dataclasses.replace(plain.head, bias=jnp.full(192, offset / scale), logit_scale=jnp.float32(scale))
        p = dataclasses.replace(plain, head=head)
        np.testing.assert_allclose(finalise(run(head, p.hidden), LSE)["lse"], wanted(LSE, p)["lse"], rtol=1e-6)


def test_rows_that_are_not_live_are_skipped(interpreted: Any) -> None:
    p = make_problem(512, 64, 192)

    def lse(head: Any, h: jax.Array, valid: jax.Array) -> jax.Array:
        partial = forward_kernel.statistics(head, h, LSE, valid_rows=valid)
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
    p = make_problem(300, 64, 584)

    def run(budget: int, valid: int) -> Any:
        def statistics(head: Any, h: jax.Array, valid: jax.Array) -> Any:
            return forward_kernel.statistics(head, h, LSE, budget, valid)

        return jax.tree.map(lambda x: x[:valid], interpreted(statistics)(p.head, p.hidden, jnp.int32(valid)))

    for valid in (300, 130):
        jax.tree.map(np.testing.assert_array_equal, run(4 * 2 * 10 * 128, valid), run(2**20, valid))


@pytest.mark.nightly(keep=4)
def test_stash(p: Problem, interpreted: Any) -> None:
    want = wanted(EVERY, p)
    e = want["lse"] - 1.5
    names = LOSS if p.head.bias is None else EVERY

    def run(head: Any, h: jax.Array, e: jax.Array) -> Any:
        partial, stored = forward_kernel.stash(head, h, e, names)
        return partial(), stored

    partial, stored = interpreted(run)(p.head, p.hidden, e)
    assert stored.dtype == p.head.spec.dtype
    assert_stored(stored, jnp.exp(logits_of(p) - e[:, None]), 1e-6)
    assert_statistics(from_reference(partial, e), want, names, p)


@pytest.mark.nightly(keep=4)
def test_dlogits(p: Problem, interpreted: Any) -> None:
    n, v, spec = p.hidden.shape[0], p.head.spec.vocab_size, p.head.spec
    lse, coefficients = wanted(LSE, p)["lse"], entries.without(all_coefficients(n))
    if p.head.logit_weights is None:
        coefficients = coef.Coefficients(coefficients.prob)
    stored = interpreted(dlogits_kernel.dlogits)(p.head, p.hidden, lse, coefficients)
    u = None if coefficients.logit_weights is None else p.head.tile_logit_weights(0, v)
    exact = coef.dlogits(coefficients, logits_of(p), lse, jnp.arange(v), None, None, None, u, spec.softcap)
    assert_stored(stored, exact, 2e-5)
    assert not stored[:n, v:].any()


def test_every_number_is_stored_once(monkeypatch: pytest.MonkeyPatch, tiles: Any, interpreted: Any) -> None:
    """Shown by adding in place of storing: nothing may be written twice, even if it is right in the end."""
    monkeypatch.setattr(layouts, "store_piece", functools.partial(layouts.store_piece, add=True))
    p = make_problem(n=150, h=272, v=584)
    tiles(columns=128, piece=64)
    lse = jnp.zeros(150)  # so that a product of 0 would store 1

    def run(head: Any, h: jax.Array, lse: jax.Array) -> jax.Array:
        zeros = jnp.zeros(operands.stored_shape(150, 584), h.dtype)
        return dlogits_kernel.dlogits(head, h, lse, coef.Coefficients(prob=jnp.ones(150)), into=zeros)

    got = interpreted(run)(p.head, p.hidden, lse)
    exact = jnp.exp(logits_of(p))
    np.testing.assert_allclose(got[:150, :584].astype(jnp.float32), exact, rtol=6e-3)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("columns", [64, 192])  # tiles that divide a part, and that reach beyond one
def test_dlogits_of_a_part_are_those_columns_of_the_whole(
    vocab_axis: int, columns: int, tiles: Any, interpreted: Any
) -> None:
    p = make_problem(96, 64, 336, vocab_axis=vocab_axis, **ALL_OPTIONS)
    tiles(columns=columns)
    lse, coefficients = wanted(LSE, p)["lse"], entries.without(all_coefficients(96))

    def run(head: Any, h: jax.Array, lse: jax.Array, first: Any, valid: Any) -> Any:
        whole = dlogits_kernel.dlogits(head, h, lse, coefficients)
        part = Columns(first, 128, count=valid)
        return whole, dlogits_kernel.dlogits(head, h, lse, coefficients, part=part)

    for first, valid in ((0, 128), (128, 128), (256, 80)):
        whole, part = interpreted(run)(p.head, p.hidden, lse, jnp.int32(first), jnp.int32(valid))
        assert part.shape == (96, 128)
        np.testing.assert_array_equal(part[:, :valid], whole[:, first : first + valid])
