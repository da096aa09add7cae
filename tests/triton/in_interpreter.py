"""The contract of every implementation, with implementation="triton" by the interpreter; `test_interpreted.py` runs it.

Other backends share the drawn problems and most tests.
"""

from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_row_statistics
from pallas_ce.backends.triton import backend, binding
from pallas_ce.backends.triton.configs import Config
from pallas_ce.head import Head
from pallas_ce.parallel.shards import Shards
from tests.pallas_ce import oracle, spoilt, test_contract
from tests.pallas_ce.cases import CASES, Sizes
from tests.pallas_ce.checks import (
    assert_near_oracle,
    call,
    library_results,
    relative_error,
)
from tests.pallas_ce.problems import Problem, make, narrow_problems, problems
from tests.pallas_ce.sums import ANY_CALL, assert_adds_16_bits, assert_any_options
from tests.triton import interpreted

MODES = ["recompute", "in_forward"]
both_modes = pytest.mark.parametrize("backward", MODES)
few = hypothesis.settings(
    max_examples=max(1, hypothesis.settings.default.max_examples // 4),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=[interpreted.SMALL, interpreted.FLATTENED], ids=["pointers", "descriptors"], autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[Config]:
    with pytest.MonkeyPatch.context() as patch:
        interpreted.install(patch, request.param)
        jax.clear_caches()
        yield request.param


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, as they are."""
    names: list[str] = []
    launch = binding.call
    monkeypatch.setattr(binding, "call", lambda name, *a, **k: (names.append(name), launch(name, *a, **k))[1])
    return names


@both_modes
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(p=problems())
def test_loss_and_gradients_match_the_oracle(p: Problem, backward: Any) -> None:
    assert_near_oracle(p, library_results(p, "triton", backward))


@few
@hypothesis.given(p=narrow_problems([np.float16]), **ANY_CALL)
def test_any_options_in_float16(p: Problem, **how: Any) -> None:
    assert_any_options("triton", p, **how)


@pytest.mark.nightly(keep=1)
def test_statistics_and_any_cotangents_match_the_oracle() -> None:
    """K labels, temperatures of every kind, masked rows and a given u among them."""
    test_contract.test_statistics_and_any_cotangents_match_the_oracle(implementation="triton")


@pytest.mark.nightly(keep=1)
@both_modes
def test_a_summed_loss_of_any_statistics_matches_the_oracle(backward: Any) -> None:
    test_contract.test_a_summed_loss_of_any_statistics_matches_the_oracle(implementation="triton", backward=backward)


@pytest.mark.nightly(keep=1)
@both_modes
def test_a_row_loss_on_every_statistic_and_its_row_inputs(backward: Any) -> None:
    test_contract.test_a_row_loss_on_every_statistic_and_its_row_inputs("triton", backward, False)


@pytest.mark.nightly(keep=2)
@both_modes
@pytest.mark.parametrize("axis", [0, 1])
def test_several_blocks_and_tiles_of_a_small_budget(backward: Any, axis: int) -> None:
    """Several blocks of rows and columns, the last starting early, and most rows ignored."""
    p = make(4, 90, 24, 200, vocab_axis=axis)
    p.arrays["bias"] = np.random.default_rng(0).normal(size=200).astype(np.float32)
    p.labels[20:70] = -100
    assert_near_oracle(p, library_results(p, "triton", backward, scratch_bytes=40_000))


@pytest.mark.nightly(keep=1)
def test_parts_of_the_vocabulary_are_added_to_a_sum(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """None is put in its place by the kernel that does so with a gradient's parts."""
    monkeypatch.setattr(backend, "_LEAST_COLUMNS", 256)
    p = make(8, 43, 48, 808)
    p.arrays = {name: x.astype(np.float16) for name, x in p.arrays.items()}
    options: dict[str, Any] = {"implementation": "triton", "scratch_bytes": 300 * 256 + 30_000}
    assert_adds_16_bits(p, -3.0, "recompute", narrow=False, **options)
    assert "product_kernel" not in launched


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_low_rank_terms_padding_may_hold_anything(
    tiles: Config, axis: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of the vocabulary, the last reaching beyond its end, where products are made in place."""
    monkeypatch.setattr(backend, "_LEAST_COLUMNS", 256)
    p, rng = make(8, 43, 48, 808, vocab_axis=axis), np.random.default_rng(0)
    p.arrays["up"], p.arrays["down"] = (0.3 * rng.normal(size=x).astype(np.float32) for x in ((808, 3), (3, 48)))
    p.options["vocab_size"] = 760
    want, exact = oracle.cross_entropy(p.arrays, p.labels, p.options)
    p.arrays["up"][760:] = np.nan
    loss, gradients = library_results(p, "triton", "recompute", dtype=jnp.float16, scratch_bytes=300 * 256 + 60_000)
    assert launched.count("product_kernel") == (2 if tiles.descriptors else 0)
    assert abs(float(loss) - want) <= 1e-3 * abs(want)
    for name, gradient in gradients.items():
        assert relative_error(gradient, exact[name]) <= 1e-2, name


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("ignored", "padding"), [(0, 0), (30, 0), (43, 0), (30, 3)])
def test_products_of_parts_of_the_vocabulary(
    tiles: Config, axis: int, ignored: int, padding: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four parts, the last with few columns of its own: read and written in place where there are tiles for it.

    The weight is wider than the products' operands. Rows that are ignored are nan, and so is a shard's padding.
    """
    monkeypatch.setattr(backend, "_LEAST_COLUMNS", 256)
    p = make(8, 43, 48, 808, vocab_axis=axis)
    if padding:
        as_shard(p, padding, monkeypatch)
    p.arrays["bias"] = np.random.default_rng(0).normal(size=808).astype(np.float32)
    p.labels[:ignored] = -100
    p.arrays["hidden"] = p.arrays["hidden"].astype(np.float16)
    p.arrays["hidden"][:ignored] = np.nan
    found = library_results(p, "triton", "recompute", dtype=jnp.float16, scratch_bytes=300 * 256 + 30_000)
    assert launched.count("product_kernel") == (2 if tiles.descriptors else 0)
    rounded = {**p.arrays, **{name: np.nan_to_num(p.arrays[name]).astype(np.float16) for name in ("hidden", "weight")}}
    want, exact = oracle.cross_entropy(rounded, p.labels, p.options)
    assert abs(float(found[0]) - want) <= 1e-5 * abs(want)
    for name, gradient in found[1].items():
        assert relative_error(gradient, exact[name]) <= float(np.finfo(np.float16).eps), name


@pytest.mark.nightly(keep=2)
@both_modes
def test_padding_of_a_shard_may_hold_anything(tiles: Config, backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make(9, 20, 16, 96)
    as_shard(p, 5, monkeypatch)
    (loss, gradients), rounded = library_results(p, "triton", backward), {**p.arrays}
    rounded["weight"] = np.nan_to_num(rounded["weight"])
    want, exact = oracle.cross_entropy(rounded, p.labels, p.options)
    assert abs(float(loss) - want) <= 1e-5 * abs(want)
    for name, gradient in gradients.items():
        assert relative_error(gradient, exact[name]) <= 1e-5, name


def as_shard(p: Problem, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entries become padding of nan, known at run time only, as it is to the shards of a vocabulary."""
    entered = Shards.enter

    def enter(self: Shards, rows: Any, head: Head) -> Any:
        rows, head = entered(self, rows, head)
        return rows, head.with_padding(head.spec.weight_rows)

    monkeypatch.setattr(Shards, "enter", enter)
    entries = len(p.arrays["weight"]) - padding
    p.labels, p.options = np.where(p.labels < 0, p.labels, p.labels % entries), {**p.options, "vocab_size": entries}
    p.arrays["weight"][entries:] = np.nan


@pytest.mark.nightly(keep=1)
def test_a_padded_vocabulary_of_minus_infinities_and_ties() -> None:
    """The lowest of equal logits is the argmax, also across tiles; a row of -inf only has lse -inf and gradient 0."""
    p = make(6, 5, 8, 70)
    p.arrays["weight"][[3, 40, 66]] = 100 * p.arrays["hidden"][0]
    p.arrays["bias"] = np.where(np.arange(70) < 2, -np.inf, 0.0).astype(np.float32)
    found = call(linear_row_statistics, p, p.arrays, statistics=("argmax", "lse"), implementation="triton")
    assert found.argmax[0] == 3

    def total(hidden: Any) -> Any:
        bias = jnp.full(70, -jnp.inf)
        options = {"bias": bias, "implementation": "triton", "statistics": ("lse", "entropy")}
        found = linear_row_statistics(hidden, p.arrays["weight"], **options)
        return jnp.sum(found.entropy), found.lse

    (_, lse), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(p.arrays["hidden"]))
    assert np.all(np.isneginf(lse))
    assert np.all(gradient == 0)


@pytest.mark.nightly(keep=2)
@both_modes
def test_the_same_inputs_give_the_same_bits_however_many_programs_share_the_tiles(
    tiles: Config, backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = make(7, 50, 16, 130)
    found = []
    for programs in (1, 5):
        interpreted.install(monkeypatch, tiles, programs)
        jax.clear_caches()
        found.append(jax.tree.map(np.asarray, library_results(p, "triton", backward)))
    assert all(map(np.array_equal, *map(jax.tree.leaves, found)))


SPOILT = [
    (name, ("triton", backward))
    for name in ("linear_cross_entropy", "linear_cross_entropy, low rank", "linear_row_statistics", "linear_loss")
    for backward in ([""] if name == "linear_row_statistics" else MODES)
]


@pytest.mark.parametrize(("name", "way"), SPOILT)
@few
@hypothesis.given(seed=st.integers(0, 2**16), dtype=st.sampled_from(["float16", "float32"]))
def test_what_is_not_finite_is_where_plain_jax_has_it(name: str, way: Any, seed: int, dtype: str) -> None:
    s = Sizes(rows=20, width=8, classes=70, padded=72, scratch_bytes=None, dtype=dtype)
    spoilt.check(CASES[name], s, way, seed)
