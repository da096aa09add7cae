"""Inputs at the edge of the contract, through every backend and mode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import explain, linear_cross_entropy, linear_loss, linear_row_statistics
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, library_loss, library_results, oracle_results
from tests.pallas_ce.problems import STREAMED, WAYS, make

every_way = pytest.mark.parametrize(("implementation", "backward"), WAYS)
every_implementation = pytest.mark.parametrize("implementation", ["reference", "xla"])


@every_way
@pytest.mark.parametrize("scratch", [None, 40_000])
def test_small_logits_with_a_ragged_vocabulary(implementation: str, backward: Any, scratch: int | None) -> None:
    """Padding that leaked into the log-sum-exp would show here; a large maximum would hide it."""
    p = make(0, 19, 5, 1003, scale=1e-3)
    options = {} if implementation == "reference" else {"scratch_bytes": scratch}
    loss, gradients = library_results(p, implementation, backward, **options)
    want, want_gradients = oracle_results(p)
    assert abs(float(loss) - want) < 1e-6 * want
    assert_close(gradients, want_gradients, 1e-5)


@every_way
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_ignored_give_zero_and_zero_gradients(implementation: str, backward: Any, reduction: Any) -> None:
    p = make(0, 9, 4, 11)
    p.labels[:] = -100
    p.arrays["token_weights"] = np.ones(9, np.float32)
    p.options = {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": reduction}
    loss, gradients = library_results(p, implementation, backward)
    assert float(loss) == 0.0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(gradients))


@every_way
def test_zero_tokens(implementation: str, backward: Any) -> None:
    p = make(0, 0, 4, 11)
    loss, gradients = library_results(p, implementation, backward)
    assert float(loss) == 0.0
    assert gradients["hidden"].shape == (0, 4)
    assert np.all(np.asarray(gradients["weight"]) == 0)


@every_implementation
def test_zero_tokens_have_empty_statistics(implementation: str) -> None:
    found = linear_row_statistics(
        jnp.zeros((2, 0, 3)), jnp.zeros((5, 3)), statistics=("lse", "argmax"), implementation=implementation
    )
    assert found.lse is not None
    assert found.lse.shape == (2, 0)
    assert found.argmax is not None
    assert found.argmax.dtype == jnp.int32


@every_way
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint32, np.uint8])
def test_labels_outside_the_vocabulary_count_as_ignored(implementation: str, backward: Any, dtype: Any) -> None:
    p = make(0, 12, 4, 100)
    labels = np.array([99, 100, 0, 127, 5, 7] * 2).astype(dtype)  # the last column, V and beyond
    if np.issubdtype(dtype, np.signedinteger):
        labels[[2, 3]] = -1, -7
    p.labels = labels
    assert_close(library_results(p, implementation, backward), oracle_results(p), 1e-5)


def test_labels_beyond_two_to_the_31_do_not_wrap_into_the_vocabulary() -> None:
    p = make(0, 2, 4, 10)
    p.labels = np.array([3, 2**32 - 100], np.uint32)
    assert_close(library_results(p, "xla", "auto"), oracle_results(p), 1e-5)


@every_way
def test_an_ignore_index_inside_the_vocabulary(implementation: str, backward: Any) -> None:
    p = make(0, 20, 4, 6)
    p.options = {"ignore_index": 2}
    assert_close(library_results(p, implementation, backward), oracle_results(p), 1e-5)


@every_way
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_logits_of_ten_thousand(implementation: str, backward: Any, scale: float) -> None:
    p = make(0, 16, 8, 40)
    p.arrays["logit_scale"] = np.float32(scale)
    loss, gradients = library_results(p, implementation, backward)
    want, want_gradients = oracle_results(p)
    # Differences of logits near 1e4 carry 1e4·2^-24 of rounding each: absolute, hence 2e-3 in the probabilities.
    assert abs(float(loss) - want) < 1e-5 * want
    assert_close(gradients, want_gradients, 4e-3)


@every_implementation
def test_a_common_offset_of_256_changes_no_probability(implementation: str) -> None:
    p = make(0, 16, 8, 40)
    names = ("log_prob", "entropy", "sum_sq_probs")

    def total(hidden: Any, weight: Any, bias: Any) -> Any:
        found = linear_row_statistics(
            hidden, weight, p.labels, bias=bias, statistics=names, implementation=implementation
        )
        assert found.log_prob is not None
        assert found.entropy is not None
        assert found.sum_sq_probs is not None
        return jnp.sum(jnp.where(p.labels >= 0, found.log_prob, 0) + 0.3 * found.entropy + found.sum_sq_probs)

    run = jax.value_and_grad(total, argnums=(0, 1, 2))
    plain = run(p.arrays["hidden"], p.arrays["weight"], jnp.zeros(40))
    offset = run(p.arrays["hidden"], p.arrays["weight"], jnp.full(40, 256.0))
    # One unit in the last place of 256 is 3e-5; without cancellation nothing exceeds a few of them.
    assert_close(offset, jax.tree.map(np.asarray, plain), 1e-4)


def test_entropy_keeps_its_accuracy_at_an_offset_of_8192_across_tiles() -> None:
    """`Σ e^z z` would lose four digits here, be it within a tile or where tiles are merged."""
    rng = np.random.default_rng(0)
    # Multiples of 1/64, which are exact even at the offset.
    hidden, weight = (rng.integers(-8, 9, size=shape).astype(np.float32) / 8 for shape in ((16, 8), (200, 8)))
    names = ("entropy", "sum_sq_probs")
    found = linear_row_statistics(
        hidden, weight, bias=jnp.full(200, 8192.0), statistics=names, implementation="xla", scratch_bytes=5000
    )
    assert explain(hidden, weight, differentiate=(), implementation="xla", scratch_bytes=5000).columns < 100
    want, _ = oracle.statistics(oracle.Logits({"hidden": hidden, "weight": weight}), np.zeros(16, np.int32))
    assert_close(found.entropy, want["entropy"], 1e-6)
    assert_close(found.sum_sq_probs, want["sum_sq_probs"], 1e-6)


@every_way
def test_minus_infinity_bias_columns_take_no_probability_and_no_gradient(implementation: str, backward: Any) -> None:
    p = make(0, 14, 5, 30)
    dead = np.arange(30) % 7 == 3
    p.labels[p.labels >= 0] = 1
    p.arrays["bias"] = np.where(dead, -np.inf, 0.1).astype(np.float32)

    def row_loss(s: Any) -> Any:
        return -s.log_prob + 0.1 * s.entropy + s.sum_sq_probs + 0.01 * s.max_logit

    def loss(arrays: dict[str, Any]) -> Any:
        return linear_loss(row_loss, arrays["hidden"], arrays["weight"], p.labels, bias=arrays["bias"],
                           implementation=implementation, backward=backward)  # fmt: skip

    value, gradients = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, p.arrays))
    without = {k: (x if k == "hidden" else x[~dead]) for k, x in p.arrays.items()}
    want, want_gradients = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, without))
    assert_close(value, np.asarray(want), 1e-6)
    assert_close(gradients["hidden"], np.asarray(want_gradients["hidden"]), 1e-5)
    for name in ("weight", "bias"):
        assert np.all(np.asarray(gradients[name])[dead] == 0)
        assert_close(np.asarray(gradients[name])[~dead], np.asarray(want_gradients[name]), 1e-5)


@every_way
def test_smoothing_over_a_minus_infinity_column_is_infinite_unless_its_weight_is_zero(
    implementation: str, backward: Any
) -> None:
    p = make(0, 6, 5, 8)
    p.labels[:] = 1
    p.arrays["bias"] = np.array([0, 0, 0, -np.inf, 0, 0, 0, 0], np.float32)
    loss, gradients = library_results(p, implementation, backward, label_smoothing=0.1)
    assert float(loss) == np.inf
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))
    class_weights = np.ones(8, np.float32)
    class_weights[3] = 0.0
    loss, gradients = library_results(p, implementation, backward, label_smoothing=0.1, class_weights=class_weights)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((loss, gradients)))
    # A traced smoothing of 0 keeps the term in the program: 0·inf must still be 0.
    traced = jax.jit(lambda alpha: library_loss(p, p.arrays, implementation=implementation, label_smoothing=alpha))
    assert np.isfinite(traced(0.0))


@every_way
def test_a_minus_infinity_bias_under_a_soft_cap_is_minus_the_cap(implementation: str, backward: Any) -> None:
    p = make(0, 6, 5, 8)
    p.labels[:] = 1
    p.arrays["bias"] = np.array([0, 0, 0, -np.inf, 0, 0, 0, 0], np.float32)
    p.options = {"logit_softcap": 2.0}
    loss, gradients = library_results(p, implementation, backward)
    p.arrays["bias"][3] = -1e6
    want, want_gradients = oracle_results(p)
    assert_close((loss, gradients), (want, want_gradients), 1e-5)


@every_implementation
def test_a_row_of_minus_infinity_only_has_statistics_minus_infinity_or_zero(implementation: str) -> None:
    bias = jnp.full(6, -jnp.inf)
    names = ("lse", "entropy", "sum_sq_probs", "max_logit", "argmax")

    def run(hidden: Any, weight: Any) -> Any:
        found = linear_row_statistics(hidden, weight, bias=bias, statistics=names, implementation=implementation)
        assert found.entropy is not None
        assert found.sum_sq_probs is not None
        return jnp.sum(found.entropy + found.sum_sq_probs), found

    (_, found), gradients = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(jnp.ones((3, 2)), jnp.ones((6, 2)))
    for name, want in (("lse", -np.inf), ("max_logit", -np.inf), ("entropy", 0), ("sum_sq_probs", 0), ("argmax", 0)):
        np.testing.assert_array_equal(getattr(found, name), want, err_msg=name)
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


@every_way
def test_a_vocabulary_of_one_token_has_loss_zero(implementation: str, backward: Any) -> None:
    p = make(0, 5, 3, 1)
    loss, gradients = library_results(p, implementation, backward)
    assert float(loss) == 0.0
    assert all(np.all(np.abs(np.asarray(g)) < 1e-7) for g in jax.tree.leaves(gradients))


@every_way
def test_padding_of_the_weight_is_never_read(implementation: str, backward: Any) -> None:
    p = make(0, 21, 6, 50)
    p.labels[p.labels >= 40] = 3
    p.options = {"vocab_size": 40, "label_smoothing": 0.1}
    p.arrays["weight"][40:] = np.nan
    p.arrays["bias"] = np.full(50, np.nan, np.float32)
    p.arrays["bias"][:40] = 0.2
    loss, gradients = library_results(p, implementation, backward)
    assert np.isfinite(loss)
    assert np.all(np.asarray(gradients["weight"])[40:] == 0)
    assert np.all(np.asarray(gradients["bias"])[40:] == 0)
    assert np.all(np.isfinite(np.asarray(gradients["hidden"])))


@every_way
def test_ignored_rows_are_never_read(implementation: str, backward: Any) -> None:
    p = make(0, 40, 6, 50)
    clean = library_results(p, implementation, backward)
    ignored = p.labels == -100
    assert ignored.any()
    p.arrays["hidden"][ignored] = np.nan
    loss, gradients = library_results(p, implementation, backward)
    assert_close(loss, np.asarray(clean[0]), 1e-6)
    assert np.all(np.asarray(gradients["hidden"])[ignored] == 0)
    assert_close(gradients, jax.tree.map(np.asarray, clean[1]), 1e-6)


@every_way
def test_any_leading_shape_and_normalizer(implementation: str, backward: Any) -> None:
    p = make(0, 24, 6, 50)
    flat = library_results(p, implementation, backward, normalizer=7.0)
    p.arrays["hidden"], p.labels = p.arrays["hidden"].reshape(2, 3, 4, 6), p.labels.reshape(2, 3, 4)
    shaped = library_results(p, implementation, backward, normalizer=7.0)
    assert_close(shaped[0], np.asarray(flat[0]), 1e-6)
    np.testing.assert_allclose(shaped[1]["hidden"].reshape(24, 6), flat[1]["hidden"], atol=1e-7)
    single = linear_cross_entropy(p.arrays["hidden"][0, 0, 0], p.arrays["weight"], 3, implementation=implementation)
    assert single.shape == ()


def test_a_64_bit_host_label_does_not_wrap_into_the_vocabulary() -> None:
    p = make(0, 1, 6, 50)
    for label in (np.int64(2**32 + 3), np.array(2**32 + 3)):
        assert float(linear_cross_entropy(p.arrays["hidden"][0], p.arrays["weight"], label)) == 0.0


@pytest.mark.parametrize(("implementation", "backward"), STREAMED)
def test_repeated_calls_give_the_same_bits(implementation: str, backward: Any) -> None:
    p = make(0, 300, 16, 700)
    first = library_results(p, implementation, backward, scratch_bytes=400_000)
    second = library_results(p, implementation, backward, scratch_bytes=400_000)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


@every_implementation
def test_metrics_describe_the_call(implementation: str) -> None:
    p = make(0, 30, 6, 9)
    p.options = {"z_loss": 0.01, "label_smoothing": 0.1}
    p.arrays["token_weights"] = np.linspace(0.5, 2, 30).astype(np.float32)
    logits = p.arrays["hidden"] @ p.arrays["weight"].T
    counts = p.labels >= 0
    lse = np.log(np.exp(logits).sum(1))
    for reduction in ("mean", "sum", "none"):
        loss, metrics = library_loss(
            p, p.arrays, implementation=implementation, reduction=reduction, return_metrics=True
        )
        if reduction != "none":
            np.testing.assert_allclose(metrics.cross_entropy + metrics.z_loss, loss, rtol=1e-6)
        assert int(metrics.num_tokens) == counts.sum()
        np.testing.assert_allclose(metrics.accuracy, (logits.argmax(1) == p.labels)[counts].mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics.mean_lse, lse[counts].mean(), rtol=1e-5)
    gradient = jax.grad(lambda h: library_loss(p, {**p.arrays, "hidden": h}, return_metrics=True)[1].mean_lse)
    assert np.all(np.asarray(gradient(jnp.asarray(p.arrays["hidden"]))) == 0)
