"""Run by `test_meshes.py` in a process of its own with two CPU devices; prints the names of the checks that passed."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import linear_cross_entropy

N, H, V = 16, 4, 24
KEYS = jax.random.split(jax.random.key(0), 3)
HIDDEN, WEIGHT = jax.random.normal(KEYS[0], (N, H)), jax.random.normal(KEYS[1], (V, H))
LABELS = jax.random.randint(KEYS[2], (N,), 0, V).at[3].set(-100)
COUNT = 15.0


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """Two devices along "data"."""
    return jax.make_mesh((2,), ("data",), axis_types=(kind,))


def loss(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    """The mean over the whole batch, of which `hidden` may be a part."""
    return linear_cross_entropy(hidden, weight, labels, normalizer=COUNT, **options)


def same(got: Any, want: Any) -> None:
    """Equal to float32 rounding."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


WANT = jax.value_and_grad(loss, argnums=(0, 1))(HIDDEN, WEIGHT, LABELS, implementation="reference")


def shard_map_differentiated_outside(mode: Any) -> None:
    """Gradients through an unchecked shard_map, eager and jitted."""

    def part(hidden: Any, weight: Any, labels: Any) -> Any:
        return jax.lax.psum(loss(hidden, weight, labels, backward=mode), "data")

    mapped = jax.shard_map(part, mesh=mesh(), in_specs=(P("data"), P(), P("data")), out_specs=P(), check_vma=False)
    same(jax.value_and_grad(mapped, argnums=(0, 1))(HIDDEN, WEIGHT, LABELS), WANT)
    same(jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))(HIDDEN, WEIGHT, LABELS), WANT)


def shard_map_differentiated_inside(mode: Any) -> None:
    """Gradients inside, summed by the caller."""

    def part(hidden: Any, weight: Any, labels: Any) -> Any:
        value, (d_hidden, d_weight) = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight, labels, backward=mode)
        return jax.lax.psum(value, "data"), (d_hidden, jax.lax.psum(d_weight, "data"))

    out = (P(), (P("data"), P()))
    mapped = jax.shard_map(part, mesh=mesh(), in_specs=(P("data"), P(), P("data")), out_specs=out, check_vma=False)
    same(mapped(HIDDEN, WEIGHT, LABELS), WANT)


def pmap_differentiated_inside_and_outside(mode: Any) -> None:
    """Data parallelism by pmap."""
    hidden, labels = HIDDEN.reshape(2, N // 2, H), LABELS.reshape(2, N // 2)

    def part(hidden: Any, weight: Any, labels: Any) -> Any:
        return loss(hidden, weight, labels, backward=mode)

    gradient = jax.pmap(jax.grad(part, argnums=1), in_axes=(0, None, 0))(hidden, WEIGHT, labels)
    same(gradient.sum(axis=0), WANT[1][1])
    outside = jax.grad(lambda w: jax.pmap(part, in_axes=(0, None, 0))(hidden, w, labels).sum())
    same(outside(WEIGHT), WANT[1][1])


def jit_on_an_auto_mesh(mode: Any) -> None:
    """Rows, and the vocabulary, sharded by the arrays' own shardings."""
    auto = mesh()
    for rows, weight in ((P("data"), P()), (P(), P("data")), (P("data"), P("data"))):
        arrays = (
            jax.device_put(HIDDEN, NamedSharding(auto, rows)),
            jax.device_put(WEIGHT, NamedSharding(auto, weight)),
            jax.device_put(LABELS, NamedSharding(auto, rows)),
        )
        same(jax.jit(jax.value_and_grad(lambda *a: loss(*a, backward=mode), argnums=(0, 1)))(*arrays), WANT)


def refusals(mode: Any) -> None:
    """What is not supported is refused by name."""
    sharded = jax.device_put(HIDDEN, NamedSharding(mesh(AxisType.Explicit), P("data")))
    with pytest.raises(NotImplementedError, match="hidden is sharded over the explicit mesh axes"):
        loss(sharded, WEIGHT, LABELS, backward=mode)
    mapped = jax.shard_map(
        lambda h, w, t: jax.lax.psum(loss(h, w, t, backward=mode), "data"),
        mesh=mesh(), in_specs=(P("data"), P(), P("data")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        mapped(HIDDEN, WEIGHT, LABELS)


if __name__ == "__main__":
    for check in (
        shard_map_differentiated_outside,
        shard_map_differentiated_inside,
        pmap_differentiated_inside_and_outside,
        jit_on_an_auto_mesh,
        refusals,
    ):
        for mode in ("recompute", "in_forward"):
            check(mode)
            print(f"passed: {check.__name__}[{mode}]", flush=True)
