"""`linear_distillation` under JAX's transformations, against its reference implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_distillation
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.streamed import two_heads


def _loss(**options: Any) -> Any:
    def loss(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any) -> Any:
        return linear_distillation(hidden, weight, teacher_hidden, teacher_weight, divergence="reverse_kl", **options)

    return loss


@pytest.fixture(scope="module")
def batch() -> tuple[jax.Array, ...]:
    """Three examples of each array."""
    p = [two_heads(seed, 8, 5, 40) for seed in range(3)]
    return tuple(jnp.stack([q[k] for q in p]) for k in ("hidden", "weight", "teacher_hidden", "teacher_weight"))


@pytest.mark.parametrize("axes", [(0, None, 0, None), (0, 0, 0, 0), (0, None, None, None)])
def test_vmap_and_its_gradients(batch: Any, axes: Any) -> None:
    arguments = [x if axis == 0 else x[0] for x, axis in zip(batch, axes, strict=True)]

    def run(loss: Any) -> Any:
        gradient = jax.value_and_grad(loss, (0, 1))
        return jax.jit(jax.vmap(gradient, axes))(*arguments)

    assert_close(run(_loss()), jax.tree.map(np.asarray, run(_loss(implementation="reference"))), 1e-5, floor=1e-6)


def test_a_batch_of_sequences_streams_shared_heads_once(batch: Any) -> None:
    hidden, weight, teacher_hidden, teacher_weight = batch
    run = jax.jit(jax.vmap(jax.grad(_loss()), (0, None, 0, None)))
    text = run.lower(hidden, weight[0], teacher_hidden, teacher_weight[0]).as_text()
    assert "24x40xf32" in text
    assert "tensor<8x40xf32>" not in text


def test_one_traced_loss_differentiated_for_one_side_and_then_for_the_other(batch: Any) -> None:
    hidden, weight, *teacher = (x[0] for x in batch)

    def both(loss: Any) -> Any:
        traced = jax.jit(lambda h, w: loss(h, w, *teacher))

        def step(h: Any, w: Any) -> Any:
            frozen_weight, frozen_hidden = jax.grad(traced)(h, w), jax.grad(traced, 1)(h, w)
            return frozen_weight, frozen_hidden, jax.grad(traced, (0, 1))(h, w)

        return jax.jit(step)(hidden, weight)

    assert_close(both(_loss()), jax.tree.map(np.asarray, both(_loss(implementation="reference"))), 1e-5, floor=1e-6)


def test_a_scan_that_carries_the_weight(batch: Any) -> None:
    hiddens, weights, teacher_hiddens, teacher_weights = batch

    def train(loss: Any) -> Any:
        def step(weight: Any, x: Any) -> Any:
            value, gradient = jax.value_and_grad(loss, 1)(x[0], weight, x[1], teacher_weights[0])
            return weight - 0.5 * gradient, value

        return jax.lax.scan(step, weights[0], (hiddens, teacher_hiddens))

    assert_close(train(_loss()), jax.tree.map(np.asarray, train(_loss(implementation="reference"))), 1e-5, floor=1e-6)


def test_a_frozen_side_costs_no_product(batch: Any) -> None:
    arguments = [x[0] for x in batch]

    def products(*argnums: int) -> int:
        return str(jax.make_jaxpr(jax.grad(_loss(), argnums))(*arguments)).count("dot_general")

    assert products(0) == products(1) == products(0, 1) - 1 == products(0, 2, 3)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, h: jax.grad(lambda x: jax.grad(f)(x).sum())(h),
        lambda f, h: jax.hessian(f)(h),
        lambda f, h: jax.jvp(jax.grad(f), (h,), (h,)),
    ],
)
def test_second_derivatives_raise_but_in_the_reference(batch: Any, derivative: Any) -> None:
    hidden, *rest = (x[0] for x in batch)
    with pytest.raises(NotImplementedError, match=r"first derivatives in reverse mode only.*implementation='ref"):
        derivative(lambda h: _loss()(h, *rest), hidden)
    derivative(lambda h: _loss(implementation="reference")(h, *rest), hidden)
