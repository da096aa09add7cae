"""The `vmap` rule: rows that share a head fold into one call; a batched head, or its gradient for each example, maps.

`test_transformations.py` compares the values; these are the rows of the products.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ce import linear_cross_entropy

B, N, H, V = 3, 4, 5, 7
GIVEN = jnp.ones((B, N, H)), jnp.ones((B, V, H)), jnp.zeros((B, N), int)


def _loss(hidden: Any, weight: Any, labels: Any) -> Any:
    return linear_cross_entropy(hidden, weight, labels, backward="recompute")


def _in_halves(hidden: Any, weight: Any, labels: Any) -> Any:
    """A batch within a batch."""
    return jax.vmap(_loss, (0, None, 0))(hidden.reshape(2, -1, H), weight, labels.reshape(2, -1))


@pytest.mark.parametrize(
    ("function", "axes", "rows"),
    [
        (_loss, (0, None, 0), {B * N}),
        (_loss, (0, None, None), {B * N}),
        (_loss, (None, None, 0), {B * N}),
        (_loss, (0, 0, 0), {N}),
        (_loss, (None, 0, None), {N}),
        (_in_halves, (0, None, 0), {B * N}),
        (_in_halves, (0, 0, 0), {N}),
        (jax.grad(_loss), (0, None, 0), {B * N}),
        (jax.grad(_loss, argnums=1), (0, None, 0), {B * N, N}),
    ],
)
def test_only_a_head_of_each_example_or_its_gradient_maps_over_the_batch(
    function: Any, axes: tuple[int | None, ...], rows: set[int]
) -> None:
    given = (x if axis == 0 else x[0] for x, axis in zip(GIVEN, axes, strict=True))
    text = jax.jit(jax.vmap(function, axes)).lower(*given).as_text()
    assert {int(found) for found in re.findall(rf"dot_general.*\(tensor<(\d+)x{H}xf32>", text)} == rows
