"""The `vmap` rule: rows that share a head fold into one operation; a batched head, or its gradient, maps."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_cross_entropy
from pallas_ce.parallel.entry import over_rows

B, N, H = 3, 4, 5


class Operation:
    """`rows @ weight`, and on request `Σ rows`, a gradient of the head; remembers how many rows each trace saw."""

    def __init__(self, with_sum: bool) -> None:
        self.with_sum, self.rows = with_sum, list[int]()

    def __call__(self, by_row: Any, shared: Any) -> tuple[Any, Any]:
        self.rows.append(by_row["x"].size // H)
        y = by_row["x"] @ shared["weight"]
        y = y if by_row["mask"] is None else jnp.where(by_row["mask"], y, 0)
        return {"y": y}, by_row["x"].reshape(-1, H).sum(0) if self.with_sum else None


def _run(with_sum: bool, axes: Any, by_row: Any, weight: jax.Array) -> tuple[Any, str, list[int]]:
    """Result, jaxpr and the rows each trace saw, under vmap."""
    operation = Operation(with_sum)
    batched: Any = jax.vmap(lambda by_row, weight: over_rows(operation)(by_row, {"weight": weight}), axes)
    jaxpr = jax.make_jaxpr(batched)(by_row, weight)
    return batched(by_row, weight), str(jaxpr), operation.rows


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (B, N, H))


@pytest.fixture(scope="module")
def weights() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (B, H))


def test_rows_that_share_the_head_fold_into_one_call(x: jax.Array, weights: jax.Array) -> None:
    (out, nothing), jaxpr, rows = _run(False, ({"x": 0, "mask": None}, None), {"x": x, "mask": None}, weights[0])
    np.testing.assert_allclose(out["y"], x @ weights[0], rtol=1e-6)
    assert nothing is None
    assert max(rows) == B * N
    assert "scan" not in jaxpr


def test_row_inputs_that_are_not_batched_are_repeated(x: jax.Array, weights: jax.Array) -> None:
    mask = jnp.arange(N) % 2 == 0
    (out, _), jaxpr, rows = _run(False, ({"x": 0, "mask": None}, None), {"x": x, "mask": mask}, weights[0])
    np.testing.assert_allclose(out["y"], np.where(mask, x @ weights[0], 0), rtol=1e-6)
    masks = jnp.stack([mask, ~mask, mask])
    (out, _), _, _ = _run(False, ({"x": None, "mask": 0}, None), {"x": x[0], "mask": masks}, weights[0])
    np.testing.assert_allclose(out["y"], np.where(masks, x[0] @ weights[0], 0), rtol=1e-6)
    assert max(rows) == B * N
    assert "scan" not in jaxpr


def test_a_gradient_of_the_head_maps_over_the_batch(x: jax.Array, weights: jax.Array) -> None:
    (out, sums), jaxpr, rows = _run(True, ({"x": 0, "mask": None}, None), {"x": x, "mask": None}, weights[0])
    np.testing.assert_allclose(out["y"], x @ weights[0], rtol=1e-6)
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-5, atol=1e-6)
    assert set(rows) == {N}
    assert "scan" in jaxpr


def test_a_batched_head_maps_over_the_batch(x: jax.Array, weights: jax.Array) -> None:
    (out, _), jaxpr, rows = _run(False, ({"x": 0, "mask": None}, 0), {"x": x, "mask": None}, weights)
    np.testing.assert_allclose(out["y"], jnp.einsum("bnh,bh->bn", x, weights), rtol=1e-5, atol=1e-6)
    (out, _), _, _ = _run(False, ({"x": None, "mask": None}, 0), {"x": x[0], "mask": None}, weights)
    np.testing.assert_allclose(out["y"], weights @ x[0].T, rtol=1e-5, atol=1e-6)
    assert set(rows) == {N}
    assert "scan" in jaxpr


def test_nested_batches_fold_too(x: jax.Array, weights: jax.Array) -> None:
    operation = Operation(False)
    run = over_rows(operation)
    batched: Any = jax.vmap(jax.vmap(lambda x: run({"x": x, "mask": None}, {"weight": weights[0]})[0]["y"]))
    np.testing.assert_allclose(batched(x.reshape(B, 2, 2, H)), (x @ weights[0]).reshape(B, 2, 2), rtol=1e-6)
    assert max(operation.rows) == B * N


def _product_rows(function: Any, *arguments: jax.Array) -> set[int]:
    """The left operands' row counts of all products in a lowered program."""
    text = jax.jit(function).lower(*arguments).as_text()
    return {int(rows) for rows in re.findall(rf"dot_general.*\(tensor<(\d+)x{H}xf32>", text)}


def test_only_a_gradient_for_each_examples_weight_maps_over_the_batch(x: jax.Array) -> None:
    weight, labels = jnp.ones((7, H)), jnp.zeros((B, N), int)

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        return linear_cross_entropy(x, weight, labels, backward="recompute")

    frozen = jax.vmap(jax.grad(loss), (0, None, 0))
    per_example = jax.vmap(jax.grad(loss, argnums=1), (0, None, 0))
    assert B * N in _product_rows(frozen, x, weight, labels)
    assert N not in _product_rows(frozen, x, weight, labels)
    assert N in _product_rows(per_example, x, weight, labels)
