"""Programs for a mesh that has no devices, which are looked at and never run."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import linear_cross_entropy


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_loss_with_gradients_is_lowered_for_256_devices(kind: AxisType, platform: str) -> None:
    mesh = AbstractMesh((16, 16), ("data", "tensor"), axis_types=(kind,) * 2)

    def array(shape: tuple[int, ...], dtype: Any, *spec: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    arguments = (
        array((256, 8, 64), jnp.bfloat16, "data"),
        array((2**18, 64), jnp.bfloat16, "tensor"),
        array((256, 8), jnp.int32, "data"),
    )
    traced = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1))).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert "<256x8x64xbf16>" in text  # hidden's gradient
    assert not re.search(r"(256x8|2048)x262144", text)  # nothing of the logits' size
