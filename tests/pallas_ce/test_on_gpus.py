"""Several GPUs of one host through NCCL: each layout gives what one GPU gives, on the Hopper kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import linear_cross_entropy

pytestmark = pytest.mark.gpu

N, V, H = 2048, 8192, 512
LAYOUTS = {
    "data": (P("gpu"), P()),
    "tensor": (P(), P("gpu")),
    "sequence": (P("gpu"), P("gpu")),
    "FSDP over H": (P("gpu"), P(None, "gpu")),
    "FSDP and tensor": (P("gpu"), P("pair", "gpu")),
}


def arrays(vocab_size: int) -> tuple[jax.Array, ...]:
    """Hidden states, weight and labels, a fifth of them ignored."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (N, H), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (V, H), jnp.bfloat16) * jnp.bfloat16(H**-0.5)
    return hidden, weight, jnp.where(jnp.arange(N) % 5 == 0, -100, jax.random.randint(keys[2], (N,), 0, vocab_size))


def results(mesh: Any, layout: tuple[P, P], vocab_size: int, backward: Any) -> list[np.ndarray]:
    """Loss and gradients by the kernels."""
    specs = layout[0], layout[1], P(*layout[0][:1])
    given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays(vocab_size), specs, strict=True)]

    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(
            hidden, weight, labels, vocab_size=vocab_size, backward=backward, implementation="mosaic_gpu"
        )

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*given).compile()
    assert "mosaic_gpu_v2" in compiled.as_text()
    value, (d_hidden, d_weight) = compiled(*given)
    return [np.asarray(x, np.float32) for x in (value, d_hidden, d_weight)]


def exact_gradients(vocab_size: int) -> list[np.ndarray]:
    """Gradients of hidden and weight, from stored logits in float32."""
    hidden, weight, labels = arrays(vocab_size)

    loss = functools.partial(linear_cross_entropy, vocab_size=vocab_size, implementation="reference")
    found = jax.jit(jax.grad(loss, (0, 1)))(hidden.astype(jnp.float32), weight.astype(jnp.float32), labels)
    return [np.asarray(x) for x in found]


@pytest.mark.parametrize("vocab_size", [V, V - 100, V // 2 - 50])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_what_one_gpu_gives(layout: str, backward: str, vocab_size: int) -> None:
    """Also of a padded vocabulary, whose last device has some padding, or nothing else."""
    gpus = jax.devices()
    pairs = 2 if "pair" in LAYOUTS[layout][1] else 1
    if len(gpus) < 2 * pairs:
        pytest.skip(f"fewer than {2 * pairs} GPUs")

    def mesh(devices: Any) -> Any:
        shape = (len(devices) // pairs, pairs) if len(devices) > 1 else (1, 1)
        return jax.make_mesh(shape, ("gpu", "pair"), axis_types=(AxisType.Auto,) * 2, devices=devices)

    one = results(mesh(gpus[:1]), LAYOUTS[layout], vocab_size, backward)
    several = results(mesh(gpus), LAYOUTS[layout], vocab_size, backward)
    np.testing.assert_allclose(several[0], one[0], rtol=1e-6)
    for got, alone, exact in zip(several[1:], one[1:], exact_gradients(vocab_size), strict=True):
        # Rows on several devices: each rounds its sum for the weight to bfloat16, and so is the sum of these.
        assert np.linalg.norm(got - exact) <= 2 * np.linalg.norm(alone - exact)
    assert not several[2][vocab_size:].any()
