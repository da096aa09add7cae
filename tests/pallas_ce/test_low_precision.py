"""bfloat16 and float16: as accurate as materialised float32 logits, through bfloat16 products."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import linear_cross_entropy
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, library_results, relative_error
from tests.pallas_ce.problems import STREAMED, WAYS, make

streamed = pytest.mark.parametrize(("implementation", "backward"), STREAMED)


def _materialised(hidden: jax.Array, weight: jax.Array, labels: np.ndarray, smoothing: float) -> tuple[Any, Any, Any]:
    """What ours is held against: by float32 logits whose dlogits are rounded to the operands' dtype."""
    counts = labels >= 0
    target = (
        jax.nn.one_hot(np.where(counts, labels, 0), weight.shape[0]) * (1 - smoothing) + smoothing / weight.shape[0]
    )
    z = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32)
    log_p = jax.nn.log_softmax(z)
    loss = -jnp.sum(jnp.where(counts, (log_p * target).sum(1), 0)) / counts.sum()
    dz = jnp.where(counts[:, None], (jnp.exp(log_p) - target) / counts.sum(), 0).astype(hidden.dtype)
    d_hidden = jnp.dot(dz, weight, preferred_element_type=jnp.float32)
    d_weight = jnp.dot(dz.T, hidden, preferred_element_type=jnp.float32)
    return loss, d_hidden.astype(hidden.dtype), d_weight.astype(weight.dtype)


@pytest.mark.nightly(keep=8)
@streamed
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bfloat16_gradients_are_as_accurate_as_materialised_float32_logits(
    implementation: str, backward: Any, scale: float, smoothing: float
) -> None:
    p = make(0, 96, 64, 500, scale)
    p.options = {"label_smoothing": smoothing}
    p.arrays = {k: x.astype(ml_dtypes.bfloat16) for k, x in p.arrays.items()}
    loss, gradients = library_results(p, implementation, backward, scratch_bytes=300_000)
    want, exact = oracle.cross_entropy(p.arrays, p.labels, p.options)
    hidden, weight = jnp.asarray(p.arrays["hidden"]), jnp.asarray(p.arrays["weight"])
    plain_loss, *plain = _materialised(hidden, weight, p.labels, smoothing)
    assert abs(float(loss) - want) <= max(1.5 * abs(float(plain_loss) - want), 1e-6 * want)
    for name, baseline in zip(("hidden", "weight"), plain, strict=True):
        assert gradients[name].dtype == jnp.bfloat16
        assert relative_error(gradients[name], exact[name]) <= 1.5 * relative_error(baseline, exact[name]), name


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
def test_float32_master_weights_get_the_float32_accumulator(implementation: str, backward: Any) -> None:
    p = make(0, 64, 32, 200)
    rounded = {k: x.astype(ml_dtypes.bfloat16) for k, x in p.arrays.items()}
    p.arrays = {k: x.astype(np.float32) for k, x in rounded.items()}
    _, gradients = library_results(p, implementation, backward, dtype=jnp.bfloat16)
    _, exact = oracle.cross_entropy(p.arrays, p.labels, p.options)
    assert gradients["weight"].dtype == np.float32
    # Only dlogits are rounded: no bfloat16 sum, no bfloat16 result.
    assert relative_error(gradients["weight"], exact["weight"]) < 3e-3
    unrounded = np.asarray(gradients["weight"])
    assert np.any(unrounded != unrounded.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.nightly(keep=4)
@streamed
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_does_not_underflow_at_a_hundred_thousand_tokens(
    implementation: str, backward: Any, reduction: Any
) -> None:
    """p/N is 1e-7 here, below what float16 can hold; the coefficients are normalised before dlogits are rounded."""
    if reduction == "none" and backward == "in_forward":
        backward = "recompute"
    n, h, v = 100_000, 4, 16
    rng = np.random.default_rng(0)
    # Float32 masters, so that nothing but the library rounds to float16.
    head = {
        name: jnp.asarray(rng.normal(size=size).astype(np.float16), jnp.float32)
        for name, size in (("hidden", (n, h)), ("weight", (v, h)))
    }
    labels = rng.integers(0, v, n).astype(np.int32)
    options = {"reduction": reduction, "backward": backward, "implementation": implementation}

    def loss(head: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(linear_cross_entropy(**head, labels=labels, dtype=jnp.float16, **options))

    gradients = jax.grad(loss)(head)
    _, exact = oracle.cross_entropy(head, labels, {})
    assert_close(gradients["weight"], exact["weight"], 2e-3)
    assert_close(gradients["hidden"], exact["hidden"], 2e-3, floor=0)


def _products(hidden: Any, weight: Any, **options: Any) -> list[str]:
    """Products of a differentiated loss, as in its program."""
    gradient = jax.grad(lambda h, w: linear_cross_entropy(h, w, jnp.zeros(h.shape[0], int), **options), argnums=(0, 1))
    text = jax.jit(gradient).lower(jax.ShapeDtypeStruct(*hidden), jax.ShapeDtypeStruct(*weight)).as_text()
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(found) >= 3
    return found


@streamed
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("masters", [jnp.bfloat16, jnp.float32])
def test_products_of_bfloat16_inputs_are_bfloat16_products(
    implementation: Any, backward: Any, vocab_axis: int, masters: Any
) -> None:
    """dlogits left in float32 would silently run float32 products: the commonest performance bug of this field."""
    options = {"vocab_axis": vocab_axis, "dtype": jnp.bfloat16, "implementation": implementation, "backward": backward}
    weight = (100, 16) if vocab_axis == 0 else (16, 100)
    for line in _products(((64, 16), jnp.bfloat16), (weight, masters), **options):
        operands, result = line.rsplit(":", 1)[1].split("->")
        assert operands.count("xbf16>") == 2, line
        assert "xf32>" in result, line


@streamed
def test_float32_products_ask_for_full_accuracy(implementation: Any, backward: Any) -> None:
    """A GPU's default for float32 operands is TF32."""
    shapes = ((8, 16), jnp.float32), ((10, 16), jnp.float32)
    products = _products(*shapes, implementation=implementation, backward=backward)
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
