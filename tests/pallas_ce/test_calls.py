"""Calls on 16-bit operands that are too large to be drawn, by the kernels, beside the reference in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import LowRank, explain, linear_cross_entropy
from tests.pallas_ce.checks import relative_error

# bfloat16's: rounded dlogits, and a rounded gradient.
TOLERANCE = 8e-3

N, H, V = 144, 64, 1000

KERNELS = ("mosaic_gpu", "triton")
IMPLEMENTATIONS = ["xla", *(pytest.param(name, marks=pytest.mark.gpu) for name in KERNELS)]


def operands(n: int = N, h: int = H, v: int = V, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (n, h), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (v, h), jnp.bfloat16) * jnp.asarray(0.3, jnp.bfloat16)
    labels = jnp.where(jax.random.bernoulli(keys[3], 0.2, (n,)), -100, jax.random.randint(keys[2], (n,), 0, v))
    return hidden, weight, labels


def implemented(implementation: str, backward: str, **options: Any) -> Callable[..., Any]:
    return functools.partial(linear_cross_entropy, implementation=implementation, backward=backward, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_a_float32_weight_has_the_float32_accumulator(backward: str, implementation: str) -> None:
    """No bfloat16 sum, no bfloat16 result."""
    hidden, weight, labels = operands()
    master = weight.astype(jnp.float32)
    loss = implemented(implementation, backward, dtype=jnp.bfloat16)
    got = jax.jit(jax.grad(lambda w: loss(hidden, w, labels)))(master)
    want = jax.grad(lambda w: implemented("reference", "auto")(hidden.astype(jnp.float32), w, labels))(master)
    assert got.dtype == jnp.float32
    assert relative_error(got, np.asarray(want, np.float64)) <= TOLERANCE
    assert np.any(got != got.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_weight_of_more_numbers_than_31_bits_count(implementation: str) -> None:
    """What lies behind the 2³¹st decides: the last classes have the largest logits, and are the labels."""
    n, h, v = 64, 4096, 2**20
    hidden = jnp.ones((n, h), jnp.bfloat16)
    row = jnp.arange(v, dtype=jnp.float32) / v
    weight = jnp.broadcast_to((row / 256).astype(jnp.bfloat16)[:, None], (v, h))
    assert v * h > 2**31
    labels = v - 1 - jnp.arange(n)
    loss = implemented(implementation, "recompute")
    got, gradient = jax.jit(jax.value_and_grad(lambda w: loss(hidden, w, labels)))(weight)
    logits = np.asarray(weight[:, 0], np.float64) * h
    shift = logits.max()
    exponentials = np.exp(logits - shift)
    np.testing.assert_allclose(got, np.log(exponentials.sum()) + shift - logits[np.asarray(labels)].mean(), rtol=2e-5)
    want = exponentials / exponentials.sum()
    want[np.asarray(labels)] -= 1 / n
    for part in (gradient[:, 0], gradient[:, -1]):
        assert relative_error(part, want) <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("ignored", [0.0, 0.7])
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_a_low_rank_term_where_rows_are_skipped(implementation: str, ignored: float, backward: str) -> None:
    """Nothing is stored of the skipped, nor behind the end of the vocabulary, which is no multiple of its parts."""
    n, h, v = 4096, 512, 64 * (1 + 2**10)
    hidden, weight, labels = operands(n, h, v)
    labels = jnp.where(jnp.arange(n) < ignored * n, -100, labels)
    up, down = (operands(n, h, v, seed)[1] for seed in (1, 2))
    arrays = hidden / 8, weight, up[:, :16], down[:16]

    def results(loss: Callable[..., Any], *arrays: jax.Array) -> Any:
        return jax.jit(jax.value_and_grad(lambda h, *w: loss(h, LowRank(*w, 0.125), labels), range(4)))(*arrays)

    got, gradients = results(implemented(implementation, backward, scratch_bytes=2**29), *arrays)
    want, exact = results(implemented("reference", "auto"), *(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for gradient, expected in zip(gradients, exact, strict=True):
        assert relative_error(gradient, np.asarray(expected, np.float64)) <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_block_of_more_logits_than_31_bits_count(implementation: str) -> None:
    """In one block of rows, whose exponentials are stored: the last row and the last class are like the first."""
    n, h, v = 8448, 64, 2**18
    assert n * v > 2**31
    few, weight, labels = operands(33, h, v)
    hidden, labels = jnp.tile(few, (n // 33, 1)), jnp.tile(labels, n // 33)
    loss = implemented(implementation, "in_forward", scratch_bytes=2**33)
    assert explain(hidden, weight, scratch_bytes=2**33, backward="in_forward").rows == n
    got, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight, labels)
    wide = (few.astype(jnp.float32), weight.astype(jnp.float32), labels[:33])
    want, needs_grad = jax.value_and_grad(implemented("reference", "auto"), argnums=(0, 1))(*wide)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    for part in (gradients[0][:33], gradients[0][-33:]):
        assert relative_error(part * (n // 33), np.asarray(needs_grad[0], np.float64)) <= TOLERANCE
    assert relative_error(gradients[1], np.asarray(needs_grad[1], np.float64)) <= TOLERANCE
