"""What the compiler makes of it: nothing of N·V elements, and memory as promised, for the CPU and for an H200."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ce import explain, linear_cross_entropy
from tests import compile_for_h200 as h200

SHAPES = [(4096, 512, 32768), (32768, 4096, 262144)]
MODES = ["in_forward", "recompute", None]


def _function(mode: Any) -> Any:
    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, backward=mode or "auto", implementation="xla")

    return loss if mode is None else jax.value_and_grad(loss, argnums=(0, 1))


def _largest_new_array(text: str, parameters: set[int]) -> int:
    """Elements of the largest array in the compiled program that has no parameter's size."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
    sizes = {math.prod(int(x) for x in shape.split(",")) for shape in shapes}
    return max(sizes - parameters)


def _check(compiled: Any, n: int, h: int, v: int, dtype: Any, mode: Any) -> None:
    told = explain(
        jax.ShapeDtypeStruct((n, h), dtype),
        jax.ShapeDtypeStruct((v, h), dtype),
        implementation="xla",
        backward=mode or "auto",
        differentiate=() if mode is None else ("hidden", "weight"),
    )
    assert told.scratch_bytes <= max(512 * 2**20, 4096 * v)
    text = compiled.as_text()
    assert _largest_new_array(text, {n * h, v * h}) <= told.scratch_bytes // 4
    assert f"[{n},{v}]" not in text
    assert f"[{v},{n}]" not in text
    memory = compiled.memory_analysis()
    by_row = told.peak_bytes - told.scratch_bytes - told.accumulator_bytes - told.gradient_bytes
    # Rows that do not count are put in place by one pass over hidden's gradient, with an index and a mask.
    by_row += n * h
    # Accumulators of the gradients' own dtype become the gradients: temporaries or outputs, but not both.
    shared = min(told.accumulator_bytes, told.gradient_bytes) if dtype == jnp.float32 and mode == "in_forward" else 0
    used = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert used <= told.scratch_bytes + told.accumulator_bytes + told.gradient_bytes - shared + by_row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "h", "v"), SHAPES)
def test_memory_on_the_cpu(n: int, h: int, v: int, mode: str | None) -> None:
    arguments = [
        jax.ShapeDtypeStruct((n, h), jnp.float32),
        jax.ShapeDtypeStruct((v, h), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    ]
    _check(jax.jit(_function(mode)).lower(*arguments).compile(), n, h, v, jnp.float32, mode)


@pytest.mark.parametrize("mode", MODES)
def test_memory_on_an_h200(mode: str | None) -> None:
    n, h, v = SHAPES[-1]
    mesh = h200.h200_mesh()
    arguments = [
        h200.shaped(mesh, (n, h), jnp.bfloat16),
        h200.shaped(mesh, (v, h), jnp.bfloat16),
        h200.shaped(mesh, (n,), jnp.int32),
    ]
    compiled, _ = h200.compile_for_h200(_function(mode), *arguments)
    _check(compiled, n, h, v, jnp.bfloat16, mode)
