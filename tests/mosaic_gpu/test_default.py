"""Which calls the Hopper kernels serve by default, which they refuse in words, and what `explain` tells of them.

Nothing runs on a GPU here: programs are traced and lowered for an H200 that is only compiled for, or in a process that
pretends to have one.
"""

import contextlib
import functools
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
from pallas_ce.backends.mosaic_gpu.gemm import launch as launching
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, epilogues
from tests import compile_for_h200 as h200

N, H, V = 64, 128, 512
MIB = 2**20
NAMED: Any = {"implementation": "mosaic_gpu"}


def ambient(kind: str) -> Any:
    """Programs are for that GPU."""
    device = AbstractDevice(kind, 100, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


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
    """Whether the program is traced by two backends."""
    return "platform_index" in str(jax.make_jaxpr(anew(function))(*arguments))


def loss(**options: Any) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *given: linear_cross_entropy(*given, **options), argnums=(0, 1))


# Functions of hidden, weight and labels.
CALLS: dict[str, Callable[..., Any]] = {
    "the loss": linear_cross_entropy,
    "gradients, in_forward": loss(backward="in_forward"),
    "gradients, recompute": loss(backward="recompute"),
    "any loss": jax.grad(lambda *given: linear_loss(lambda row: row.entropy * row.log_prob, *given)),
    "row statistics": lambda h, w, t: linear_row_statistics(h, w, t, statistics=("lse", "entropy")),
    "log-probabilities": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, t, temperature=0.7)), argnums=1),
    "top-k": lambda h, w, t: linear_top_k(h, w, 5),
    "stored logits": lambda h, w, t: jax.value_and_grad(cross_entropy)(h, t),
    "stored logits, each row": jax.grad(lambda h, w, t: jnp.sum(cross_entropy(h, t, reduction="none"))),
    "lse of stored logits": lambda h, w, t: mean_squared_lse(h, t),
    "entries of stored logits": jax.grad(lambda h, w, t: jnp.sum(selective_log_softmax(h, t))),
}
EVERY_OPTION: dict[str, Any] = {
    "vocab_size": V - 3, "logit_softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4, "token_weights": np.ones(N),
    "class_weights": np.ones(V - 3), "normalizer": 7.0, "ignore_index": None, "scratch_bytes": MIB,
}  # fmt: skip
BACKWARD: dict[str, dict[str, Any]] = {mode: {"backward": mode} for mode in ("in_forward", "recompute")}
OPTIONS: dict[str, Callable[..., Any]] = {
    f"{name}, {mode}": call
    for mode, given in BACKWARD.items()
    for name, call in {
        "hidden": jax.grad(functools.partial(linear_cross_entropy, **given)),
        "weight": jax.grad(functools.partial(linear_cross_entropy, **given), argnums=1),
        "every option": loss(**EVERY_OPTION, **given),
        "metrics": jax.grad(functools.partial(linear_cross_entropy, return_metrics=True, **given), has_aux=True),
        "transposed": jax.grad(lambda h, w, t, given=given: linear_cross_entropy(h, w.T, t, vocab_axis=1, **given)),
        "bias and scale": jax.grad(
            lambda h, w, t, given=given: linear_cross_entropy(
                h, w, t, bias=jnp.sum(w, 1, jnp.float32), logit_scale=jnp.sum(h, dtype=jnp.float32), **given
            ),
            argnums=(0, 1),
        ),
    }.items()
}
TRANSFORMED: dict[str, Callable[..., Any]] = {
    "a batch": lambda h, w, t: jax.vmap(loss(), (0, None, 0))(h.reshape(4, -1, H), w, t.reshape(4, -1)),
    "heads": lambda h, w, t: jax.vmap(loss())(jnp.stack([h, h]), jnp.stack([w, w]), jnp.stack([t, t])),
    "scan": lambda h, w, t: jax.lax.scan(lambda c, x: (c, loss()(*x)), 0, (h[None], w[None], t[None])),
    "checkpoint": lambda *given: jax.checkpoint(loss())(*given),
}


@pytest.mark.parametrize("name", every := CALLS | OPTIONS | TRANSFORMED)
def test_one_trace_has_the_kernels_for_cuda_and_none_for_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU at hand nothing is traced twice. JAX raises where the two backends' results differ in type."""
    assert not left_to_lowering(every[name], *structs())
    assert kernels_for("cuda", every[name], *structs()) == 0
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H200")
    assert kernels_for("cuda", every[name], *structs()) >= 1
    assert kernels_for("cpu", every[name], *structs()) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", CALLS)
def test_a_mesh_of_h200s_decides_for_what_lies_on_it(name: str, dtype: Any) -> None:
    """float32 operands of products are XLA's, float32 logits that are given are not."""
    mesh = h200.h200_mesh()
    arguments = [h200.shaped(mesh, x.shape, x.dtype) for x in structs(dtype)]
    served = dtype == jnp.bfloat16 or "stored" in name
    assert (kernels(jax.jit(anew(CALLS[name])).lower(*arguments)) >= 1) == served
    assert not left_to_lowering(CALLS[name], *arguments)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (loss(), structs(jnp.float32)),
        (loss(scratch_bytes=6_000), structs()),
        (lambda h, w, t: linear_top_k(h, w, 5, scratch_bytes=20_000), structs()),
        (lambda h, w, t: linear_top_k(h, w, 5), structs(v=V + 1)),
        (lambda h, w, t: cross_entropy(h[:, :100], t), structs()),
        (lambda h, w, t: cross_entropy(h[:3], t[:3]), structs()),
    ],
    ids=["float32", "scratch", "top-k scratch", "top-k of 513 entries", "100 logits", "3 rows of logits"],
)
def test_what_the_kernels_cannot_serve_is_silently_xlas(local_h100: None, function: Any, arguments: Any) -> None:
    assert not left_to_lowering(function, *arguments)
    assert kernels_for("cuda", function, *arguments) == 0


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", ["the loss", "the loss of a shard", "top-k", "stored logits, each row"])
def test_in_a_shard_map_they_serve_where_axes_are_not_tracked(name: str, checked: bool) -> None:
    mesh, split, whole = h200.h200_mesh(2), PartitionSpec("gpu"), PartitionSpec()
    axes = MeshAxes(vocabulary="gpu", grad=None if checked else "outside")
    function, places, out = CALLS.get(name), (split, whole, split), split
    if name == "the loss":
        function = jax.grad(linear_cross_entropy)
    elif function is None:
        function, places, out = functools.partial(linear_cross_entropy, mesh_axes=axes), (whole, split, whole), whole
    mapped = jax.shard_map(function, mesh=mesh, in_specs=places, out_specs=out, check_vma=checked)
    arguments = [h200.shaped(mesh, x.shape, x.dtype, p) for x, p in zip(structs(), places, strict=True)]
    assert (kernels(jax.jit(mapped).lower(*arguments)) >= 1) == (not checked)


@pytest.mark.parametrize("sizes", [(512, 64, 16384), (8, 4096, 16), (1, 8, 1), (4096, 256, 16384)])
@pytest.mark.parametrize("backward", ["auto", "in_forward", "recompute"])
def test_none_is_refused_only_what_xla_is_refused(local_h100: None, sizes: tuple[int, int, int], backward: Any) -> None:
    """At every budget forward and backward can be traced, by both backends or by XLA's alone."""
    served, arguments = set(), structs(jnp.bfloat16, *sizes)
    for scratch_bytes in [None, *(int(10 ** (e / 4)) for e in range(12, 28, 3))]:
        options = {"backward": backward, "scratch_bytes": scratch_bytes}
        refused: Any = contextlib.nullcontext()
        try:
            explain(*arguments[:2], implementation="xla", **options)
        except ValueError:
            refused = pytest.raises(ValueError, match="cannot hold one row of this head")
        with refused:
            served.add(told := explain(*arguments[:2], **options).implementation)
            assert left_to_lowering(loss(**options), *arguments) == (told == "mosaic_gpu")
    assert "mosaic_gpu" in served


def test_one_mode_serves_both_platforms_and_the_kernels_choose_it(local_h100: None) -> None:
    arguments, options = structs(jnp.bfloat16, 4096, 256, 16384), {"scratch_bytes": 4 * MIB}
    modes = [explain(*arguments[:2], implementation=x, **options).backward for x in ("xla", "mosaic_gpu", None)]
    assert modes == ["recompute", "in_forward", "in_forward"]
    for platform in ("cpu", "cuda"):
        text = jax.jit(loss(**options)).trace(*arguments).lower(lowering_platforms=(platform,)).as_text(debug_info=True)
        assert "pallas_ce.in_forward" in text
        assert "pallas_ce.recompute" not in text


WIDE = structs(n=4096, h=1024, v=32768)
GPT2 = structs(h=768, v=50257)
TURNED, PADDED = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((768, 50257), (50264, 768)))
BY_ROW, TWO_LABELS = jax.ShapeDtypeStruct((4096,), jnp.float32), jax.ShapeDtypeStruct((4096, 2), jnp.int32)
UNREADABLE = (
    "its kernels read a [V, H] weight whose V is a multiple of 8, not 50257; pad it to 50264 and pass "
    "vocab_size=50257, or use 'triton' or 'xla'"
)

# A call, which implementation serves it by default, and why not the kernels.
CHOICES: list[tuple[tuple[Any, ...], dict[str, Any], str, str]] = [
    (WIDE, {}, "mosaic_gpu", "this process has NVIDIA H100; programs for other platforms take xla"),
    (WIDE, {"temperature": 0.7, "reduction": "none"}, "mosaic_gpu", ""),
    (WIDE, {"labels": TWO_LABELS, "reduction": "none"}, "mosaic_gpu", ""),
    *((WIDE, {"precision": x}, "mosaic_gpu", "") for x in ("highest", "default", "BF16_BF16_F32")),
    ((GPT2[0], PADDED), {"vocab_size": 50257}, "mosaic_gpu", ""),
    ((GPT2[0], TURNED), {"vocab_axis": 1}, "mosaic_gpu", ""),
    (GPT2, {"backward": "recompute"}, "triton", UNREADABLE),
    (GPT2, {"backward": "in_forward"}, "triton", UNREADABLE),
    (WIDE, {"reduction": "none", "temperature": BY_ROW}, "triton", "no temperature for each row"),
    (WIDE, {"dtype": jnp.float32, "precision": "high"}, "triton", "the compute dtype is float32"),
    (WIDE, {"dtype": jnp.float32}, "xla", "the compute dtype is float32"),
    (WIDE, {"precision": "TF32_TF32_F32"}, "xla", "precision=TF32_TF32_F32 asks for another algorithm"),
    (WIDE, {"scratch_bytes": 200_000, "backward": "in_forward"}, "xla", "scratch_bytes=200000 is less than the"),
]


@pytest.mark.parametrize(("arrays", "options", "served", "reason"), CHOICES)
def test_what_serves_a_call_and_why(
    local_h100: None, monkeypatch: pytest.MonkeyPatch, arrays: Any, options: dict[str, Any], served: str, reason: str
) -> None:
    """By name the kernels give their reason as an error. A precision of other products keeps them out of none."""
    if served == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))  # nor does a newer JAX
    with jax.default_matmul_precision("TF32_TF32_F32" if served == "mosaic_gpu" else None):
        told = explain(*arrays[:2], **options)
        assert told.implementation == served
        assert reason in told.implementation_reason
        if served == "mosaic_gpu":
            assert told.launches == explain(*arrays[:2], **NAMED, **options).launches != ()
            return
    assert served != "xla" or told.launches == ()
    words = f"{re.escape(reason)}|scratch_bytes=200000 cannot hold one row of this head"
    with pytest.raises(ValueError, match=words):
        explain(*arrays[:2], **NAMED, **options)


@pytest.mark.parametrize(("rows", "served"), [(V, True), (V + 8, False)])
def test_explain_reads_the_arrays_mesh_and_how_they_are_split(rows: int, served: bool) -> None:
    """Two parts of 260 rows are no multiples of 8."""
    mesh = h200.h200_mesh(2)
    hidden = h200.shaped(mesh, (N, H), jnp.bfloat16, PartitionSpec())
    weight = h200.shaped(mesh, (rows, H), jnp.bfloat16, PartitionSpec("gpu"))
    told = explain(hidden, weight, vocab_size=V - 3 if served else V)
    assert told.implementation == ("mosaic_gpu" if served else "xla")
    refusal = "pad it to 264 and pass vocab_size=260, or use 'triton' or 'xla'"
    assert told.implementation_reason.endswith("the call is for NVIDIA H200" if served else refusal)


def test_other_devices_keep_the_kernels_out_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of the process, of a mesh, of the program, and of the arrays."""
    words = "'mosaic_gpu' cannot serve this call: its kernels are for Hopper GPUs, .*"
    told = explain(*WIDE[:2])
    assert told.implementation_reason == "it serves every platform, and this process has no CUDA device"
    with pytest.raises(ValueError, match=f"{words}and this process has no CUDA device; use 'xla'"):
        jax.eval_shape(loss(**NAMED), *structs())
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA H200")
    with pytest.raises(ValueError, match=r"'mosaic_gpu' .* for CUDA devices, and the arrays lie on a CPU; use 'xla'"):
        linear_cross_entropy(*(jnp.ones(x.shape, x.dtype) for x in structs()), **NAMED)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    arguments = [h200.shaped(mesh, x.shape, x.dtype) for x in structs()]
    assert not left_to_lowering(loss(), *arguments)
    with pytest.raises(ValueError, match=r"and this one is cpu; use 'xla'"):
        explain(*arguments[:2], **NAMED)
    with ambient("Tesla V100-SXM2-16GB"):
        assert not left_to_lowering(loss(), *structs())
        assert kernels_for("cuda", loss(), *structs()) == 0
        told = explain(*WIDE[:2])
        assert told.implementation_reason == "no kernels of this library are for Tesla V100-SXM2-16GB"
        with pytest.raises(ValueError, match=r"its kernels are for Hopper GPUs, of compute"):
            explain(*WIDE[:2], **NAMED)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": jnp.float32}, "'mosaic_gpu' cannot serve this call: .*float32"),
        ({"precision": "F32_F32_F32"}, "precision=F32_F32_F32 asks for another algorithm; implementation='xla'"),
        ({"scratch_bytes": 50}, "scratch_bytes=50 cannot hold one row of logits"),
        ({"implementation": "reference"}, "'reference' has no top-k: use 'xla'"),
    ],
)
def test_a_top_k_that_they_cannot_serve_is_refused_in_words(local_h100: None, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda *head: linear_top_k(*head, 3, **(NAMED | options)), *structs()[:2])


def test_statistics_and_terms_that_the_kernels_do_not_compute_are_refused(
    local_h100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = None
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' does not compute \['sum_cubes'\] of a Partial"):
        epilogues.piece_partial(spec, ("max", "sum_cubes"), {}, jnp.int32(0), jnp.zeros((4, 8)), None)
    monkeypatch.setattr(dlogits_kernel, "_TRANSLATED", dlogits_kernel._TRANSLATED - {"prob_sq"})
    launching.kernel_function.cache_clear()
    gradients = jax.grad(lambda *head: linear_loss(lambda row: row.sum_sq_probs, *head, None, **NAMED))
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' has no term for \['prob_sq'\] in dlogits"):
        jax.eval_shape(gradients, *structs(jnp.float16)[:2])


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 30.0}, {"logit_softcap": 30.0, "logit_scale": 2.0}])
@pytest.mark.parametrize(
    ("mode", "kernels"), [("", ("forward",)), ("in_forward", ("stash",)), ("recompute", ("forward", "dlogits"))]
)
def test_the_kernels_that_are_told_are_launched_with_those_tiles(
    local_h100: None, mode: Any, kernels: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, run = {}, launching.run

    def recorded(name: str, product: Any, *others: Any, **named: Any) -> Any:
        launched.setdefault(name, (product.config.tile_rows, product.config.columns))
        return run(name, product, *others, **named)

    monkeypatch.setattr(launching, "run", recorded)
    arrays = structs(n=8192, h=1024, v=131072)
    function = (
        loss(backward=mode, **NAMED, **options) if mode else lambda *x: linear_cross_entropy(*x, **NAMED, **options)
    )
    jax.eval_shape(function, *arrays)
    told = explain(*arrays[:2], **NAMED, **({"backward": mode} if mode else {"differentiate": ()}), **options)
    assert [found.kernel for found in told.launches] == [f"pallas_ce_{name}" for name in kernels]
    for kernel, *tile in told.launches:
        assert launched[kernel] == tuple(tile)
        assert f"{kernel}: tiles of {tile[0]} x {tile[1]}\n" in str(told)


@pytest.mark.parametrize(
    ("v", "h", "axis", "copied", "mode"),
    [
        (50256, 768, 0, False, "in_forward"),
        (50304, 768, 1, False, "in_forward"),
        (50257, 768, 1, True, "recompute"),
        (201088, 2880, 1, False, "in_forward"),
        (1024, 100, 0, True, "in_forward"),
    ],
)
def test_copies_of_the_weight_are_told_and_slow_products_left_to_the_other_mode(
    local_h100: None, v: int, h: int, axis: int, copied: bool, mode: str
) -> None:
    """A weight is copied that cannot be read in place; of rows of no multiple of 8 products take twice as long."""
    shape = (v, h) if axis == 0 else (h, v)
    told = explain(structs(n=8192, h=h)[0], jax.ShapeDtypeStruct(shape, jnp.bfloat16), vocab_axis=axis, **NAMED)
    assert told.backward == mode
    assert told.weight_copy_bytes == (2 * v * h if copied else 0)
    assert told.scratch_bytes >= told.weight_copy_bytes
    assert ("weight's copy" in str(told)) == copied
