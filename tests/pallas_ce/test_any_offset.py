"""A common offset of a row's logits changes no loss and no gradient by more than `F.cross_entropy` lets it."""

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_ce as P
from tests.pallas_ce import oracle, plain

N, V, H = 10, 1003, 8
LABELS = (np.arange(N) * 7 % V).astype(np.int32)
SEVERAL = np.stack([LABELS, LABELS[::-1], (LABELS * 5 + 1) % V], axis=1)
OFFSETS = st.one_of(st.sampled_from([0.0, 1.0, 1e2, 1e3, 1e4, 1e5, 1e6, -1e5, -1e6]), st.integers(0, 10**6).map(float))
CLASSES = np.linspace(0.5, 2.0, V).astype(np.float32)
# By name, labels and options of the loss; K labels have log-probabilities.
LOSSES: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "plain": (LABELS, {}),
    "smoothing": (LABELS, {"label_smoothing": 0.1}),
    "class weights": (LABELS, {"class_weights": CLASSES}),
    "smoothing, class weights": (LABELS, {"label_smoothing": 0.1, "class_weights": CLASSES}),
    "K labels": (SEVERAL, {}),
}
Rows = Callable[..., Any]
KERNELS = ("triton",)  # in float32, which the others for a GPU do not serve


def shifted(z: Any, labels: Any, **options: Any) -> Any:
    """As `F.cross_entropy`: the maximum is subtracted, then the logarithm of the sum."""
    z, lse_of = z - jax.lax.stop_gradient(jnp.max(z, axis=1, keepdims=True)), plain.FORMS["logsumexp"]
    if labels.ndim == 2:
        return plain.at_labels(z, labels) - lse_of(z)[:, None]
    return plain.cross_entropy(z, jnp.asarray(labels), options, slice(None), lse_of, "none")


def stored(z: Any, labels: Any, **options: Any) -> Any:
    """By the functions of stored logits."""
    if labels.ndim == 2:
        return P.selective_log_softmax(z.reshape(2, -1, V), labels.reshape(2, -1, labels.shape[1])).reshape(N, -1)
    return P.cross_entropy(z, labels, reduction="none", **options)


def chunked(z: Any, labels: Any, **options: Any) -> Any:
    """In chunks of three rows."""
    return P.chunked_cross_entropy(z, labels, 3, reduction="none", **options)


def streamed(bias: Any, hidden: Any, weight: Any, labels: Any, *, implementation: Any, **options: Any) -> Any:
    """In tiles."""
    head = {"bias": bias, "implementation": implementation, "scratch_bytes": 20_000}
    if labels.ndim == 2:
        return P.linear_log_probs(hidden, weight, labels, **head)
    return P.linear_cross_entropy(hidden, weight, labels, reduction="none", **head, **options)


def in_forward(bias: Any, hidden: Any, weight: Any, labels: Any, *, implementation: Any, **options: Any) -> Any:
    """The sum over the number of rows, whose gradients are made in the forward."""
    head = {"bias": bias, "implementation": implementation, "backward": "in_forward"}
    return P.linear_cross_entropy(hidden, weight, labels, normalizer=N, **head, **options)


def of_head(bias: Any, hidden: Any, weight: Any, labels: Any, *, whole: bool, **options: Any) -> Any:
    """Plain, of a head."""
    rows = shifted(hidden.astype(bias.dtype) @ weight.T.astype(bias.dtype) + bias, labels, **options)
    return jnp.sum(rows) / N if whole else rows


@functools.cache
def compiled(function: Rows, name: str, **fixed: Any) -> Any:
    """Losses, and the gradient of their sum, each row's times another number, with respect to the first array."""
    labels, options = LOSSES[name]

    def total(x: Any, *arrays: Any) -> Any:
        found = function(x, *arrays, labels, **fixed, **options)
        factors = jnp.linspace(0.5, 1.5, N, dtype=found.dtype).reshape(-1, *[1] * (found.ndim - 1))
        return jnp.sum(found * factors if found.ndim else found), found

    return jax.jit(jax.grad(total, has_aux=True))


def assert_as_plain(ours: Any, plainly: Any, x: np.ndarray, *arrays: np.ndarray) -> None:
    """Losses and gradients err by no more than the plain function's in float32, 1e-6 and a unit in the last place.

    A gradient of 16 bits is rounded; in float64 there is no error to speak of.
    """
    wide = x.dtype == np.float64
    with jax.enable_x64(wide):
        got = ours(x, *arrays)
    baseline = plainly(x.astype(np.float32), *arrays)
    with jax.enable_x64(True):
        want = plainly(x.astype(np.float64), *arrays)
    for what, dtype, *results in zip(
        ("gradients", "losses"), (x.dtype, np.dtype(np.float64 if wide else np.float32)), got, baseline, want,
        strict=True,
    ):  # fmt: skip
        found, float32, right = (np.asarray(y, np.float64) for y in results)
        assert (results[0].dtype, results[2].dtype) == (dtype, np.float64)
        error, allowed = np.max(np.abs(found - right)), np.max(np.abs(float32 - right)) + 1e-6
        allowed += np.spacing(np.float32(np.max(np.abs(right))))  # 1e-6 itself where losses are 8 to 16
        if dtype.itemsize == 2:
            allowed += np.max(np.abs(right.astype(dtype).astype(np.float64) - right))
        assert error <= (1e-8 if wide else allowed), f"{what}: {error}, where plain JAX's and 1e-6 are {allowed}"


def exact(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and a weight whose logits are multiples of 1/16: exact in float32 at any offset below 2^20."""
    rng = np.random.default_rng(seed)
    shapes = (N, H), (V, H)
    return tuple(rng.integers(-4, 5, size=shape).astype(np.float32) / 4 for shape in shapes)  # type: ignore[return-value]


STREAMED = [
    pytest.param(function, implementation, name, marks=[pytest.mark.gpu] if implementation in KERNELS else [])
    for function in (streamed, in_forward)
    for implementation in ("xla", "reference", *KERNELS)
    for name in LOSSES
    if function is streamed or not (implementation == "reference" or name == "K labels")
]


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize(
    ("function", "name", "dtype"),
    [
        *((stored, name, np.float32) for name in LOSSES),
        *((stored, "K labels", dtype) for dtype in (ml_dtypes.bfloat16, np.float16, np.float64)),
        *((chunked, name, np.float32) for name in LOSSES if name != "K labels"),
    ],
)
@hypothesis.example(offset=1e5, seed=0)
@hypothesis.given(offset=OFFSETS, seed=st.integers(0, 99))
def test_stored_logits_at_any_offset(function: Rows, name: str, dtype: Any, offset: float, seed: int) -> None:
    offset = np.clip(offset, -6e4, 6e4) if dtype == np.float16 else offset
    z = (np.random.default_rng(seed).normal(size=(N, V)) * 3 + offset).astype(dtype)
    assert_as_plain(compiled(function, name), compiled(shifted, name), z)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(("function", "implementation", "name"), STREAMED)
@hypothesis.given(offset=OFFSETS, seed=st.integers(0, 99))
def test_streamed_logits_at_any_offset(
    function: Rows, implementation: Any, name: str, offset: float, seed: int
) -> None:
    """The gradient of the bias is the sum over rows of the logits' own."""
    arrays = np.full(V, offset, np.float32), *exact(seed)
    ours = compiled(function, name, implementation=implementation)
    assert_as_plain(ours, compiled(of_head, name, whole=function is in_forward), *arrays)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e5, -1e6])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_log_probabilities_of_several_tokens_and_all_that_comes_of_them(offset: float, implementation: str) -> None:
    """Hidden states that each choose a column of the weight, whose products are exact."""
    rng, n, v = np.random.default_rng(0), 16, 300
    plainly = (3 * rng.normal(size=(n, v))).astype(np.float32)
    z, hidden, weight = plainly + np.float32(offset), np.eye(n, dtype=np.float32), plainly.T
    several, weights = rng.integers(0, v, (n, 4)), rng.uniform(0.5, 2, v).astype(np.float32) / v
    options: dict[str, Any] = {"bias": np.full(v, offset, np.float32), "implementation": implementation}
    want, slopes = oracle.statistics(oracle.Logits({"hidden": z, "weight": np.eye(v)}), several, weights)
    for log_probs in (P.linear_log_probs(hidden, weight, several, **options), P.selective_log_softmax(z, several)):
        np.testing.assert_allclose(log_probs, want["log_prob"], rtol=0, atol=4e-6)
    names = ("mean_log_prob", "entropy", "sum_sq_probs", "varentropy", "mean_logit", "lse")

    def total(weight: Any) -> Any:
        found = P.linear_row_statistics(hidden, weight, statistics=names, logit_weights=weights, **options)
        return jnp.sum(found.mean_log_prob + found.entropy + found.varentropy), found

    (_, found), gradient = jax.value_and_grad(total, has_aux=True)(weight)
    for name, atol in (("mean_log_prob", 8e-6), ("entropy", 4e-6)):
        np.testing.assert_allclose(getattr(found, name), want[name], rtol=0, atol=atol)
    for name, rtol, atol in (("varentropy", 1e-5, 4e-6), ("mean_logit", 1e-6, 1e-5), ("lse", 2e-7, 0)):
        np.testing.assert_allclose(getattr(found, name), want[name], rtol=rtol, atol=atol)
    right = slopes["mean_log_prob"] + slopes["entropy"] + slopes["varentropy"]
    np.testing.assert_allclose(gradient.T, right, rtol=0, atol=1e-5)
