"""What every public function of a head promises: shapes, rows that do not count, vmap, memory, temperatures."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import LowRank
from tests.pallas_ce.cases import DISTILLATIONS, HEADS, LOSSES, SERVED, TEMPERED, by_row, floating, total
from tests.pallas_ce.checks import assert_close, relative_error
from tests.pallas_ce.problems import make
from tests.pallas_ce.streamed import counted_rows, no_stored_logits

N, H, V = 12, 5, 31
P = make(0, N, H, V)
HIDDEN, WEIGHT, LABELS = jnp.asarray(P.arrays["hidden"]), jnp.asarray(P.arrays["weight"]), jnp.asarray(P.labels)
FEW = jnp.asarray(np.where(P.labels < 17, P.labels, 3))
assert 0 < np.sum(P.labels < 0) < N

every_function = pytest.mark.parametrize("name", HEADS)


@functools.cache
def _compiled(name: str, **fixed: Any) -> Any:
    """All results, and the gradients of hidden states and weight, of cotangents that differ by row: one program."""

    @jax.jit
    def run(hidden: Any, weight: Any, labels: Any, **given: Any) -> Any:
        def weighted(head: Any) -> Any:
            found = HEADS[name](*head, labels, **fixed, **given)
            cotangents = ((x, jnp.sin(1 + jnp.arange(x.size, dtype=x.dtype))) for x in floating(found))
            return sum(jnp.sum(x.reshape(-1) * g) for x, g in cotangents), found

        return jax.grad(weighted, has_aux=True)((hidden, weight))[::-1]

    return run


@pytest.mark.nightly(keep=4)
@every_function
def test_any_leading_shape(name: str) -> None:
    function, shape = by_row(name), (2, 3, 2)
    flat = function(HIDDEN, WEIGHT, LABELS)
    shaped = function(HIDDEN.reshape(*shape, H), WEIGHT, LABELS.reshape(shape))
    for x, y in zip(jax.tree.leaves(shaped), jax.tree.leaves(flat), strict=True):
        np.testing.assert_allclose(x, np.reshape(y, (*shape, *y.shape[1:])), rtol=1e-5, atol=1e-6)
    for leading in ((), (2, 0)):
        found = function(jnp.ones((*leading, H)), WEIGHT, jnp.zeros(leading, int))
        for x, y in zip(*map(jax.tree.leaves, (found, flat)), strict=True):
            assert x.shape == (*leading, *y.shape[1:])


@pytest.mark.nightly(keep=6)
@every_function
def test_rows_that_do_not_count_may_hold_anything_and_get_nothing(name: str) -> None:
    counts, run = np.asarray(LABELS) >= 0, _compiled(name)
    bad = jnp.where(counts[:, None], HIDDEN, jnp.nan)
    tempered = {"temperature": jnp.where(counts, 0.7, jnp.nan)} if name in TEMPERED else {}
    got = run(bad, WEIGHT, LABELS, **tempered)
    clean = {"temperature": jnp.full(N, 0.7)} if name in TEMPERED else {}
    assert_close(got, run(HIDDEN, WEIGHT, LABELS, **clean), 1e-6)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(got))
    assert np.all(np.asarray(got[1][0])[~counts] == 0)
    none = jnp.where(jnp.arange(N) % 2, V if name in LOSSES else -1, -100)
    nothing = run(jnp.full_like(HIDDEN, jnp.nan), WEIGHT, none, **clean)
    assert not any(np.any(x) for x in floating(nothing))


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("name", [name for name in HEADS if not name.startswith(("linear_sample", "linear_top_k"))])
def test_float64_is_served_in_float64(name: str) -> None:
    with jax.enable_x64(True):
        given = [jnp.asarray(x, jnp.float64) for x in (P.arrays["hidden"], P.arrays["weight"])]
        got, want = (_compiled(name, implementation=x)(*given, LABELS) for x in ("xla", "reference"))
        assert {x.dtype for x in floating(got)} == {np.dtype(np.float64)}
        assert_close(got, want, 1e-11, floor=1e-11)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in LOSSES), ("linear_cross_entropy", {"backward": "recompute"}),
     ("linear_cross_entropy", {"reduction": "none"})],
)  # fmt: skip
def test_float16_keeps_gradients_that_are_tiny(name: str, options: dict[str, Any]) -> None:
    """Beside 1e-9 it holds nothing: coefficients are normalised before dlogits are rounded, and the arrays are wide."""
    head = tuple(x.astype(jnp.float16).astype(jnp.float32) for x in (HIDDEN, WEIGHT))
    by_row = "reduction" in options

    def loss(head: Any, **how: Any) -> Any:
        found = HEADS[name](*head, LABELS, **options, **({} if by_row else {"normalizer": 1e9}), **how)
        return jnp.sum(found) * (1e-9 if by_row else 1.0)

    got, want = (jax.jit(jax.grad(functools.partial(loss, **how)))(head) for how in ({"dtype": jnp.float16}, {}))
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < 2e-3


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_have_loss_zero_and_no_gradient(name: str) -> None:
    value, (d_hidden, d_weight) = _compiled(name)(HIDDEN[:0], WEIGHT, LABELS[:0])
    assert value == 0
    assert d_hidden.shape == (0, H)
    assert not np.any(d_weight)


@pytest.mark.nightly(keep=6)
@every_function
def test_rows_that_do_not_count_cost_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "sampled_softmax":
        pytest.skip("it reads no tiles")
    hidden, weight = jnp.ones((64, 4)), jnp.ones((32, 4))
    with counted_rows(monkeypatch) as seen:
        run = _compiled.__wrapped__(name, scratch_bytes=4000)

        def rows(counting: Any) -> int:
            seen.clear()
            jax.block_until_ready(run(hidden, weight, jnp.where(counting, 1, -100)))
            jax.effects_barrier()
            return sum(seen)

        some, each, none = (rows(x) for x in (jnp.arange(64) // 8 == 1, jnp.ones(64, bool), jnp.zeros(64, bool)))
    assert none == 0 < 4 * some < each


every_way = pytest.mark.parametrize(
    ("name", "implementation"), [(name, x) for name in HEADS if name != "sampled_softmax" for x in SERVED[name]]
)


def _closed(name: str, implementation: Any, count: int, *sides: str) -> Any:
    """Results and gradients where all entries from that one on have a bias of -inf, in little scratch."""
    bias = jnp.where(jnp.arange(V) < count, 0.0, -jnp.inf)
    sides = sides or (("bias", "teacher_bias") if name in DISTILLATIONS else ("bias",))
    options: dict[str, Any] = dict.fromkeys(sides, bias)
    if name == "linear_row_statistics":
        options["logit_weights"] = jnp.exp(bias) / max(count, 1)
    chosen = {} if implementation is None else {"implementation": implementation}
    scratch = None if implementation == "triton" else 400
    return _compiled(name, scratch_bytes=scratch, **chosen)(HIDDEN, WEIGHT, FEW, **options)


@pytest.mark.nightly(keep=5)
@every_way
def test_entries_of_minus_infinity_are_as_if_they_were_not_there(name: str, implementation: Any) -> None:
    found, gradients = _closed(name, implementation, 17)
    assert_close((found, gradients), _compiled(name, vocab_size=17)(HIDDEN, WEIGHT, FEW), 1e-5, floor=1e-6)
    assert not np.any(gradients[1][17:])


@pytest.mark.nightly(keep=5)
@every_way
def test_rows_without_a_distribution_have_gradient_zero(name: str, implementation: Any) -> None:
    found, gradients = _closed(name, implementation, 0)
    assert not any(np.any(gradient) for gradient in gradients)
    if name == "linear_row_statistics":
        for field, want in {"lse": -np.inf, "max_logit": -np.inf, "argmax": 0, "entropy": 0, "varentropy": 0}.items():
            np.testing.assert_array_equal(getattr(found, field), np.where(FEW < 0, 0, want), err_msg=field)


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("name", "side", "count", "want"),
    [
        ("forward_kl", "bias", 17, np.inf),
        ("reverse_kl", "teacher_bias", 17, np.inf),
        *((name, side, 0, 0.0) for name in DISTILLATIONS for side in ("bias", "teacher_bias")),
    ],
)
def test_an_infinite_divergence_and_a_head_without_a_distribution_have_no_gradient(
    name: str, side: str, count: int, want: float, implementation: str
) -> None:
    found, gradients = _closed(name, implementation, count, side)
    assert found == want
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize("name", ["linear_top_k", "linear_sample", "linear_sample of the 3 largest"])
def test_chosen_entries_are_constants(name: str) -> None:
    _, gradients = _compiled(name)(HIDDEN, WEIGHT, LABELS, temperature=jnp.full(N, 0.5))
    assert not any(np.any(g) for g in gradients)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("name", ["linear_top_k", "linear_sample", "linear_sample of the 3 largest", "sampled_softmax"])
def test_functions_that_choose_or_draw_entries_take_a_low_rank_term(name: str, vocab_axis: int) -> None:
    """The drawn problems of the other functions have one, too."""
    term = WEIGHT, make(1, N, 2, V).arrays["weight"], make(2, N, H, 2).arrays["weight"]
    merged = WEIGHT + 0.7 * term[1] @ term[2]
    weights = [LowRank(*term, 0.7), merged] if vocab_axis == 0 else [LowRank(*(x.T for x in term), 0.7), merged.T]
    for implementation in SERVED[name]:
        options = {"vocab_axis": vocab_axis} | ({} if implementation is None else {"implementation": implementation})
        got, want = (HEADS[name](HIDDEN, weight, LABELS, **options) for weight in weights)
        assert_close(got, want, 1e-5, floor=1e-5)


@pytest.mark.nightly(keep=3)
@every_function
def test_a_batch_of_sequences_streams_a_shared_weight_once(name: str) -> None:
    hidden, weights, labels = HIDDEN.reshape(3, 4, H), jnp.stack([WEIGHT, 2 * WEIGHT, -WEIGHT]), LABELS.reshape(3, 4)
    rows = {"temperature": jnp.linspace(0.5, 2, N).reshape(3, 4)} if name in TEMPERED else {}

    def one(hidden: Any, weight: Any, labels: Any, rows: Any) -> Any:
        return HEADS[name](hidden, weight, labels, **rows)

    alone = jax.jit(one)
    for axis, of_example in ((None, lambda i: weights[0]), (0, lambda i: weights[i])):
        mapped = jax.jit(jax.vmap(one, (0, axis, 0, 0)))
        given = hidden, weights[0] if axis is None else weights, labels, rows
        if name != "sampled_softmax":
            assert (f"tensor<{N}x{V}xf32>" in mapped.lower(*given).as_text()) == (axis is None)
        want = [alone(hidden[i], of_example(i), labels[i], jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(3)]
        assert_close(mapped(*given), jax.tree.map(lambda *x: np.stack(x), *want), 1e-5, floor=1e-6)


@pytest.mark.nightly(keep=5)
@every_function
def test_no_logits_are_stored(name: str) -> None:
    """Of results and gradients."""
    n, h, v = 8192, 64, 40_000
    run = jax.value_and_grad(lambda *given: total(HEADS[name](*given)), (0, 1))
    shapes = ((n, h), jnp.float32), ((v, h), jnp.float32), ((n,), jnp.int32)
    # The losses that make their gradients in the forward have the logits of a block of rows, 512 MiB by default.
    limit = 640 if name in ("linear_cross_entropy", "linear_loss") else 160
    no_stored_logits(run, n, v, limit * 2**20, *shapes)


COLD, HOT = 1e-5, 1e30
# Logits of up to 1e4. One row's tie, so that its probabilities and slopes are of order 1.
LARGE = {name: np.float32(x) for name, x in make(1, 40, 16, 30).arrays.items()}
LARGE["hidden"][0], LARGE["weight"][:3] = 1.0, 1.04
LARGE["hidden"] *= 600
ROWS = np.arange(40) % 30


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", TEMPERED)
def test_values_and_gradients_stay_finite_at_the_ends_of_the_temperatures_range(name: str) -> None:
    @functools.partial(jax.grad, has_aux=True)
    def gradients(arrays: dict[str, jax.Array], temperature: Any, **options: Any) -> Any:
        found = floating(by_row(name)(arrays["hidden"], arrays["weight"], ROWS, temperature=temperature, **options))
        return sum(jnp.sum(x * 1e-3) for x in found), found

    assert np.abs(LARGE["hidden"] @ LARGE["weight"].T).max() == pytest.approx(1e4, rel=0.01)
    of_rows = jax.jit(functools.partial(gradients, logit_softcap=30.0))
    for temperature in (COLD, HOT):
        of_number = jax.jit(functools.partial(gradients, temperature=temperature))
        for x in jax.tree.leaves((of_number(LARGE), of_rows(LARGE, jnp.full(40, temperature)))):
            assert np.isfinite(x).all()
        by_row(name)(LARGE["hidden"], LARGE["weight"], ROWS, temperature=np.full(40, temperature, np.float32))


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("wrong", [0.99 * COLD, np.full(40, 1.01 * HOT), 10**400])
def test_temperatures_outside_their_range_are_refused_with_its_bounds(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature=\S+ must be .*between 1e-05 and 1e\+30"):
        HEADS[name](LARGE["hidden"], LARGE["weight"], ROWS, temperature=wrong)


def test_a_narrow_temperature_is_no_overflow() -> None:
    wide = HEADS["linear_log_probs"](LARGE["hidden"], LARGE["weight"], ROWS, temperature=np.full(40, 1.5))
    narrow = HEADS["linear_log_probs"](LARGE["hidden"], LARGE["weight"], ROWS, temperature=np.full(40, 1.5, np.float16))
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


@pytest.mark.nightly(keep=1)
@every_function
def test_no_tracer_outlives_its_trace(name: str) -> None:
    """JAX's leak check finds whatever a cache or a partitioner keeps of a call's arrays."""
    with jax.checking_leaks():
        _compiled.__wrapped__(name).lower(HIDDEN, WEIGHT, LABELS)
