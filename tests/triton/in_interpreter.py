"""The contract of every implementation, with implementation="triton" by the interpreter; `test_interpreted.py` runs it.

Other backends share the drawn problems and most tests.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_row_statistics
from pallas_ce.backends.triton import binding, configs
from pallas_ce.backends.triton.configs import Choice, Config
from tests.pallas_ce import (
    kernel_cases,
    spoilt,
    test_contract,
    test_distillation,
    test_edge_cases,
    test_every_function,
    test_not_finite,
)
from tests.pallas_ce.cases import CASES, DISTILLATIONS, Sizes
from tests.pallas_ce.checks import assert_near_oracle, call, library_results
from tests.pallas_ce.problems import LOGIT_OPTIONS, Problem, make, narrow_problems, problems
from tests.pallas_ce.sums import ANY_CALL, assert_any_options
from tests.triton import interpreted

MODES = ["in_forward", "recompute"]
TILES = {"pointers": interpreted.SMALL, "descriptors": interpreted.FLATTENED}
few = hypothesis.settings(
    max_examples=max(1, hypothesis.settings.default.max_examples // 4),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=TILES, autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[Config]:
    with pytest.MonkeyPatch.context() as patch:
        interpreted.install(patch, TILES[request.param])
        jax.clear_caches()
        yield TILES[request.param]


def in_turn(names: str, cases: Iterable[Any], nightly: Iterable[Any] = ()) -> pytest.MarkDecorator:
    """Parametrises a test by cases and more of the nightly run, each with one kind of tiles, in turn.

    Neighbours are one case in both modes, so the kinds change their order from pair to pair.
    """
    kinds = [*TILES, *reversed(TILES)]
    quick, every = ([(*case, kind) for case, kind in zip(x, itertools.cycle(kinds))] for x in (cases, nightly))
    return pytest.mark.parametrize(f"{names},tiles", kernel_cases.nightly_but_for(quick, every), indirect=["tiles"])


each_mode = in_turn("backward", zip(MODES))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, as they are."""
    names: list[str] = []
    launch = binding.call
    monkeypatch.setattr(binding, "call", lambda name, *a, **k: (names.append(name), launch(name, *a, **k))[1])
    return names


@each_mode
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(p=problems())
def test_loss_and_gradients_match_the_oracle(p: Problem, backward: Any) -> None:
    assert_near_oracle(p, library_results(p, "triton", backward))


@few
@hypothesis.given(p=narrow_problems([np.float16]), **ANY_CALL)
def test_any_options_in_float16(p: Problem, **how: Any) -> None:
    assert_any_options("triton", p, **how)


OF_OTHERS = [
    # K labels, temperatures of every kind, masked rows and a given u among them.
    (test_contract.test_statistics_and_any_cotangents_match_the_oracle, {}),
    (test_contract.test_a_summed_loss_of_any_statistics_matches_the_oracle, {"backward": "recompute"}),
    (test_distillation.test_parts_that_processes_hold_match_the_definition_in_float64, {}),
    (test_contract.test_a_summed_loss_of_any_statistics_matches_the_oracle, {"backward": "in_forward"}),
]


@pytest.mark.nightly(keep=2)
@in_turn("test,options", OF_OTHERS)
def test_what_is_drawn_for_every_backend(test: Any, options: dict[str, Any]) -> None:
    test(implementation="triton", **options)


@pytest.mark.nightly(keep=1)
def test_divergences_of_two_heads_match_the_definition(tiles: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of either head, masked rows and several blocks and parts among them; options make tiles narrower."""
    by_pointers = tiles._replace(descriptors=False)
    for name, value in (("NARROW", configs.NARROW), ("_EXACT", configs._EXACT)):
        plain = [Choice(x, 3, aligned=x.descriptors) for x in dict.fromkeys((tiles, by_pointers))]
        others = [choice._replace(config=choice.config._replace(columns=16), room=math.inf) for choice in plain]
        choices = (*plain, *others)
        monkeypatch.setattr(configs, name, dict.fromkeys(value, choices) if isinstance(value, dict) else choices)
    test_distillation.test_value_and_gradients_match_the_definition_in_float64(implementation="triton")


@pytest.mark.nightly(keep=1)
@in_turn("scratch_bytes,divergence", itertools.product([None, 60_000], DISTILLATIONS))
def test_stored_logits_are_as_accurate_as_half_of_their_bits_need(
    divergence: Any, scratch_bytes: int | None, launched: list[str]
) -> None:
    """Over blocks of rows and parts of the vocabulary; each head's are made once in the value, forward and backward."""
    sizes, options = (40, 16, 300), {"scratch_bytes": scratch_bytes, "implementation": "triton"}
    test_distillation.assert_as_accurate_as_stored(divergence, np.float16, sizes, **options)
    assert launched.count("head_kernel") == 6


@pytest.mark.nightly(keep=1)
@in_turn("side,divergence", itertools.product(["hidden", "teacher_hidden"], DISTILLATIONS))
def test_a_row_with_a_nan_is_nan_in_every_gradient(divergence: Any, side: str) -> None:
    test_not_finite.test_a_row_with_a_nan_is_nan_in_every_gradient_and_the_others_are_what_they_were(
        divergence, "triton", side
    )


# With pointers the first and the last, with descriptors the others.
QUICK = [
    ("wide tiles", "statistics"),
    ("every option", "in_forward"),
    ("parts of a shard", "recompute"),
    ("parts added to a sum", "recompute"),
]


@in_turn("name,mode", QUICK, nightly=kernel_cases.SMALL)
def test_the_loss_and_its_gradients(
    name: str, mode: Any, tiles: Config, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of parts are read and written in place where there are tiles for it, but for those added to a sum."""
    case = kernel_cases.CASES[name]._replace(dtype=kernel_cases.FLOAT16)
    kernel_cases.check(case, "triton", mode, monkeypatch)
    if case.tile is not None:
        products = 2 if tiles.descriptors and case.adds is None else 0
        assert launched.count("product_kernel") == products


@pytest.mark.nightly(keep=1)
def test_entries_of_minus_infinity_and_ties() -> None:
    """The lowest of equal logits is the argmax, also across tiles."""
    p = make(6, 5, 8, 70)
    p.arrays["weight"][[3, 40, 66]] = 100 * p.arrays["hidden"][0]
    found = call(linear_row_statistics, p, p.arrays, statistics=("argmax",), implementation="triton")
    assert found.argmax[0] == 3
    test_every_function.test_entries_of_minus_infinity_are_as_if_they_were_not_there("linear_row_statistics", "triton")
    test_every_function.test_rows_without_a_distribution_have_gradient_zero("linear_row_statistics", "triton")


@pytest.mark.nightly(keep=1)
@each_mode
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


OF_A_ROW = ("lse", "log_prob", "entropy", "argmax")


def few_digits(x: Any) -> Any:
    """Of 5 bits, so that products are exact: a CPU may sum in another order at another place of a tile."""
    step = 2.0 ** np.ceil(np.log2(np.abs(x).max() or 1)) / 32
    return (np.round(x / step) * step).astype(x.dtype)


@few
@hypothesis.given(p=problems(most=(40, 33, 130)) | narrow_problems([np.float16]), data=st.data())
def test_a_rows_statistics_are_the_same_bits_alone_in_any_batch_and_at_any_place(p: Problem, data: Any) -> None:
    """Of the head's options; some of the rows are masked."""
    arrays = {name: few_digits(x) if name in ("hidden", "weight", "up", "down") else x for name, x in p.arrays.items()}
    head = {name: x for name, x in arrays.items() if name not in ("hidden", "token_weights")}
    options = {name: x for name, x in p.options.items() if name in LOGIT_OPTIONS}

    @jax.jit
    def run(hidden: Any, labels: Any, counts: Any) -> Any:
        batch = dataclasses.replace(p, labels=labels, options=options)
        given = {"statistics": OF_A_ROW, "row_mask": counts, "implementation": "triton"}
        return call(linear_row_statistics, batch, {"hidden": hidden, **head}, **given)

    n = p.labels.size
    hidden, labels, all_count = arrays["hidden"], np.abs(p.labels) % 5, np.ones(n, bool)
    whole = run(hidden, labels, all_count)
    row = data.draw(st.integers(0, n - 1))
    masked = np.random.default_rng(row).random(n) < data.draw(st.sampled_from([0.2, 0.95]))
    masked[row] = True
    for places, counts in (
        (np.array([row]), all_count[:1]),
        (np.arange(n)[::-1], all_count),
        (np.arange(n), masked),
        (np.arange(3 * n) % n, np.tile(masked, 3)),
    ):
        some = run(hidden[places], labels[places], counts)
        for name in OF_A_ROW:
            found, want = (np.asarray(getattr(x, name)) for x in (some, whole))
            np.testing.assert_array_equal(found[counts], want[places][counts], err_msg=name)


SPOILT = [
    (name, ("triton", backward))
    for name in ("linear_cross_entropy", "linear_cross_entropy, low rank", "linear_row_statistics", "linear_loss")
    for backward in ([""] if name == "linear_row_statistics" else MODES)
] + [(f"linear_distillation, {divergence}", ("triton", "")) for divergence in DISTILLATIONS]


@in_turn("name,way", SPOILT)
@few
@hypothesis.given(seed=st.integers(0, 2**16), dtype=st.sampled_from(["float16", "float32"]))
def test_what_is_not_finite_is_where_plain_jax_has_it(name: str, way: Any, seed: int, dtype: str) -> None:
    s = Sizes(rows=20, width=8, classes=70, padded=72, scratch_bytes=None, dtype=dtype)
    spoilt.check(CASES[name], s, way, seed)


@each_mode
def test_a_capped_row_at_a_temperature_that_does_not_count_has_gradients_of_zero(backward: Any) -> None:
    test_edge_cases.assert_no_row_gives_gradients_of_zero("triton", backward, jnp.float16)
