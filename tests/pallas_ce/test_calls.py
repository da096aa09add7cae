"""Every kind of call on 16-bit operands, by the kernels: reductions, transformations, frozen and ignored parts.

Each is compared with the reference, which gets the same numbers in float32. `test_contract.py` draws more for XLA.
"""

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

Loss = Callable[..., Any]


def operands(n: int = N, h: int = H, v: int = V, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (n, h), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (v, h), jnp.bfloat16) * jnp.asarray(0.3, jnp.bfloat16)
    labels = jnp.where(jax.random.bernoulli(keys[3], 0.2, (n,)), -100, jax.random.randint(keys[2], (n,), 0, v))
    return hidden, weight, labels


def with_metrics(loss: Loss, hidden: Any, weight: Any, labels: Any) -> Any:
    value, m = loss(hidden, weight, labels, return_metrics=True, z_loss=1e-3)
    # All of about the same size, so that an error in one shows.
    return value + 2 * m.cross_entropy + 30 * m.z_loss + m.num_tokens / N + 3 * m.accuracy + 5 * m.mean_lse


def scanned(loss: Loss, hidden: Any, weight: Any, labels: Any) -> Any:
    def step(total: Any, part: Any) -> Any:
        return total + loss(part[0], weight, part[1]), None

    return jax.lax.scan(step, jnp.float32(0), (hidden.reshape(3, -1, H), labels.reshape(3, -1)))[0]


# By name, functions of a loss, hidden states, weight and labels.
CALLS: dict[str, Callable[..., Any]] = {
    "low_rank_term": lambda loss, h, w, t: loss(h, LowRank(w, w[:, :4], w[:4], 0.125), t),
    "summed": lambda loss, h, w, t: loss(h, w, t, reduction="sum"),
    "of_each_row": lambda loss, h, w, t: jnp.sum(
        jnp.cos(jnp.arange(N)) * loss(h, w, t, reduction="none", backward="auto")
    ),
    "frozen_hidden": lambda loss, h, w, t: loss(jax.lax.stop_gradient(h), w, t),
    "frozen_weight": lambda loss, h, w, t: loss(h, jax.lax.stop_gradient(w), t),
    "with_metrics": with_metrics,
    "mapped": lambda loss, h, w, t: jnp.sum(
        jax.vmap(lambda h, t: loss(h, w, t))(h.reshape(2, -1, H), t.reshape(2, -1))
    ),
    "scanned": scanned,
    "rematerialised": lambda loss, h, w, t: jax.checkpoint(lambda h, w: loss(h, w, t))(h, w),
    "in_little_scratch": lambda loss, h, w, t: loss(h, w, t, scratch_bytes=2**18),
    "labels_out_of_range": lambda loss, h, w, t: loss(h, w, t.at[:20].set(V).at[20:30].set(-3)),
    "ignored_class": lambda loss, h, w, t: loss(h, w, t.at[::4].set(7), ignore_index=7),
    "nothing_counts": lambda loss, h, w, t: loss(h, w, jnp.full_like(t, -100)),
    "no_tokens": lambda loss, h, w, t: loss(h[:0], w, t[:0]),
}


def implemented(implementation: str, backward: str, **options: Any) -> Loss:
    def loss(*given: Any, **others: Any) -> Any:
        chosen: Any = {"implementation": implementation, "backward": backward, **options, **others}
        if implementation == "reference":
            chosen["scratch_bytes"] = None
        return linear_cross_entropy(*given, **chosen)

    return loss


def check(name: str, implementation: str, backward: str, compiled: Callable[..., Any] = jax.jit) -> None:
    """Value and gradients of that call; `compiled` makes it a program."""
    *narrow, labels = operands()

    def differentiable(loss: Loss) -> Any:
        return jax.value_and_grad(lambda *given: CALLS[name](loss, *given, labels), (0, 1))

    wide = [x.astype(jnp.float32) for x in narrow]
    want, needs_grad = differentiable(implemented("reference", "auto"))(*wide)
    got, gradients = compiled(differentiable(implemented(implementation, backward)))(*narrow)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    for gradient, exact in zip(gradients, needs_grad, strict=True):
        assert gradient.dtype == jnp.bfloat16
        if not np.any(exact):
            assert not np.any(np.asarray(gradient))
        else:
            assert relative_error(gradient, np.asarray(exact, np.float64)) <= TOLERANCE


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("name", CALLS)
def test_each_call(name: str, backward: str, implementation: str) -> None:
    check(name, implementation, backward)


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

    def results(loss: Loss, *arrays: jax.Array) -> Any:
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
