"""Which backend serves a call by default on which GPU, in which words others refuse it, and what `explain` tells.

Nothing runs on a GPU here: programs are traced and lowered for GPUs that are only compiled for, or in a process that
pretends to have one.
"""

import contextlib
import functools
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
    linear_distillation,
    linear_log_probs,
    linear_loss,
    linear_row_statistics,
    linear_top_k,
    mean_squared_lse,
    selective_log_softmax,
)
from pallas_ce.backends import device as targets
from pallas_ce.backends import packages, select
from pallas_ce.backends.mosaic_gpu.gemm import launch as launching
from pallas_ce.backends.mosaic_gpu.kernels import epilogues
from tests import compile_for_h200 as h200

N, H, V = 64, 128, 512
MIB = 2**20
COMMAND = "python -m pallas_ce.check_device"
HOPPER, AMPERE = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
NEVER_RUN_ON = {
    capability: f"NVIDIA {gpus.models[0].replace('x', '0')}"
    for capability, gpus in targets.GPUS.items()
    if gpus.kernels == {"triton": None}
}

pytestmark = pytest.mark.filterwarnings("ignore:implementation='triton' is compiled, but never run:UserWarning")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the triton extra")
on_each_gpu = pytest.mark.parametrize("gpu", [HOPPER, pytest.param(AMPERE, marks=needs_triton)], indirect=True)
on_hopper = pytest.mark.parametrize("gpu", [HOPPER], indirect=True)
on_ampere = pytest.mark.parametrize("gpu", [pytest.param(AMPERE, marks=needs_triton)], indirect=True)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_TOLD", set())


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process is taken to have that GPU, with which nothing can be run, or None."""
    monkeypatch.setattr(targets, "local_cuda", lambda: request.param)
    return request.param


def ambient(kind: str) -> Any:
    """Programs are for that GPU."""
    device = AbstractDevice(kind, 100, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def structs(dtype: Any = jnp.bfloat16, n: int = N, h: int = H, v: int = V) -> tuple[Any, ...]:
    shapes = (((n, h), dtype), ((v, h), dtype), ((n,), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def on_mesh(mesh: Any, *specs: Any, dtype: Any = jnp.bfloat16) -> list[Any]:
    """The same arrays, on a mesh."""
    specs = specs or (PartitionSpec(),) * 3
    return [h200.shaped(mesh, x.shape, x.dtype, spec) for x, spec in zip(structs(dtype), specs, strict=True)]


def kernels_in(lowered: Any) -> set[str]:
    """The backends that a program has kernels of."""
    text = lowered.as_text()
    calls = {"mosaic_gpu": "@mosaic_gpu_v2", "triton": "@triton_kernel_call_ffi"}
    return {name for name, call in calls.items() if call in text}


def anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, without JAX's memory of how it was traced before this process pretended anything."""
    return lambda *arguments: function(*arguments)


def left_to_lowering(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the program is traced by two backends; JAX raises where their results differ in type."""
    return "platform_index" in str(jax.make_jaxpr(anew(function))(*arguments))


def assert_served(served: set[str], function: Callable[..., Any], *arguments: Any) -> None:
    """By those kernels on CUDA, by none on the CPU, in one trace by two backends; by XLA in a trace by one.

    Traced under JAX's strictest rules for dtypes and ranks, under which a program may run.
    """
    h200.needs_plugin()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        traced = jax.jit(anew(function)).trace(*arguments)
        found = [kernels_in(traced.lower(lowering_platforms=(platform,))) for platform in ("cuda", "cpu")]
    assert found == [served, set()]
    assert ("platform_index" in str(traced.jaxpr)) == bool(served)


def loss(**options: Any) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *given: linear_cross_entropy(*given, **options), argnums=(0, 1))


def with_every_option(backward: Any) -> Callable[..., Any]:
    """With metrics, of a transposed weight, and all gradients."""

    def run(hidden: Any, weight: Any, labels: Any) -> Any:
        def total(hidden: Any, weight: Any, bias: Any, scale: Any) -> Any:
            return linear_cross_entropy(
                hidden, weight, labels, bias=bias, logit_scale=scale, vocab_axis=1, vocab_size=V - 3,
                logit_softcap=30.0, label_smoothing=0.1, z_loss=1e-4, token_weights=np.ones(N), normalizer=7.0,
                class_weights=np.ones(V - 3), ignore_index=None, return_metrics=True, backward=backward,
            )  # fmt: skip

        return jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(hidden, weight.T, jnp.ones(V), jnp.float32(2))

    return run


# Functions of hidden, weight and labels. Programs that are traced by two backends show that their types are the same.
CALLS: dict[str, Callable[..., Any]] = {
    "gradients, in_forward": loss(backward="in_forward"),
    "the loss": linear_cross_entropy,
    "gradients, recompute": loss(backward="recompute"),
    "every option, in_forward": with_every_option("in_forward"),
    "every option, recompute": with_every_option("recompute"),
    "hidden's gradient": jax.grad(functools.partial(linear_cross_entropy, backward="in_forward")),
    "the weight's gradient": jax.grad(functools.partial(linear_cross_entropy, backward="recompute"), argnums=1),
    "any loss": jax.grad(lambda *given: linear_loss(lambda row: row.entropy * row.log_prob, *given)),
    "row statistics": lambda h, w, t: linear_row_statistics(h, w, t, statistics=("lse", "entropy")),
    "log-probabilities": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, t, temperature=0.7)), argnums=1),
    "K labels": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, jnp.stack([t, t], 1)))),
    "row temperatures": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, t, temperature=jnp.ones(N)))),
    "a batch": lambda h, w, t: jax.vmap(loss(), (0, None, 0))(h.reshape(4, -1, H), w, t.reshape(4, -1)),
    "heads": lambda h, w, t: jax.vmap(loss())(jnp.stack([h, h]), jnp.stack([w, w]), jnp.stack([t, t])),
    "scan": lambda h, w, t: jax.lax.scan(lambda c, x: (c, loss()(*x)), 0, (h[None], w[None], t[None])),
    "checkpoint": lambda *given: jax.checkpoint(loss())(*given),
    "top-k": lambda h, w, t: linear_top_k(h, w, 5, temperature=jnp.ones(len(h))),
    "stored logits": lambda h, w, t: jax.value_and_grad(cross_entropy)(h, t),
    "stored logits, each row": jax.grad(lambda h, w, t: jnp.sum(cross_entropy(h, t, reduction="none"))),
    "lse of stored logits": lambda h, w, t: mean_squared_lse(h, t),
    "entries of stored logits": jax.grad(lambda h, w, t: jnp.sum(selective_log_softmax(h, t))),
}


def serving(gpu: str, name: str, dtype: Any = jnp.bfloat16) -> set[str]:
    """What serves a call there; float32 operands of products are not the Hopper kernels', float32 logits are."""
    if gpu == AMPERE:
        return set() if "stored" in name or name == "top-k" else {"triton"}
    if name == "row temperatures":
        return {"triton"} if importlib.util.find_spec("triton") else set()
    return {"mosaic_gpu"} if dtype == jnp.bfloat16 or "stored" in name else set()


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("gpu", [HOPPER, pytest.param(AMPERE, marks=needs_triton), None], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_one_trace_has_the_kernels_for_cuda_and_none_for_the_cpu(name: str, gpu: str | None) -> None:
    """Without a GPU at hand nothing is traced twice."""
    assert_served(serving(gpu, name) if gpu else set[str](), CALLS[name], *structs())


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "row temperatures"])
def test_a_mesh_of_h200s_decides_for_what_lies_on_it(name: str, dtype: Any) -> None:
    arguments = on_mesh(h200.h200_mesh(), dtype=dtype)
    assert kernels_in(jax.jit(anew(CALLS[name])).lower(*arguments)) == serving(HOPPER, name, dtype)
    assert not left_to_lowering(CALLS[name], *arguments)


@on_hopper
def test_many_targets_of_a_row_are_xlas(gpu: str) -> None:
    """From V/140 of them on; not of so few rows that those are fewer entries than the vocabulary has."""
    kernels = {"mosaic_gpu"}
    for k, n, served in ((3, 512, kernels), (4, 512, set[str]()), (4, 128, kernels)):
        assert_served(served, lambda h, w, t, k=k: linear_log_probs(h, w, jnp.stack([t] * k, 1)), *structs(n=n))


@pytest.mark.nightly(keep=4)
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
    assert bool(kernels_in(jax.jit(mapped).lower(*on_mesh(mesh, *places)))) == (not checked)


@pytest.mark.nightly(keep=1)
@on_each_gpu
@pytest.mark.parametrize("sizes", [(512, 64, 16384), (8, 4096, 16), (1, 16, 8), (4096, 256, 16384)])
@pytest.mark.parametrize("backward", ["auto", "in_forward", "recompute"])
def test_none_is_refused_only_what_xla_is_refused(sizes: tuple[int, int, int], backward: Any, gpu: str) -> None:
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
            assert left_to_lowering(loss(**options), *arguments) == (told != "xla")
    assert served & serving(gpu, "the loss")


@on_hopper
def test_one_mode_serves_both_platforms_and_the_kernels_choose_it(gpu: str) -> None:
    arguments, options = structs(jnp.bfloat16, 4096, 256, 16384), {"scratch_bytes": 4 * MIB}
    modes = [explain(*arguments[:2], implementation=x, **options).backward for x in ("xla", "mosaic_gpu", None)]
    assert modes == ["recompute", "in_forward", "in_forward"]
    for platform in ("cpu", "cuda"):
        text = jax.jit(loss(**options)).trace(*arguments).lower(lowering_platforms=(platform,)).as_text(debug_info=True)
        assert "pallas_ce.in_forward" in text
        assert "pallas_ce.recompute" not in text


def both_heads(**options: Any) -> Callable[..., Any]:
    return jax.grad(lambda h, w, _: linear_distillation(h, w, 2 * h, w, **options), (0, 1))


@on_each_gpu
@pytest.mark.parametrize(
    ("function", "arguments", "served"),
    [
        (loss(dtype=jnp.float32), structs(), set()),
        (lambda h, w, t: linear_top_k(h, w, 5, scratch_bytes=20_000), structs(), set()),
        (lambda h, w, t: linear_top_k(h, w, 5), structs(v=V + 1), set()),
        (lambda h, w, t: cross_entropy(h[:, :100], t), structs(), set()),
        (lambda h, w, t: cross_entropy(h[:3], t[:3]), structs(), set()),
        pytest.param(both_heads(), structs(), {"triton"}, marks=needs_triton),
        pytest.param(both_heads(scratch_bytes=20_000), structs(), set(), marks=needs_triton),
        pytest.param(both_heads(teacher_dtype=jnp.float32), structs(), set(), marks=needs_triton),
    ],
    ids=["float32", "top-k scratch", "top-k of 513 entries", "100 logits", "3 rows of logits", "both heads",
         "both heads' scratch", "a float32 teacher"],
)  # fmt: skip
def test_what_no_kernel_can_serve_is_silently_xlas_and_two_heads_are_tritons(
    function: Any, arguments: Any, served: set[str], gpu: str
) -> None:
    """Triton serves both heads or neither."""
    assert_served(served, function, *arguments)


WIDE, GPT2 = structs(n=4096, h=1024, v=32768)[:2], structs(h=768, v=50257)[:2]
BY_ROW, TWO_LABELS = jax.ShapeDtypeStruct((4096,), jnp.float32), jax.ShapeDtypeStruct((4096, 2), jnp.int32)


def weight(*shape: int) -> tuple[Any, Any]:
    """GPT-2's hidden states, and another weight."""
    return GPT2[0], jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def unreadable(layout: str, multiple: int, padded: int) -> str:
    return (
        f"its kernels read a {layout} weight whose V is a multiple of {multiple}, not 50257; pad it to {padded} and "
        "pass vocab_size=50257, or use 'triton' or 'xla'"
    )


# A call, which implementation serves it on a Hopper GPU by default, and why not the Hopper kernels.
CHOICES: list[tuple[tuple[Any, ...], dict[str, Any], str, str]] = [
    (WIDE, {}, "mosaic_gpu", "this process has NVIDIA H200; programs for other platforms take xla"),
    (WIDE, {"temperature": 0.7, "reduction": "none"}, "mosaic_gpu", ""),
    (WIDE, {"labels": TWO_LABELS, "reduction": "none"}, "mosaic_gpu", ""),
    *((WIDE, {"precision": x}, "mosaic_gpu", "") for x in ("highest", "default", "BF16_BF16_F32")),
    (weight(50264, 768), {"vocab_size": 50257}, "mosaic_gpu", ""),
    (weight(768, 50272), {"vocab_size": 50257, "vocab_axis": 1}, "mosaic_gpu", ""),
    (weight(768, 50257), {"vocab_axis": 1}, "triton", unreadable("[H, V]", 16, 50272)),
    (GPT2, {"backward": "recompute"}, "triton", unreadable("[V, H]", 8, 50264)),
    (GPT2, {"backward": "in_forward"}, "triton", unreadable("[V, H]", 8, 50264)),
    (structs(h=760)[:2], {}, "triton", "whose H is a multiple of 16, not 760; use 'triton' or 'xla'"),
    (WIDE, {"reduction": "none", "temperature": BY_ROW}, "triton", "no temperature for each row"),
    (WIDE, {"dtype": jnp.float32, "precision": "high"}, "triton", "the compute dtype is float32"),
    (WIDE, {"dtype": jnp.float32}, "xla", "the compute dtype is float32"),
    (WIDE, {"vocab_scale": jax.ShapeDtypeStruct((WIDE[1].shape[0],), jnp.float32)}, "xla", "no scale for each"),
    (WIDE, {"precision": "TF32_TF32_F32"}, "xla", "precision=TF32_TF32_F32 asks for another algorithm"),
    (WIDE, {"scratch_bytes": 200_000, "backward": "in_forward"}, "xla", "scratch_bytes=200000 is less than the"),
]
NAMED: Any = {"implementation": "mosaic_gpu"}


@on_each_gpu
@pytest.mark.parametrize(
    ("v", "dtype", "mode"),
    [(50257, jnp.bfloat16, "recompute"), (50264, jnp.bfloat16, "in_forward"), (50257, jnp.float32, "in_forward")],
)
def test_stored_rows_that_are_not_aligned_are_made_again(gpu: str, v: int, dtype: Any, mode: str) -> None:
    pytest.importorskip("triton")
    told = explain(
        *structs(h=768, v=v, dtype=dtype)[:2],
        implementation="triton",
        precision="high" if dtype == jnp.float32 else None,
    )
    assert told.backward == mode


@on_hopper
@pytest.mark.parametrize(("arrays", "options", "served", "reason"), CHOICES)
def test_what_serves_a_call_and_why(
    gpu: str, monkeypatch: pytest.MonkeyPatch, arrays: Any, options: dict[str, Any], served: str, reason: str
) -> None:
    """By name the kernels give their reason as an error. A precision of other products keeps them out of none."""
    if served == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))  # nor does a newer JAX
    with jax.default_matmul_precision("TF32_TF32_F32" if served == "mosaic_gpu" else None):
        told = explain(*arrays, **options)
        assert told.implementation == served
        assert reason in told.implementation_reason
        if served == "mosaic_gpu":
            assert told.launches == explain(*arrays, **NAMED, **options).launches != ()
            return
    assert served != "xla" or told.launches == ()
    words = f"{re.escape(reason)}|scratch_bytes=200000 cannot hold one row of this head"
    with pytest.raises(ValueError, match=words):
        explain(*arrays, **NAMED, **options)


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
    words = "'mosaic_gpu' cannot serve this call: its kernels are for CUDA devices, "
    assert explain(*WIDE).implementation_reason == "it serves every platform, and this process has no CUDA device"
    with pytest.raises(ValueError, match=f"{words}and this process has none; use 'xla'"):
        jax.eval_shape(loss(**NAMED), *structs())
    monkeypatch.setattr(targets, "local_cuda", lambda: HOPPER)
    with pytest.raises(ValueError, match=r"'mosaic_gpu' .* for CUDA devices, and the arrays lie on a CPU; use 'xla'"):
        linear_cross_entropy(*(jnp.ones(x.shape, x.dtype) for x in structs()), **NAMED)
    arguments = on_mesh(jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("x",)))
    assert not left_to_lowering(loss(), *arguments)
    with pytest.raises(ValueError, match=r"and this one is cpu; use 'xla'"):
        explain(*arguments[:2], **NAMED)
    with ambient("Tesla V100-SXM2-16GB"):
        assert_served(set(), loss(), *structs())
        assert explain(*WIDE).implementation_reason == "no kernels of this library are for Tesla V100-SXM2-16GB"
        with pytest.raises(ValueError, match=r"for GPUs of compute capability 9\.0, and this one is Tesla V100"):
            explain(*WIDE, **NAMED)


@on_hopper
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": jnp.float32}, "'mosaic_gpu' cannot serve this call: .*float32"),
        ({"precision": "F32_F32_F32"}, "precision=F32_F32_F32 asks for another algorithm; implementation='xla'"),
        ({"scratch_bytes": 50}, "scratch_bytes=50 cannot hold one row of logits"),
        ({"implementation": "reference"}, "'reference' has no top-k: use 'xla'"),
    ],
)
def test_a_top_k_that_they_cannot_serve_is_refused_in_words(gpu: str, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda *head: linear_top_k(*head, 3, **(NAMED | options)), *structs()[:2])


@on_hopper
def test_statistics_and_terms_that_the_kernels_do_not_compute_are_refused(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = None
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' does not compute \['sum_cubes'\] of a Partial"):
        epilogues.piece_partial(spec, ("max", "sum_cubes"), {}, jnp.int32(0), jnp.zeros((4, 8)), None)
    monkeypatch.setattr(epilogues, "_TRANSLATED", epilogues._TRANSLATED - {"prob_sq"})
    launching.kernel_function.cache_clear()
    gradients = jax.grad(lambda *head: linear_loss(lambda row: row.sum_sq_probs, *head, None, **NAMED))
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' has no term for \['prob_sq'\] in dlogits"):
        jax.eval_shape(gradients, *structs(jnp.float16)[:2])


@pytest.mark.nightly(keep=4)
@on_hopper
@pytest.mark.parametrize("options", [{}, {"logit_softcap": 30.0}, {"logit_softcap": 30.0, "logit_scale": 2.0}])
@pytest.mark.parametrize(
    ("mode", "kernels"), [("", ("forward",)), ("in_forward", ("stash",)), ("recompute", ("forward", "dlogits"))]
)
def test_the_kernels_that_are_told_are_launched_with_those_tiles(
    gpu: str, mode: Any, kernels: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, run = {}, launching.Operands.run

    def recorded(given: launching.Operands, name: str, *others: Any, **named: Any) -> Any:
        launched.setdefault(name, (given.product.config.tile_rows, given.product.config.columns))
        return run(given, name, *others, **named)

    monkeypatch.setattr(launching.Operands, "run", recorded)
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


@needs_triton
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("capability", NEVER_RUN_ON)
def test_programs_for_each_architecture_of_tritons_table_take_it(capability: str, dtype: Any) -> None:
    kind = NEVER_RUN_ON[capability]
    with ambient(kind):
        told = explain(*structs(dtype), precision="high")
    assert told.implementation == "triton"
    assert told.implementation_reason.startswith(f"the call is for {kind}; compiled, but never run on a GPU")


@on_ampere
def test_the_first_default_call_on_an_architecture_that_it_was_never_run_on_tells_so(gpu: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"'triton' is compiled, but never run .* capability 8\.0: `{COMMAND}`"
    ) as told:
        jax.eval_shape(lambda *arrays: linear_cross_entropy(*arrays), *structs())
    assert [warning.filename for warning in told if "never run" in str(warning.message)] == [__file__]
    with warnings.catch_warnings(action="error"):
        jax.eval_shape(loss(), *structs())
    told_by_name = explain(*structs(), implementation="triton").implementation_reason
    never_run = f"compiled, but never run on a GPU of compute capability 8.0: `{COMMAND}` checks it there"
    assert told_by_name == f"asked for by name; {never_run}"
    assert explain(*structs(), implementation="xla").implementation_reason == "asked for by name"


@pytest.fixture(params=["missing", "3.5.1", "3.10.0"])
def unusable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Triton is not installed, or in a version that does not work; yields the message."""
    if request.param == "missing":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
        yield "it needs the package triton: pip install 'triton>=3.6,<3.10'"
    else:
        monkeypatch.setattr(packages, "_version", lambda name: request.param)
        yield f"it does not work with triton {request.param}: pip install 'triton>=3.6,<3.10'"


@on_ampere
def test_without_a_triton_that_works_xla_serves_and_one_warning_tells_what_to_install(gpu: str, unusable: str) -> None:
    """A call that Triton would not serve anyway is no reason to install it."""
    for function in (lambda h, w, t: linear_top_k(h, w, 5), loss(dtype=jnp.float32)):
        assert_served(set(), function, *structs())
    expected = f"implementation='triton' is for {AMPERE}, but {unusable}; 'xla' serves instead"
    with pytest.warns(UserWarning, match=re.escape(expected)):
        explanation = explain(*structs())
    assert_served(set(), loss(), *structs())  # a second warning would be an error
    assert explanation.implementation == "xla"
    assert explanation.implementation_reason == f"not triton: {unusable}"
    with pytest.raises(ValueError, match=re.escape(f"'triton' cannot serve this call: {unusable}")):
        explain(*structs(), implementation="triton")


@needs_triton
@pytest.mark.parametrize("version", ["3.6.0", "3.9.0", "3.7.0+git1234", ""])
def test_versions_that_work_or_do_not_tell_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is told of a GPU that the kernels were run on."""
    monkeypatch.setattr(packages, "_version", lambda name: version)
    with ambient(HOPPER):
        assert explain(*structs(), implementation="triton").implementation_reason == "asked for by name"
        assert "never run" not in explain(*structs()).implementation_reason


@needs_triton
@pytest.mark.parametrize("capability", ["7.5", "11.0"])
def test_an_architecture_that_nothing_is_for_is_xlas_and_named_where_triton_is_asked_for(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA Test")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [found])
    monkeypatch.setattr(targets, "local_cuda", lambda: found.device_kind)
    told = explain(*structs())
    assert told.implementation == "xla"
    assert told.implementation_reason == "no kernels of this library are for NVIDIA Test"
    with pytest.raises(
        ValueError,
        match=rf"for GPUs of compute capability 8\.0, .*, and this one is NVIDIA Test, of {capability}; use 'xla'",
    ):
        explain(*structs(), implementation="triton")
