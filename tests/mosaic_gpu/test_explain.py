"""`explain` of the Hopper kernels: which a call launches, a copy of the weight, memory as the compiler has it."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_ce import Explanation, explain, linear_cross_entropy
from pallas_ce.backends.mosaic_gpu.gemm import launch as launching
from tests import compile_for_h200 as h200

MIB = 2**20

pytestmark = pytest.mark.usefixtures("local_h100")


def structs(n: int, v: int, h: int, axis: int = 0) -> list[Any]:
    shapes = [((n, h), jnp.bfloat16), ((v, h) if axis == 0 else (h, v), jnp.bfloat16), ((n,), jnp.int32)]
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def explained(n: int, v: int, h: int, axis: int = 0, **options: Any) -> Explanation:
    return explain(*structs(n, v, h, axis)[:2], vocab_axis=axis, implementation="mosaic_gpu", **options)


def loss_of(**options: Any) -> Any:
    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, implementation="mosaic_gpu", **options)

    return loss


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({"differentiate": ()}, ["pallas_ce_forward"]),
        ({"backward": "in_forward"}, ["pallas_ce_stash"]),
        ({"backward": "recompute"}, ["pallas_ce_forward", "pallas_ce_dlogits"]),
    ],
)
def test_the_kernels_of_each_mode_are_told_with_their_tiles(options: dict[str, Any], kernels: list[str]) -> None:
    told = explained(8192, 131072, 4096, **options)
    assert [launch.kernel for launch in told.launches] == kernels
    lines = [line for line in str(told).splitlines() if line.startswith("kernel")]
    for launch, line in zip(told.launches, lines, strict=True):
        assert line == f"kernel          {launch.kernel}: tiles of {launch.tile_rows} x {launch.tile_columns}"


@pytest.mark.parametrize(("v", "mode"), [(50257, "recompute"), (50304, "in_forward")])
def test_auto_recomputes_where_products_over_the_whole_vocabulary_are_slow(v: int, mode: str) -> None:
    told = explained(8192, v, 768, axis=1)
    assert told.backward == mode
    assert ("no multiple of 8, take twice as long" in str(told)) == (mode == "recompute")


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 30.0}, {"logit_softcap": 30.0, "logit_scale": 2.0}])
@pytest.mark.parametrize("mode", [None, "in_forward", "recompute"])
def test_what_is_told_is_what_is_launched(mode: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = 8192, 131072, 1024
    launched, run = [], launching.run

    def recorded(name: str, product: Any, *others: Any, **named: Any) -> Any:
        launched.append((name, product.config.tile_rows, product.config.columns))
        return run(name, product, *others, **named)

    monkeypatch.setattr(launching, "run", recorded)
    loss = loss_of(backward=mode or "auto", **options)
    jax.eval_shape(jax.value_and_grad(loss, (0, 1)) if mode else loss, *structs(*sizes))
    backward = {"backward": mode} if mode else {"differentiate": ()}
    for kernel in explained(*sizes, **backward, **options).launches:
        assert next(found for found in launched if found[0] == kernel[0]) == kernel


def test_whether_rows_are_skipped_or_not_exponentials_are_one_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = list[str](), plgpu.kernel

    def seen(body: Any, **given: Any) -> Any:
        made.append(body.__name__)
        return plain(body, **given)

    monkeypatch.setattr(plgpu, "kernel", seen)
    launching.kernel_function.cache_clear()
    gradients = jax.value_and_grad(loss_of(backward="in_forward"), (0, 1))
    traced = str(jax.make_jaxpr(gradients)(*structs(8192, 131072, 4096)))
    assert traced.count("name=pallas_ce_stash") >= 2
    assert made.count("pallas_ce_stash") == 1


@pytest.mark.parametrize(
    ("v", "h", "axis", "copies"),
    [(50256, 768, 0, False), (50257, 768, 1, True), (201088, 2880, 1, False), (1024, 100, 0, True)],
)
def test_a_copy_of_a_weight_that_cannot_be_read_in_place_is_told(v: int, h: int, axis: int, copies: bool) -> None:
    told = explained(8192, v, h, axis, backward="recompute")
    copied = 2 * v * h if copies else 0
    assert told.weight_copy_bytes == copied
    assert told.scratch_bytes >= copied
    assert ("weight's copy" in str(told)) == bool(copied)


def test_xla_launches_no_kernels_and_copies_nothing() -> None:
    told = explain(jnp.zeros((8, 8)), jnp.zeros((16, 8)), implementation="xla")
    assert (told.launches, told.weight_copy_bytes) == ((), 0)
    assert "kernel " not in str(told)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("n", "v", "h", "axis"), [(8192, 131072, 4096, 0), (8192, 50257, 768, 1)])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_the_predicted_peak_is_what_the_compiler_assigns_or_a_little_more(
    n: int, v: int, h: int, axis: int, backward: Any
) -> None:
    mesh, told = h200.h200_mesh(), explained(n, v, h, axis, backward=backward)
    given = [h200.shaped(mesh, x.shape, x.dtype) for x in structs(n, v, h, axis)]
    function = jax.value_and_grad(loss_of(backward=backward, vocab_axis=axis), (0, 1))
    memory = h200.compile_for_h200(function, *given)[0].memory_analysis()
    used = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert 0.4 <= used / told.peak_bytes <= 1.1, f"{used / MIB:.0f} MiB, {told}"
