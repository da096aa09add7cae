"""Which backend `implementation=None` takes: the Hopper kernels where they can serve the call, else XLA's.

Nothing runs on a GPU here: programs are traced and lowered for an H200 that is only compiled for, or in a process that
pretends to have one.
"""

import contextlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from pallas_ce import (
    MeshAxes,
    cross_entropy,
    explain,
    linear_cross_entropy,
    linear_log_probs,
    linear_loss,
    linear_row_statistics,
    linear_top_k,
    mean_squared_lse,
    selective_log_softmax,
)
from pallas_ce.backends import device as targets
from tests import compile_for_h200 as h200

N, H, V = 64, 128, 512
MIB = 2**20


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is taken to have an H200, with which nothing can be run."""
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H200")


def structs(dtype: Any = jnp.bfloat16, n: int = N, h: int = H, v: int = V) -> tuple[Any, ...]:
    shapes = (((n, h), dtype), ((v, h), dtype), ((n,), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def kernels(lowered: Any) -> int:
    return int(lowered.as_text().count("@mosaic_gpu_v2"))


def anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, without JAX's memory of how it was traced before this process pretended anything."""
    return lambda *arguments: function(*arguments)


def kernels_for(platform: str, function: Callable[..., Any], *arguments: Any) -> int:
    return kernels(jax.jit(anew(function)).trace(*arguments).lower(lowering_platforms=(platform,)))


def left_to_lowering(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the program is traced by two backends. JAX raises where their results' types differ."""
    return "platform_index" in str(jax.make_jaxpr(anew(function))(*arguments))


def loss(**options: Any) -> Callable[..., Any]:
    def function(hidden: Any, weight: Any, labels: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, **options)

    return jax.value_and_grad(function, argnums=(0, 1))


def focal(row: Any) -> Any:
    return -((1 - jnp.exp(row.log_prob)) ** 2) * row.log_prob


# Functions of hidden, weight and labels.
CALLS: dict[str, Callable[..., Any]] = {
    "the loss": linear_cross_entropy,
    "gradients, in_forward": loss(backward="in_forward"),
    "gradients, recompute": loss(backward="recompute"),
    "any loss": jax.grad(lambda h, w, t: linear_loss(focal, h, w, t)),
    "row statistics": lambda h, w, t: linear_row_statistics(h, w, t, statistics=("lse", "entropy")),
    "log-probabilities": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, t, temperature=0.7)), argnums=1),
    "top-k": lambda h, w, t: linear_top_k(h, w, 5),
    "stored logits": lambda h, w, t: jax.value_and_grad(cross_entropy)(h, t),
    "stored logits, each row": jax.grad(lambda h, w, t: jnp.sum(cross_entropy(h, t, reduction="none"))),
    "lse of stored logits": lambda h, w, t: mean_squared_lse(h, t),
    "entries of stored logits": jax.grad(lambda h, w, t: jnp.sum(selective_log_softmax(h, t))),
}


TRANSFORMED: dict[str, Callable[..., Any]] = {
    "a batch": lambda h, w, t: jax.vmap(loss(), (0, None, 0))(h.reshape(4, -1, H), w, t.reshape(4, -1)),
    "heads": lambda h, w, t: jax.vmap(loss())(jnp.stack([h, h]), jnp.stack([w, w]), jnp.stack([t, t])),
    "scan": lambda h, w, t: jax.lax.scan(lambda c, x: (c, loss()(*x)), 0, (h[None], w[None], t[None])),
    "checkpoint": jax.checkpoint(loss()),
}


@pytest.mark.parametrize("function", (every := CALLS | TRANSFORMED).values(), ids=every)
def test_one_trace_has_the_kernels_for_cuda_and_none_for_the_cpu(hopper: None, function: Any) -> None:
    assert kernels_for("cuda", function, *structs()) >= 1
    assert kernels_for("cpu", function, *structs()) == 0


@pytest.mark.parametrize("name", CALLS)
def test_without_a_gpu_at_hand_nothing_is_traced_twice(name: str) -> None:
    assert not left_to_lowering(CALLS[name], *structs())
    assert kernels_for("cuda", CALLS[name], *structs()) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", CALLS)
def test_a_mesh_of_h200s_decides_for_what_lies_on_it(name: str, dtype: Any) -> None:
    """float32 operands of products are XLA's, float32 logits that are given are not."""
    mesh = h200.h200_mesh()
    arguments = [h200.shaped(mesh, x.shape, x.dtype) for x in structs(dtype)]
    served = dtype == jnp.bfloat16 or "stored" in name
    assert (kernels(jax.jit(anew(CALLS[name])).lower(*arguments)) >= 1) == served
    assert not left_to_lowering(CALLS[name], *arguments)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_on_the_cpu_of_a_process_with_a_gpu_numbers_are_those_of_xla(hopper: None, backward: str) -> None:
    k = jax.random.split(jax.random.key(0), 3)
    hidden, weight = (jax.random.normal(key, x.shape, x.dtype) for key, x in zip(k[:2], structs(), strict=False))
    labels = jax.random.randint(k[2], (N,), 0, V).at[::5].set(-100)
    assert left_to_lowering(loss(backward=backward), hidden, weight, labels)
    got, want = (loss(backward=backward, implementation=name)(hidden, weight, labels) for name in (None, "xla"))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": None},
        {"return_metrics": True},
        {"scratch_bytes": MIB},
        {"vocab_axis": 1},
        {"vocab_size": V - 3},
        {"logit_softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4},
        {"token_weights": jnp.ones(N), "class_weights": jnp.ones(V), "normalizer": 7.0},
    ],
    ids=lambda options: "+".join(options),
)
def test_both_backends_return_the_same_types(hopper: None, options: dict[str, Any], backward: str) -> None:
    def function(arrays: Any, labels: Any) -> Any:
        hidden, weight, bias, scale = arrays
        weight = weight.T if options.get("vocab_axis") else weight
        return linear_cross_entropy(hidden, weight, labels, bias=bias, logit_scale=scale, backward=backward, **options)

    hidden, weight, labels = structs()
    bias, scale = jax.ShapeDtypeStruct((V,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    frozen = (jnp.zeros(weight.shape, weight.dtype), None, 1.0)
    has_aux = "return_metrics" in options
    differentiated = jax.value_and_grad(function, has_aux=has_aux)
    for rest in ((bias, scale), (None, scale), (None, 1.0)):
        assert left_to_lowering(differentiated, (hidden, weight, *rest), labels)
    only_hidden = jax.grad(lambda h, t: function((h, *frozen), t), has_aux=has_aux)
    assert left_to_lowering(only_hidden, hidden, labels)
    only_weight = jax.grad(lambda w, t: function((frozen[0][:N], w, None, 1.0), t), has_aux=has_aux)
    assert left_to_lowering(only_weight, weight, labels)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (loss(), structs(jnp.float32)),
        (loss(scratch_bytes=6_000), structs()),
        (lambda h, w, t: linear_top_k(h, w, 5, scratch_bytes=20_000), structs()),
        (lambda h, w, t: cross_entropy(h[:, :100], t), structs()),
        (lambda h, w, t: cross_entropy(h[:3], t[:3]), structs()),
    ],
    ids=["float32", "scratch", "top-k scratch", "100 logits", "3 rows of logits"],
)
def test_what_the_kernels_cannot_serve_is_silently_xlas(hopper: None, function: Any, arguments: Any) -> None:
    assert not left_to_lowering(function, *arguments)
    assert kernels_for("cuda", function, *arguments) == 0


@pytest.mark.parametrize(("check_vma", "served"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["the loss", "gradients", "top-k", "stored logits"])
def test_in_a_shard_map_they_serve_where_axes_are_not_tracked(name: str, check_vma: bool, served: bool) -> None:
    mesh, split, whole = h200.h200_mesh(2), PartitionSpec("gpu"), PartitionSpec()

    def local(hidden: Any, weight: Any, labels: Any) -> Any:
        axes = MeshAxes(vocabulary="gpu", grad=None if check_vma else "outside")
        return linear_cross_entropy(hidden, weight, labels, mesh_axes=axes)

    function, by_row, of_weight, out = {
        "the loss": (local, whole, split, whole),
        "gradients": (jax.grad(lambda h, w, t: linear_cross_entropy(h, w, t)), split, whole, split),
        "top-k": (lambda h, w, t: linear_top_k(h, w, 5), split, whole, split),
        "stored logits": (jax.grad(lambda h, w, t: cross_entropy(h, t)), split, whole, split),
    }[name]
    places = (by_row, of_weight, by_row)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=places, out_specs=out, check_vma=check_vma)
    arguments = [h200.shaped(mesh, x.shape, x.dtype, p) for x, p in zip(structs(), places, strict=True)]
    assert (kernels(jax.jit(mapped).lower(*arguments)) >= 1) == served


def ambient(kind: str, platform: str = "cuda") -> Any:
    device = AbstractDevice(kind, 100, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def test_a_mesh_of_other_devices_keeps_the_kernels_out_where_the_process_has_a_hopper_gpu(hopper: None) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    arguments = [h200.shaped(mesh, x.shape, x.dtype) for x in structs()]
    assert not left_to_lowering(loss(), *arguments)
    with pytest.raises(ValueError, match=r"its kernels are for Hopper GPUs, .* and this one is cpu; use 'xla'"):
        explain(*arguments[:2], implementation="mosaic_gpu")
    with ambient("Tesla V100-SXM2-16GB"):
        assert not left_to_lowering(loss(), *structs())
        assert kernels_for("cuda", loss(), *structs()) == 0


@pytest.mark.parametrize(("n", "h", "v"), [(512, 64, 16384), (8, 4096, 16), (1, 8, 1), (4096, 256, 16384)])
@pytest.mark.parametrize("backward", ["auto", "in_forward", "recompute"])
def test_none_is_refused_only_what_xla_is_refused(hopper: None, n: int, h: int, v: int, backward: Any) -> None:
    """At every budget forward and backward can be traced, by both backends or by XLA's alone."""
    served = set()
    for scratch_bytes in [None, *(int(10 ** (e / 4)) for e in range(12, 28, 3))]:
        options = {"backward": backward, "scratch_bytes": scratch_bytes}
        arguments = structs(jnp.bfloat16, n, h, v)
        refused: Any = contextlib.nullcontext()
        try:
            explain(*arguments[:2], implementation="xla", **options)
        except ValueError:
            refused = pytest.raises(ValueError, match="cannot hold one row of this head")
        with refused:
            told = explain(*arguments[:2], **options)
            assert left_to_lowering(loss(**options), *arguments) == (told.implementation == "mosaic_gpu")
            served.add(told.implementation)
    assert "mosaic_gpu" in served


def test_one_mode_serves_both_platforms_and_the_kernels_choose_it(hopper: None) -> None:
    options: dict[str, Any] = {"scratch_bytes": 4 * MIB}
    arguments = structs(jnp.bfloat16, 4096, 256, 16384)
    told = {name: explain(*arguments[:2], implementation=name, **options) for name in ("xla", "mosaic_gpu", None)}
    assert told["xla"].backward == "recompute"
    assert told["mosaic_gpu"].backward == told[None].backward == "in_forward"
    for platform in ("cpu", "cuda"):
        lowered = jax.jit(loss(**options)).trace(*arguments).lower(lowering_platforms=(platform,))
        text = lowered.as_text(debug_info=True)
        assert "pallas_ce.in_forward" in text
        assert "pallas_ce.recompute" not in text


def test_explain_tells_what_is_chosen_and_why(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _ = structs(n=4096, h=1024, v=32768)
    told, named = explain(hidden, weight), explain(hidden, weight, implementation="mosaic_gpu")
    assert told.implementation == "mosaic_gpu"
    assert told.implementation_reason == "this process has NVIDIA H200; programs for other platforms take xla"
    assert (told.launches, told.peak_bytes) == (named.launches, named.peak_bytes)
    assert [launch.kernel for launch in told.launches] == ["pallas_ce_stash"]
    assert explain(hidden, weight, temperature=0.7, reduction="none").implementation == "mosaic_gpu"
    with ambient("Tesla V100-SXM2-16GB"):
        told = explain(hidden, weight)
        assert told.implementation_reason == "no kernels of this library are for Tesla V100-SXM2-16GB"
        with pytest.raises(ValueError, match="its kernels are for Hopper GPUs, of compute"):
            explain(hidden, weight, implementation="mosaic_gpu")
    monkeypatch.setattr(targets, "local_cuda", lambda: None)
    without = explain(hidden, weight)
    assert told.implementation == without.implementation == "xla"
    assert without.implementation_reason == "it serves every platform, and this process has no CUDA device"


@pytest.mark.parametrize("version", [(0, 11, 2), (0, 12, 0), (0, 12, 0, 1)])
def test_the_kernels_are_the_default_on_every_jax(
    hopper: None, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    assert explain(*structs()).implementation == "mosaic_gpu"


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_vocabulary_that_the_kernels_cannot_read_is_refused_with_what_to_do_and_served_by_default(
    hopper: None, backward: Any
) -> None:
    """Of GPT-2's size; as `[H, V]`, or padded, the same head is the kernels'."""
    hidden, weight, labels = structs(h=768, v=50257)
    refusal = (
        "its kernels read a [V, H] weight whose V is a multiple of 8, not 50257; pad it to 50264 and pass "
        "vocab_size=50257, or use 'triton' or 'xla'"
    )
    with pytest.raises(ValueError, match=re.escape(f"implementation='mosaic_gpu' cannot serve this call: {refusal}")):
        jax.eval_shape(loss(implementation="mosaic_gpu"), hidden, weight, labels)
    told = explain(hidden, weight, backward=backward)
    assert told.implementation == "triton" if importlib.util.find_spec("triton") else "xla"
    assert refusal in told.implementation_reason
    assert kernels_for("cuda", loss(backward=backward), hidden, weight, labels) == 0
    top_k, calls = (lambda h, w, t: linear_top_k(h, w, 5)), (hidden, weight, labels)
    assert kernels_for("cuda", top_k, *calls) == 0
    padded = jax.ShapeDtypeStruct((50264, 768), weight.dtype)
    turned = jax.ShapeDtypeStruct((768, 50257), weight.dtype)
    assert explain(hidden, padded, vocab_size=50257, backward=backward).implementation == "mosaic_gpu"
    assert explain(hidden, turned, vocab_axis=1, backward=backward).implementation == "mosaic_gpu"


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("the compute dtype is float32", {"dtype": jnp.float32}),
        ("precision=TF32_TF32_F32 asks for another algorithm", {"precision": "TF32_TF32_F32"}),
        ("scratch_bytes=200000 is less than the", {"scratch_bytes": 200_000, "backward": "in_forward"}),
    ],
)
def test_explain_says_what_keeps_the_kernels_out(hopper: None, reason: str, options: dict[str, Any]) -> None:
    hidden, weight, _ = structs(n=4096, h=1024, v=32768)
    told = explain(hidden, weight, **options)
    assert (told.implementation, told.launches) == ("xla", ())
    assert told.implementation_reason.startswith("not mosaic_gpu: ")
    assert reason in told.implementation_reason
    with pytest.raises(ValueError, match=f"{reason}|scratch_bytes=200000 cannot hold one row of this head"):
        explain(hidden, weight, implementation="mosaic_gpu", **options)


def test_k_labels_are_the_kernels_and_row_temperatures_and_tf32_tritons(hopper: None) -> None:
    pytest.importorskip("triton")
    hidden, weight, _ = structs(n=4096, h=1024, v=32768)
    labels, temperature = jax.ShapeDtypeStruct((4096, 2), jnp.int32), jax.ShapeDtypeStruct((4096,), jnp.float32)
    assert explain(hidden, weight, reduction="none", labels=labels).implementation == "mosaic_gpu"
    for reason, options in {
        "no temperature for each row": {"reduction": "none", "temperature": temperature},
        "the compute dtype is float32": {"dtype": jnp.float32, "precision": "high"},
    }.items():
        given: Any = options
        assert explain(hidden, weight, **given).implementation == "triton"
        with pytest.raises(ValueError, match=reason):
            explain(hidden, weight, implementation="mosaic_gpu", **given)


@pytest.mark.parametrize("precision", ["highest", "default", "BF16_BF16_F32", None])
def test_a_precision_that_bfloat16_products_have_anyway_keeps_no_kernel_out(hopper: None, precision: Any) -> None:
    with jax.default_matmul_precision("TF32_TF32_F32"):
        assert explain(*structs()[:2], precision=precision).implementation == "mosaic_gpu"


@pytest.mark.parametrize(("rows", "vocab_size", "served"), [(V, V, True), (V, V - 3, True), (V + 8, V, False)])
def test_explain_reads_the_arrays_mesh_and_how_they_are_split(rows: int, vocab_size: int, served: bool) -> None:
    mesh = h200.h200_mesh(2)
    hidden, weight, *_ = structs()
    arrays = [
        h200.shaped(mesh, hidden.shape, hidden.dtype, PartitionSpec()),
        h200.shaped(mesh, (rows, H), weight.dtype, PartitionSpec("gpu")),
    ]
    told = explain(*arrays, vocab_size=vocab_size)
    assert told.implementation == ("mosaic_gpu" if served else "xla")
    reason = (
        "the call is for NVIDIA H200" if served else "pad it to 264 and pass vocab_size=260, or use 'triton' or 'xla'"
    )
    assert told.implementation_reason.endswith(reason)
