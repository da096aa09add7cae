"""Losses of stored logits by the Hopper kernels: under the interpreter against the oracle, and what they compile to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import cross_entropy, selective_log_softmax
from pallas_ce.backends import device as targets
from tests.pallas_ce.checks import assert_close, assert_exact_but_rounded, of_stored_logits, relative_error

FLOAT32, FLOAT16, BFLOAT16 = map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))
N, V = 8192, 131072
NAMED: Any = {"implementation": "mosaic_gpu"}


def logits_of(n: int, v: int, dtype: Any, offset: float = 0.0) -> np.ndarray:
    return (2 * np.random.default_rng(n).normal(size=(n, v)) + offset).astype(dtype)


OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing": 0.1, "z_loss": 0.01, "logit_softcap": 5.0, "vocab_size": 300},
    {"label_smoothing": 0.2, "class_weights": np.linspace(-0.5, 2, 336), "reduction": "sum"},
    {"token_weights": np.linspace(0, 2, 136).astype(np.float32), "normalizer": 7.0, "ignore_index": 3},
]


def check(n: int, v: int, dtype: Any, offset: float, options: dict[str, Any]) -> None:
    """The loss and its gradient; losses by row have a cotangent each."""
    labels = np.random.default_rng(1).integers(0, options.get("vocab_size", v), n)
    labels[::7] = -100
    cotangent = np.linspace(-1, 1, n).astype(np.float32) if options.get("reduction") == "none" else 1.0
    assert_exact_but_rounded(*of_stored_logits(logits_of(n, v, dtype, offset), labels, cotangent, **NAMED, **options))


@pytest.mark.nightly(keep=3)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("n", "v", "dtype", "offset", "options"),
    [
        *((136, 336, FLOAT32, 0.0, options) for options in OPTIONS),
        *((72, 208, dtype, offset, {}) for dtype, offset in ((BFLOAT16, 0.0), (FLOAT16, 64.0))),
        (64, 160, FLOAT32, 64.0, {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.01}),
    ],
)
def test_matches_the_oracle(n: int, v: int, dtype: Any, offset: float, options: dict[str, Any]) -> None:
    check(n, v, dtype, offset, options)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_selected_log_probabilities_and_their_gradient(dtype: Any, interpreted: Any) -> None:
    """One index lies outside the vocabulary: 0, and no gradient."""
    logits, rng = logits_of(136, 336, dtype, offset=100.0), np.random.default_rng(2)
    index, upstream = rng.integers(0, 336, 136), rng.normal(size=136)
    index[5] = 400

    def weighted(z: jax.Array) -> Any:
        found = selective_log_softmax(z, index, implementation="mosaic_gpu")
        return jnp.sum(found * upstream), found

    (_, found), gradient = interpreted(jax.value_and_grad(weighted, has_aux=True))(jnp.asarray(logits))
    wide = logits.astype(np.float64)
    log_p = wide - np.log(np.exp(wide - 100).sum(axis=1, keepdims=True)) - 100
    inside = index < 336
    picked = np.where(inside, log_p[np.arange(136), index % 336], 0)
    np.testing.assert_allclose(found, picked, rtol=1e-5, atol=2e-5)
    exact = np.where(inside, upstream, 0)[:, None] * (np.eye(336)[index % 336] - np.exp(log_p))
    assert gradient.dtype == dtype
    assert relative_error(np.asarray(gradient), exact) <= (1e-5 if dtype == np.float32 else 2.0**-8)


@pytest.mark.usefixtures("interpreted")
def test_rows_that_do_not_count_may_hold_anything_and_rows_of_minus_infinity_have_no_gradient() -> None:
    logits, labels = logits_of(64, 160, np.float32), np.where(np.arange(64) < 60, np.arange(64), -100)

    @jax.value_and_grad
    def run(logits: Any) -> Any:
        return cross_entropy(logits, labels, implementation="mosaic_gpu")

    plain = jax.jit(run)(logits)
    logits[60], logits[61], logits[62, ::2] = np.nan, np.inf, np.nan
    got = jax.jit(run)(logits)
    np.testing.assert_array_equal(got[0], plain[0])
    np.testing.assert_array_equal(got[1], plain[1])
    assert not got[1][60:].any()
    logits[5], logits[6, 10:] = -np.inf, -np.inf
    _, gradient = jax.jit(run)(logits)
    assert not gradient[5].any()
    assert not gradient[6, 10:].any()
    assert np.isfinite(gradient).all()


@pytest.mark.usefixtures("interpreted")
def test_metrics_and_values_alone(interpreted: Any) -> None:
    logits, labels = logits_of(64, 1600, BFLOAT16), np.arange(64)

    def loss(implementation: Any) -> Callable[[jax.Array], Any]:
        return lambda z: cross_entropy(z, labels, implementation=implementation, return_metrics=True)

    assert_close(interpreted(loss("mosaic_gpu"))(logits), jax.tree.map(np.asarray, loss("xla")(logits)), 1e-5)


def test_what_they_cannot_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H100")
    labels = jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match="one index for each row"):
        selective_log_softmax(jnp.zeros((8, 32)), jnp.zeros((8, 2), jnp.int32), implementation="mosaic_gpu")
    with pytest.raises(ValueError, match=r"rows in multiples of 8 and columns in multiples of 16.*\[N, 20\]; pad them"):
        cross_entropy(jnp.zeros((8, 20)), labels, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match=r"these logits are \[6, 48\]"):
        jax.eval_shape(lambda z: cross_entropy(z, labels[:6], implementation="mosaic_gpu"), jnp.zeros((6, 48)))
    with pytest.raises(ValueError, match="implementation='reference' does not serve materialized logits: choose"):
        cross_entropy(jnp.zeros((8, 32)), labels, implementation="reference")
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"not float64; use 'xla'"):
        cross_entropy(jnp.zeros((8, 32), jnp.float64), labels, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize(("n", "options"), [(1000, {}), *((136, options) for options in OPTIONS)])
def test_on_a_gpu_it_matches_the_oracle(n: int, dtype: Any, options: dict[str, Any]) -> None:
    check(n, 336, dtype, 0.0, options)


@pytest.mark.gpu
def test_on_a_gpu_a_large_array_has_the_gradient_of_the_softmax() -> None:
    """Checks every 500th row of a donated array of 2 GiB."""
    logits = jax.random.normal(jax.random.key(0), (N, V), jnp.bfloat16)
    labels = jax.random.randint(jax.random.key(1), (N,), 0, V)
    some = logits[::500].astype(jnp.float32)
    function = jax.value_and_grad(lambda z: cross_entropy(z, labels, implementation="mosaic_gpu"))
    loss, gradient = jax.jit(function, donate_argnums=0)(logits)
    exact = (jax.nn.softmax(some) - jax.nn.one_hot(labels[::500], V)) / N
    rounded = exact.astype(jnp.bfloat16)
    assert relative_error(gradient[::500], exact) <= 1.05 * relative_error(rounded, exact)
    assert abs(float(loss) - (np.log(V) + 0.5)) < 0.05  # of logits of variance 1; 9 standard errors of the mean
