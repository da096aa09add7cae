"""Where `implementation=None` takes the Triton kernel: on the GPUs of its table, where it can serve.

Of Hopper's, whose own kernels come first, `tests/mosaic_gpu/test_default.py` has the tests.

Nothing runs on a GPU here: programs are traced and lowered for GPUs that are not there.
"""

import importlib.util
import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_ce import cross_entropy, explain, linear_cross_entropy, linear_log_probs, linear_top_k
from pallas_ce.backends import device as targets
from pallas_ce.backends import packages
from pallas_ce.dispatch import select
from tests import compile_for_h200 as h200

pytest.importorskip("triton", reason="needs the triton extra")

N, H, V = 64, 128, 512
COMMAND = "python -m pallas_ce.check_device"
GPUS = {
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.6": "NVIDIA A10",
    "8.9": "NVIDIA L4",
    "10.0": "NVIDIA B200",
    "10.3": "NVIDIA B300 SXM6 AC",
    "12.0": "NVIDIA GeForce RTX 5090",
    "12.1": "NVIDIA GB10",
}
NEVER_RUN = pytest.mark.filterwarnings("ignore:implementation='triton' is compiled, but never run:UserWarning")


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_TOLD", set())


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is taken to have an A100, with which nothing can be run."""
    monkeypatch.setattr(targets, "local_cuda", lambda: GPUS["8.0"])


def structs(dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    shapes = (((N, H), dtype), ((V, H), dtype), ((N,), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def ambient(kind: str) -> Any:
    device = AbstractDevice(kind, 100, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def launches_for(platform: str, function: Any, *arguments: Any) -> int:
    h200.needs_plugin()
    traced = jax.jit(lambda *arguments: function(*arguments)).trace(*arguments)
    return int(traced.lower(lowering_platforms=(platform,)).as_text().count("@triton_kernel_call_ffi"))


@NEVER_RUN
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("capability", GPUS)
def test_programs_for_each_architecture_of_the_table_take_it(capability: str, dtype: Any) -> None:
    assert targets.compute_capability(GPUS[capability]) == capability
    with ambient(GPUS[capability]):
        told = explain(*structs(dtype), precision="high")
    assert told.implementation == "triton"
    assert told.implementation_reason.startswith(
        f"the call is for {GPUS[capability]}; compiled, but never run on a GPU"
    )


def loss(**options: Any) -> Any:
    return jax.value_and_grad(lambda *arrays: linear_cross_entropy(*arrays, **options), (0, 1))


CALLS: dict[str, Any] = {
    "the loss": linear_cross_entropy,
    "gradients, in_forward": loss(backward="in_forward"),
    "gradients, recompute": loss(backward="recompute"),
    "K labels": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, jnp.stack([t, t], 1)))),
    "row temperatures": jax.grad(lambda h, w, t: jnp.sum(linear_log_probs(h, w, t, temperature=jnp.ones(N)))),
    "a batch": lambda h, w, t: jax.vmap(loss(), (0, None, 0))(h.reshape(4, -1, H), w, t.reshape(4, -1)),
}


@NEVER_RUN
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_one_trace_has_the_kernel_for_cuda_and_none_for_the_cpu(function: Any, dtype: Any) -> None:
    with jax.default_matmul_precision("tensorfloat32"):
        assert launches_for("cuda", function, *structs(dtype)) >= 1
        assert launches_for("cpu", function, *structs(dtype)) == 0


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    "function",
    [
        lambda h, w, t: linear_top_k(h, w, 5),
        jax.grad(lambda h, w, t: cross_entropy(h, t)),
        lambda h, w, t: linear_cross_entropy(h, w, t, dtype=jnp.float32),
    ],
    ids=["top-k", "stored logits", "full float32"],
)
def test_what_it_cannot_serve_is_silently_xlas(function: Any) -> None:
    assert launches_for("cuda", function, *structs()) == 0


@pytest.mark.usefixtures("ampere")
def test_the_first_default_call_on_an_architecture_that_it_was_never_run_on_tells_so() -> None:
    with pytest.warns(
        UserWarning, match=rf"'triton' is compiled, but never run .* capability 8\.0: `{COMMAND}`"
    ) as told:
        jax.eval_shape(lambda *arrays: linear_cross_entropy(*arrays), *structs())
    assert [warning.filename for warning in told if "never run" in str(warning.message)] == [__file__]
    with warnings.catch_warnings(action="error"):
        jax.eval_shape(loss(), *structs())


@pytest.mark.usefixtures("ampere")
def test_explain_tells_so_of_a_named_implementation_too() -> None:
    told = explain(*structs(), implementation="triton").implementation_reason
    assert (
        told
        == f"asked for by name; compiled, but never run on a GPU of compute capability 8.0: `{COMMAND}` checks it there"
    )
    assert explain(*structs(), implementation="xla").implementation_reason == "asked for by name"


def test_nothing_is_told_of_a_hopper_gpu() -> None:
    with ambient("NVIDIA H200"):
        assert explain(*structs()).implementation_reason.split(";")[0] == "the call is for NVIDIA H200"
        assert "never run" not in explain(*structs()).implementation_reason
        assert explain(*structs(), implementation="triton").implementation_reason == "asked for by name"


@pytest.fixture(params=["missing", "3.5.1", "3.10.0"])
def unusable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Triton is not installed, or in a version that does not work; yields the message."""
    if request.param == "missing":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        yield "it needs the package triton: pip install 'triton>=3.6,<3.10'"
    else:
        monkeypatch.setattr(packages, "_version", lambda name: request.param)
        yield f"it does not work with triton {request.param}: pip install 'triton>=3.6,<3.10'"


@pytest.mark.usefixtures("ampere")
def test_without_a_triton_that_works_xla_serves_and_one_warning_tells_what_to_install(unusable: str) -> None:
    expected = f"implementation='triton' is for {GPUS['8.0']}, but {unusable}; 'xla' serves instead"
    with pytest.warns(UserWarning, match=re.escape(expected)):
        explanation = explain(*structs())
    assert launches_for("cuda", loss(), *structs()) == 0  # a second warning would be an error
    assert explanation.implementation == "xla"
    assert explanation.implementation_reason == f"not triton: {unusable}"
    with pytest.raises(ValueError, match=re.escape(f"'triton' cannot serve this call: {unusable}")):
        explain(*structs(), implementation="triton")


@pytest.mark.usefixtures("ampere", "unusable")
@pytest.mark.parametrize(
    "function",
    [lambda h, w, t: linear_top_k(h, w, 5), lambda h, w, t: linear_cross_entropy(h, w, t, dtype=jnp.float32)],
    ids=["top-k", "full float32"],
)
def test_a_call_that_it_would_not_serve_anyway_is_no_reason_to_install_it(function: Any) -> None:
    assert launches_for("cuda", function, *structs()) == 0


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.7.0+git1234", ""])
def test_versions_that_work_or_do_not_tell_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_version", lambda name: version)
    with ambient("NVIDIA H200"):
        assert explain(*structs(), implementation="triton").implementation == "triton"


@NEVER_RUN
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": None},
        {"return_metrics": True},
        {"scratch_bytes": 2**20},
        {"vocab_axis": 1},
        {"vocab_size": V - 3},
        {"logit_softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4},
        {"token_weights": jnp.ones(N), "class_weights": jnp.ones(V), "normalizer": 7.0},
    ],
    ids=lambda options: "+".join(options),
)
def test_both_backends_return_the_same_types(options: dict[str, Any], backward: str) -> None:
    """JAX raises where they do not; programs for the CPU and the GPU come from one trace."""

    def function(hidden: Any, weight: Any, bias: Any, scale: Any, labels: Any) -> Any:
        weight = weight.T if options.get("vocab_axis") else weight
        return linear_cross_entropy(hidden, weight, labels, bias=bias, logit_scale=scale, backward=backward, **options)

    hidden, weight, labels = structs()
    of_head = (jax.ShapeDtypeStruct((V,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32))
    differentiated = jax.value_and_grad(function, (0, 1, 2, 3), has_aux="return_metrics" in options)
    assert "platform_index" in str(jax.make_jaxpr(differentiated)(hidden, weight, *of_head, labels))


@NEVER_RUN
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("backward", ["auto", "in_forward", "recompute"])
@pytest.mark.parametrize("scratch_bytes", [1_000, 20_000, 60_000, 200_000, 2**20, 2**23])
def test_none_is_refused_only_what_xla_is_refused(scratch_bytes: int, backward: Any) -> None:
    options: dict[str, Any] = {"scratch_bytes": scratch_bytes, "backward": backward}
    shapes = [((512, 64), jnp.bfloat16), ((16384, 64), jnp.bfloat16), ((512,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    try:
        explain(*arguments[:2], implementation="xla", **options)
    except ValueError:
        with pytest.raises(ValueError, match="cannot hold one row of this head"):
            explain(*arguments[:2], **options)
    else:
        told = explain(*arguments[:2], **options)
        program = str(jax.make_jaxpr(loss(**options))(*arguments))
        assert ("platform_index" in program) == (told.implementation == "triton")


@pytest.mark.parametrize("capability", ["7.5", "11.0"])
def test_an_architecture_that_nothing_is_for_is_xlas_and_named_where_triton_is_asked_for(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA Test")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    monkeypatch.setattr(targets, "local_cuda", lambda: gpu.device_kind)
    told = explain(*structs())
    assert (told.implementation, told.implementation_reason) == (
        "xla",
        "no kernels of this library are for NVIDIA Test",
    )
    with pytest.raises(ValueError, match=rf"its table has tiles for .*, and this device is of {capability}; use 'xla'"):
        explain(*structs(), implementation="triton")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_mesh_of_gpus_that_are_not_there_tells_what_the_kernel_is_compiled_for(gpus: int) -> None:
    mesh = h200.h200_mesh(gpus)
    arguments = [h200.shaped(mesh, x.shape, x.dtype) for x in structs()]
    compiled = jax.jit(loss(implementation="triton")).lower(*arguments).compile()
    assert '"triton_kernel_call_ffi"' in compiled.as_text()
