"""Calls inside a `shard_map` that leaves the mesh axis `tensor` automatic. Run by `test_meshes.py`."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import MeshAxes, cross_entropy, linear_distillation, linear_row_statistics, linear_sample, linear_top_k
from tests.pallas_ce.layouts import MODES, Layout, arrays, gradients, loss, mesh, same

# The last one's vocabulary cannot be split over `tensor`.
LAYOUTS = (
    Layout("DP 2", P("data"), P(), low_rank=True),
    Layout("FSDP 2 over V", P("data"), P("data"), vocabulary=32),
    Layout("FSDP 2 over H", P("data"), P(None, "data")),
    Layout("DP 2, 61 entries", P("data"), P(), vocabulary=61),
)


def losses() -> Iterator[str]:
    """Value and gradients, with the weight split over `tensor` as well or not."""
    on = mesh()
    for layout, mode, check_vma in itertools.product(LAYOUTS, MODES, (True, False)):
        given = arrays(layout.vocabulary, True, layout.low_rank)
        count = jnp.sum(jnp.where(given[4] >= 0, given[5] * (0.5 + given[4] % 3), 0))
        axes = MeshAxes(**layout.axes, grad=None if check_vma else "outside")
        whole = functools.partial(loss, padded=True, vocabulary=layout.vocabulary, normalizer=count, backward=mode)

        def part(*given: Any, whole: Any = whole, axes: Any = axes, rows: Any = layout.only_rows) -> Any:
            value = whole(*given, mesh_axes=axes)
            return jax.lax.psum(value, rows) if rows else value

        function = jax.shard_map(
            part, mesh=on, in_specs=layout.specs, out_specs=P(), axis_names={"data"}, check_vma=check_vma
        )
        if layout.vocabulary == 64 and not layout.low_rank:
            place = NamedSharding(on, P("tensor", *layout.weight[1:]))
            given = (given[0], jax.device_put(given[1], place), *given[2:])
        got = jax.jit(gradients(function))(*given)
        reference = functools.partial(loss, padded=True, implementation="reference", normalizer=count)
        same(got, gradients(reference)(*arrays(layout.vocabulary, True, layout.low_rank)))
        yield f"{layout.name}, {mode}, check_vma={check_vma}"


def others() -> Iterator[str]:
    """Functions that split over rows only, a batch of heads, and stored logits."""
    hidden, weight, _, _, labels, _ = arrays(64, False)
    rows = {
        "statistics": lambda h, w, t: linear_row_statistics(h, w, t, statistics=("lse", "argmax")),
        "top_k": lambda h, w, t: linear_top_k(h, w, 3).ids + 0 * t[..., None],
        "sample": lambda h, w, t: linear_sample(jax.random.key(0), h, w, top_k=1).ids + 0 * t,
        "distillation": lambda h, w, t: linear_distillation(h, w, 2 * h, w, reduction="none") + 0 * t,
        "stored logits": lambda h, w, t: cross_entropy(h @ w.T, t, reduction="none"),
        "heads": lambda h, w, t: jax.vmap(lambda w: linear_row_statistics(h, w, t).lse, out_axes=-1)(
            jnp.stack([w, 2 * w])
        ),
    }
    for name, function in rows.items():
        mapped = jax.shard_map(
            function, mesh=mesh(), in_specs=(P("data"), P(), P("data")), out_specs=P("data"), axis_names={"data"}
        )
        got, want = jax.jit(mapped)(hidden, weight, labels), function(hidden, weight, labels)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)
        yield name


if __name__ == "__main__":
    for passed in (*losses(), *others()):
        print(f"passed: {passed}", flush=True)
