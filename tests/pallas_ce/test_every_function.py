"""What every public function of a head promises: shapes, rows that do not count, vmap, memory, temperatures."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_ce.checks import assert_close, with_gradients
from tests.pallas_ce.functions import (
    BY_ROW,
    DISTILLATIONS,
    FUNCTIONS,
    LOSSES,
    SERVED,
    TEMPERED,
    by_row,
    floating,
    total,
)
from tests.pallas_ce.problems import make
from tests.pallas_ce.streamed import counted_rows, no_stored_logits

N, H, V = 12, 5, 31
P = make(0, N, H, V)
HIDDEN, WEIGHT, LABELS = jnp.asarray(P.arrays["hidden"]), jnp.asarray(P.arrays["weight"]), jnp.asarray(P.labels)
assert 0 < np.sum(P.labels < 0) < N

every_function = pytest.mark.parametrize("name", FUNCTIONS)


def _gradients(function: Any, hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    """All results, and the gradients of hidden states and weight."""
    return with_gradients(lambda head: function(*head, labels, **options), (hidden, weight), total)


@every_function
def test_any_leading_shape(name: str) -> None:
    function = by_row(name)
    flat = function(HIDDEN, WEIGHT, LABELS)
    shaped = function(HIDDEN.reshape(2, 3, 2, H), WEIGHT, LABELS.reshape(2, 3, 2))
    for x, y in zip(jax.tree.leaves(shaped), jax.tree.leaves(flat), strict=True):
        np.testing.assert_allclose(x, np.reshape(y, (2, 3, 2, *y.shape[1:])), rtol=1e-5, atol=1e-6)
    for leading in ((), (2, 0)):
        found = function(jnp.ones((*leading, H)), WEIGHT, jnp.zeros(leading, int))
        assert {x.shape[: len(leading)] for x in jax.tree.leaves(found)} == {leading}
        assert all(
            x.ndim - len(leading) == y.ndim - 1 for x, y in zip(*map(jax.tree.leaves, (found, flat)), strict=True)
        )


@every_function
def test_rows_that_do_not_count_may_hold_anything_and_get_nothing(name: str) -> None:
    counts = np.asarray(LABELS) >= 0
    bad = jnp.where(counts[:, None], HIDDEN, jnp.nan)
    tempered = {"temperature": jnp.where(counts, 0.7, jnp.nan)} if name in TEMPERED else {}
    got = _gradients(FUNCTIONS[name], bad, WEIGHT, LABELS, **tempered)
    clean = {"temperature": jnp.full(N, 0.7)} if name in TEMPERED else {}
    want = _gradients(FUNCTIONS[name], HIDDEN, WEIGHT, LABELS, **clean)
    assert_close(got, want, 1e-6)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(got))
    assert np.all(np.asarray(got[1][0])[~counts] == 0)
    none = jnp.where(jnp.arange(N) % 2, V if name in LOSSES else -1, -100)
    nothing = _gradients(FUNCTIONS[name], jnp.full_like(HIDDEN, jnp.nan), WEIGHT, none)
    assert not any(np.any(x) for x in floating(nothing))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith(("linear_sample", "linear_top_k"))])
def test_float64_is_served_in_float64(name: str) -> None:
    with jax.enable_x64(True):
        given = (jnp.asarray(x, jnp.float64) for x in (P.arrays["hidden"], P.arrays["weight"]))
        run = functools.partial(_gradients, FUNCTIONS[name], *given, LABELS)
        got, want = run(implementation="xla"), run(implementation="reference")
        assert {x.dtype for x in floating(got)} == {np.dtype(np.float64)}
        assert_close(got, want, 1e-11, floor=1e-11)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_have_loss_zero_and_no_gradient(name: str) -> None:
    value, (d_hidden, d_weight) = _gradients(FUNCTIONS[name], HIDDEN[:0], WEIGHT, LABELS[:0])
    assert value == 0
    assert d_hidden.shape == (0, H)
    assert not np.any(d_weight)


@every_function
def test_rows_that_do_not_count_cost_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "sampled_softmax":
        pytest.skip("it reads no tiles")
    hidden, weight = jnp.ones((64, 4)), jnp.ones((32, 4))
    with counted_rows(monkeypatch) as seen:

        @jax.jit
        def run(labels: Any) -> Any:
            return _gradients(FUNCTIONS[name], hidden, weight, labels, scratch_bytes=4000)

        def rows(counting: Any) -> int:
            seen.clear()
            jax.block_until_ready(run(jnp.where(counting, 1, -100)))
            jax.effects_barrier()
            return sum(seen)

        some, each, none = (rows(x) for x in (jnp.arange(64) // 8 == 1, jnp.ones(64, bool), jnp.zeros(64, bool)))
    assert none == 0 < 4 * some < each


every_way = pytest.mark.parametrize(
    ("name", "implementation"), [(name, x) for name in FUNCTIONS if name != "sampled_softmax" for x in SERVED[name]]
)


def _closed(name: str, implementation: Any, count: int) -> dict[str, Any]:
    """Options with which all entries from that one on have a bias of -inf, in little scratch."""
    bias = jnp.where(jnp.arange(V) < count, 0.0, -jnp.inf)
    options: dict[str, Any] = {"bias": bias, "scratch_bytes": 400}
    if implementation is not None:
        options["implementation"] = implementation
    if name in DISTILLATIONS:
        options["teacher_bias"] = bias
    if name == "linear_row_statistics":
        options["logit_weights"] = jnp.exp(bias) / max(count, 1)
    return options


@every_way
def test_entries_of_minus_infinity_are_as_if_they_were_not_there(name: str, implementation: Any) -> None:
    labels = jnp.where(LABELS < 17, LABELS, 3)
    got = _gradients(FUNCTIONS[name], HIDDEN, WEIGHT, labels, **_closed(name, implementation, 17))
    want = _gradients(FUNCTIONS[name], HIDDEN, WEIGHT, labels, vocab_size=17)
    assert_close(got, want, 1e-5, floor=1e-6)
    assert not np.any(got[1][1][17:])


@every_way
def test_rows_without_a_distribution_have_gradient_zero(name: str, implementation: Any) -> None:
    def summed(hidden: Any, weight: Any) -> Any:
        found = FUNCTIONS[name](hidden, weight, LABELS, **_closed(name, implementation, 0))
        return sum(jnp.sum(x) for x in floating(found))

    assert not any(np.any(gradient) for gradient in jax.jit(jax.grad(summed, (0, 1)))(HIDDEN, WEIGHT))


@pytest.mark.parametrize(
    "name", sorted(FUNCTIONS.keys() - LOSSES.keys() - {"linear_row_statistics", "linear_log_probs"})
)
def test_chosen_entries_are_constants(name: str) -> None:
    _, gradients = _gradients(FUNCTIONS[name], HIDDEN, WEIGHT, LABELS, temperature=0.5)
    assert not any(np.any(g) for g in gradients)


@every_function
def test_a_batch_of_sequences_streams_a_shared_weight_once(name: str) -> None:
    hidden, weights, labels = HIDDEN.reshape(3, 4, H), jnp.stack([WEIGHT, 2 * WEIGHT, -WEIGHT]), LABELS.reshape(3, 4)
    rows = {"temperature": jnp.linspace(0.5, 2, N).reshape(3, 4)} if name in TEMPERED else {}

    def one(hidden: Any, weight: Any, labels: Any, rows: Any) -> Any:
        return FUNCTIONS[name](hidden, weight, labels, **rows)

    for axis, of_example in ((None, lambda i: weights[0]), (0, lambda i: weights[i])):
        mapped = jax.jit(jax.vmap(one, (0, axis, 0, 0)))
        given = hidden, weights[0] if axis is None else weights, labels, rows
        if name != "sampled_softmax":
            assert (f"tensor<{N}x{V}xf32>" in mapped.lower(*given).as_text()) == (axis is None)
        want = [one(hidden[i], of_example(i), labels[i], jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(3)]
        got = mapped(*given)
        assert_close(got, jax.tree.map(lambda *x: np.stack(x), *want), 1e-5, floor=1e-6)


@every_function
def test_no_logits_are_stored(name: str) -> None:
    n, h, v = 8192, 64, 40_000
    run = FUNCTIONS[name] if name in BY_ROW else jax.grad(FUNCTIONS[name], (0, 1))
    shapes = ((n, h), jnp.float32), ((v, h), jnp.float32), ((n,), jnp.int32)
    # The losses that make their gradients in the forward have the logits of a block of rows, 512 MiB by default.
    limit = 640 if name in ("linear_cross_entropy", "linear_loss") else 160
    no_stored_logits(run, n, v, limit * 2**20, *shapes)


COLD, HOT = 1e-5, 1e30
# Logits of up to 1e4. One row's tie, so that its probabilities and slopes are of order 1.
LARGE = {
    "hidden": jax.random.normal(jax.random.key(1), (40, 16)).at[0].set(1.0) * 150,
    "weight": jax.random.normal(jax.random.key(2), (30, 16)).at[:3].set(4.16) * 1.0,
}
ROWS = jnp.arange(40) % 30


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


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("wrong", [0.99 * COLD, 1.01 * HOT, np.full(40, 1e-37), 10**400, float("inf")])
def test_temperatures_outside_their_range_are_refused_with_its_bounds(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature=\S+ must be a finite number .*1e-05, at most 1e\+30\)"):
        FUNCTIONS[name](LARGE["hidden"], LARGE["weight"], ROWS, temperature=wrong)


MODES = {
    mode: functools.partial(FUNCTIONS["linear_cross_entropy"], backward=mode) for mode in ("in_forward", "recompute")
}
REFERENCE = {"reference": functools.partial(FUNCTIONS["linear_cross_entropy"], implementation="reference")}


@pytest.mark.parametrize("name", FUNCTIONS | MODES | REFERENCE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nothing_of_ours_is_promoted_in_rank_or_dtype(name: str, dtype: Any) -> None:
    """A program may run under `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"`."""
    shape = (2, N // 2)
    options: dict[str, Any] = {"logit_softcap": 5.0, "scratch_bytes": 4096}
    if name in TEMPERED:
        options["temperature"] = jnp.linspace(0.5, 2.0, N).reshape(shape)
    if name in LOSSES or name not in FUNCTIONS:
        options["token_weights"] = jnp.ones(shape)
    if name in DISTILLATIONS:
        options["teacher_bias"] = jnp.ones(V)
    if name == "linear_cross_entropy" or name not in FUNCTIONS:
        options |= {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weights": jnp.ones(V), "return_metrics": True}
    if name in ("linear_row_statistics", "linear_loss"):
        options["logit_weights"] = jnp.ones(V) / V
    if name == "sampled_softmax":
        del options["logit_softcap"]

    def summed(arrays: dict[str, Any]) -> Any:
        return total((FUNCTIONS | MODES | REFERENCE)[name](labels=LABELS.reshape(shape), **arrays, **options))

    # The hidden states' dtype is the compute dtype beside a wider weight.
    arrays = {"hidden": HIDDEN.reshape(*shape, H).astype(dtype), "weight": WEIGHT, "bias": jnp.linspace(-1.0, 1.0, V),
              "logit_scale": jnp.float32(1.5)}  # fmt: skip
    options["dtype"] = dtype
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(dtype == jnp.bfloat16):
        jax.jit(jax.value_and_grad(summed)).lower(arrays)


@every_function
def test_no_tracer_outlives_its_trace(name: str) -> None:
    """JAX's leak check finds whatever a cache or a partitioner keeps of a call's arrays."""
    with jax.checking_leaks():
        jax.jit(lambda *arrays: _gradients(FUNCTIONS[name], *arrays)).lower(HIDDEN, WEIGHT, LABELS)
