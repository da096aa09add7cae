"""What a sharded program moves between H200s, compiled for 2, 4 and 8, or lowered for 256; nothing is run."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import MeshAxes, linear_cross_entropy
from pallas_ce.backends import device as targets
from pallas_ce.parallel import partitioning
from tests import compile_for_h200 as h200

H, V = 256, 8192
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(text: str) -> list[tuple[str, str, int]]:
    """Kind, dtype and elements of what each collective of a compiled program returns."""
    found = []
    for line in text.splitlines():
        if match := re.search(rf"= (\(?.*?) ({KINDS})(-start)?\(", line):
            shapes, kind, start = match.groups()
            arrays = re.findall(r"(pred|bf16|[fsu]\d+)\[([\d,]*)\]", shapes)
            if start:
                arrays = arrays[len(arrays) // 2 :]  # operands and results, or one array that is both
            found += [(kind, dtype, math.prod(int(x) for x in shape.split(",") if x)) for dtype, shape in arrays]
    return found


def program(
    layout: str, mode: str | None, gpus: int, implementation: Any = "xla", vocab_size: int = V, rows: int = V
) -> Any:
    def loss(*given: Any) -> Any:
        options = {"backward": mode or "auto", "implementation": implementation, "vocab_size": vocab_size}
        return linear_cross_entropy(*given, **options)

    (hidden, weight, n), mesh = LAYOUTS[layout], h200.h200_mesh(gpus)
    function = loss if mode is None else jax.value_and_grad(loss, argnums=(0, 1))
    arguments = (
        h200.shaped(mesh, (n, H), jnp.bfloat16, hidden),
        h200.shaped(mesh, (rows, H), jnp.bfloat16, weight),
        h200.shaped(mesh, (n,), jnp.int32, hidden),
    )
    return h200.compile_for_h200(function, *arguments)[0]


def longest_loop(text: str) -> int:
    """The most trips of a loop of a compiled program whose count is known."""
    return max((int(trips) for trips in re.findall(r'known_trip_count":\{"n":"(\d+)"', text)), default=0)


def few_numbers(n: int, gpus: int) -> int:
    """O(tokens): each device's maximum and sum of exponentials, and the target's logit."""
    return (2 * gpus + 2) * n


def large_collectives(text: str, n: int, gpus: int) -> list[tuple[str, str, int]]:
    """Large collectives; small ones may also be merged into a large one."""
    return sorted(c for c in collectives(text) if c[2] > few_numbers(n, gpus))


def expected(layout: str, mode: str | None, n: int, gpus: int) -> list[tuple[str, str, int]]:
    """The collectives of more than O(tokens) numbers. FSDP over H moves two tiles of the weight in recompute's loop."""
    weight, hidden = V * H, n * H
    gathered = {
        "DP": [],
        "TP": [],
        "SP": [("all-gather", "bf16", hidden)],
        "FSDP over V": [("all-gather", "bf16", weight)],
        "FSDP over H": [("all-gather", "bf16", weight)],
    }[layout]
    if mode is None:
        return gathered
    tile = weight if mode == "in_forward" else V // 2 * H
    summed = {
        "DP": [("all-reduce", "bf16", weight)],
        "TP": [("all-gather", "bf16", hidden), ("reduce-scatter", "f32", hidden // gpus)],
        "SP": [("reduce-scatter", "f32", hidden // gpus)],
        "FSDP over V": [("reduce-scatter", "bf16", weight // gpus)],
        "FSDP over H": [("reduce-scatter", "bf16", tile // gpus)],
    }[layout]
    # A weight is gathered once for both passes; hidden states, which would have to be kept for the backward, in each.
    return gathered * (2 if mode == "recompute" and layout == "SP" else 1) + summed


LAYOUTS = {
    "DP": (P("gpu"), P(), 2048),
    "TP": (P(), P("gpu"), 2048),
    "SP": (P("gpu"), P("gpu"), 2048),
    "FSDP over V": (P("gpu"), P("gpu"), 16384),
    "FSDP over H": (P("gpu"), P(None, "gpu"), 2048),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mode", "gpus"),
    [
        *((layout, mode, 2) for layout in LAYOUTS for mode in ("in_forward", "recompute", None)),
        *((layout, "in_forward", gpus) for layout in ("DP", "TP", "SP") for gpus in (4, 8)),
    ],
)
def test_only_what_the_layout_needs_is_moved(layout: str, mode: str | None, gpus: int) -> None:
    n, text = LAYOUTS[layout][2], program(layout, mode, gpus).as_text()
    # XLA splits a prefix sum over devices as a loop over rows, 20 us a trip.
    assert longest_loop(text) < n // gpus // 2
    large = large_collectives(text, n, gpus)
    want = sorted(expected(layout, mode, n, gpus))
    assert [c[:2] for c in large] == [c[:2] for c in want]
    for (*_, size), (*_, least) in zip(large, want, strict=True):
        assert least <= size <= least + few_numbers(n, gpus)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
@pytest.mark.parametrize(("weight", "axes"), [(P("gpu"), {"vocabulary": "gpu"}), (P(None, "gpu"), {"width": "gpu"})])
def test_inside_shard_map_a_weight_is_gathered_once_and_its_gradient_scattered_in_its_dtype(
    weight: P, axes: dict[str, str], mode: Any
) -> None:
    n, mesh, split = 16384, h200.h200_mesh(2), P("gpu")

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        return linear_cross_entropy(
            hidden, weight, labels, backward=mode, implementation="xla", mesh_axes=MeshAxes(rows="gpu", **axes)
        )

    function = jax.shard_map(
        jax.value_and_grad(loss, (0, 1)), mesh=mesh, in_specs=(split, weight, split), out_specs=(P(), (split, weight))
    )
    shapes = (((n, H), jnp.bfloat16, split), ((V, H), jnp.bfloat16, weight), ((n,), jnp.int32, split))
    text = h200.compile_for_h200(function, *[h200.shaped(mesh, *shape) for shape in shapes])[0].as_text()
    tile = V // 2 if (mode, *axes) == ("recompute", "width") else V
    assert large_collectives(text, n, 2) == [("all-gather", "bf16", V * H), ("reduce-scatter", "bf16", tile * H // 2)]


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "known"), [(None, True), (None, False), ("triton", True)])
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_kernels_keep_the_weight_where_it_is(
    mode: str, implementation: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's are the default, also where the trace is not told what it is for, and the lowering takes each part's."""
    if not known:
        monkeypatch.setattr(partitioning, "_device", lambda array: None)
        monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H200")
    n, text = LAYOUTS["TP"][2], program("TP", mode, 2, implementation).as_text()
    assert ("triton_kernel_call_ffi" if implementation else "mosaic_gpu_v2") in text
    assert large_collectives(text, n, 2) == sorted(expected("TP", mode, n, 2))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rows", "served"), [("TP", V, True), ("TP", V + 8, False), ("DP", V + 8, True)])
def test_shards_of_a_padded_vocabulary(layout: str, rows: int, served: bool) -> None:
    """A device learns its share in the partitioner: kernels work on multiples of 8 entries, XLA on any."""
    n, text = LAYOUTS[layout][2], program(layout, "in_forward", 2, None, V - 100, rows).as_text()
    assert ("mosaic_gpu_v2" in text) == served
    assert [c[:2] for c in large_collectives(text, n, 2)] == sorted(c[:2] for c in expected(layout, "in_forward", n, 2))


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
