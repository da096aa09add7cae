"""What the compiler makes of it: nothing of N·V elements, and memory as promised, for the CPU, an H200 and TPUs."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_ce import MeshAxes, cross_entropy, explain, linear_cross_entropy
from pallas_ce.backends.triton import binding
from tests import compile_for_h200 as h200
from tests.compile_for_tpu import compile_for_tpu, tpu_mesh

SHAPES = [(4096, 512, 32768), (32768, 4096, 262144)]
# A backward mode, and differentiated inputs.
MODES: list[tuple[Any, tuple[str, ...]]] = [
    ("in_forward", ("hidden", "weight")), ("in_forward", ("hidden",)), ("recompute", ("hidden", "weight")), ("auto", ())
]  # fmt: skip


def _function(differentiated: tuple[str, ...], **options: Any) -> Any:
    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, **options)

    return jax.value_and_grad(loss, argnums=(0, 1)[: len(differentiated)]) if differentiated else loss


def _arguments(shape: tuple[int, int, int], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Hidden states, weight and labels."""
    n, h, v = shape
    return [jax.ShapeDtypeStruct(*x) for x in (((n, h), dtype), ((v, h), dtype), ((n,), jnp.int32))]


def _largest_new_array(text: str, parameters: set[int]) -> int:
    """Elements of the largest array in the compiled program that has no parameter's size."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
    sizes = {math.prod(int(x) for x in shape.split(",")) for shape in shapes}
    return max(sizes - parameters)


def _used(compiled: Any) -> int:
    """Bytes of results and of what a program takes beside them."""
    memory = compiled.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)


def _check(compiled: Any, arguments: Any, needed: tuple[str, ...], **options: Any) -> None:
    hidden, weight, _ = arguments
    (n, h), v, dtype = hidden.shape, weight.shape[0], weight.dtype
    told = explain(hidden, weight, differentiate=needed, **options)
    used, text = _used(compiled), compiled.as_text()
    assert 0.4 <= used / told.peak_bytes <= 1.1, f"{used=} {told=}"
    if options["implementation"] == "reference":
        return
    # By XLA on a GPU, in_forward keeps twice as wide logits.
    wide = 2 if (options["implementation"], options["backward"]) == ("xla", "in_forward") else 1
    assert told.scratch_bytes <= wide * max(512 * 2**20, 4096 * v)
    # Tiles of a small budget are smaller than blocks of tokens; and a stash may lie where the gradients will.
    narrow = 2 if options["implementation"] == "triton" else 4  # a stash has the operands' bits
    assert _largest_new_array(text, {n * h, v * h}) <= max(told.scratch_bytes, told.gradient_bytes, 8 * n) // narrow
    assert f"[{n},{v}]" not in text
    assert f"[{v},{n}]" not in text
    # Accumulators of the gradients' own dtype become the gradients: temporaries or outputs, but not both.
    in_place = dtype == jnp.float32 and options["backward"] == "in_forward"
    shared = min(told.accumulator_bytes, told.gradient_bytes) if in_place else 0
    # Rows that do not count are put in place by one pass over hidden's gradient, with an index and a mask.
    assert used <= told.peak_bytes - shared + n * h


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(("backward", "needed"), MODES)
@pytest.mark.parametrize(
    ("shape", "dtype", "scratch_bytes"),
    [(SHAPES[0], jnp.float32, None), (SHAPES[0], jnp.bfloat16, 8 * 2**20), (SHAPES[1], jnp.float32, None)],
)
def test_memory_on_the_cpu(
    shape: tuple[int, int, int], dtype: Any, scratch_bytes: int | None, backward: Any, needed: tuple[str, ...]
) -> None:
    _on_the_cpu(shape, dtype, needed, implementation="xla", backward=backward, scratch_bytes=scratch_bytes)


def test_memory_of_materialised_logits() -> None:
    _on_the_cpu(SHAPES[0], jnp.float32, ("hidden", "weight"), implementation="reference", backward="auto")


def _on_the_cpu(shape: tuple[int, int, int], dtype: Any, needed: tuple[str, ...], **options: Any) -> None:
    arguments = _arguments(shape, dtype)
    compiled = jax.jit(_function(needed, **options)).lower(*arguments).compile()
    _check(compiled, arguments, needed, **options)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(("backward", "needed"), MODES)
def test_memory_on_an_h200(backward: Any, needed: tuple[str, ...], implementation: Any) -> None:
    """A launch's scratch is a result of it, so that it allocates nothing; Triton's forward keeps little of each row."""
    arguments = h200.arrays(*_arguments(SHAPES[-1], jnp.bfloat16))
    options = {"implementation": implementation, "backward": backward}
    compiled, _ = h200.compile_for_h200(_function(needed, **options), *arguments)
    if implementation == "triton" and not needed:
        assert compiled.memory_analysis().temp_size_in_bytes <= 40 * 2**20
    else:
        _check(compiled, arguments, needed, **options)
    launches = [line for line in compiled.as_text().splitlines() if '"triton_kernel_call_ffi"' in line]
    assert bool(launches) == (implementation == "triton")
    assert all(f"u8[{132 * binding.SCRATCH_BYTES}]" in line for line in launches)


@pytest.mark.nightly
def test_the_gradient_of_a_vocab_scale_stays_within_the_scratch() -> None:
    hidden, weight, labels, scale = h200.arrays(
        *_arguments((2048, 4096, 131072), jnp.bfloat16), jax.ShapeDtypeStruct((131072,), jnp.float32)
    )
    options: dict[str, Any] = {"implementation": "xla", "backward": "in_forward"}

    def loss(hidden: jax.Array, scale: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, vocab_scale=scale, **options)

    compiled, _ = h200.compile_for_h200(jax.grad(loss, argnums=(0, 1)), hidden, scale, weight, labels)
    told = explain(hidden, weight, vocab_scale=scale, differentiate=("hidden", "vocab_scale"), **options)
    assert _used(compiled) <= 1.1 * told.peak_bytes


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("implementation", "name", "backward"),
    [*itertools.product(("mosaic_gpu", "triton"), ("mapped", "scanned"), ("in_forward", "recompute")),
     ("mosaic_gpu", "stored logits", "auto")],
)  # fmt: skip
def test_gradients_stacked_by_a_loop_are_copied(implementation: Any, name: str, backward: str) -> None:
    """Kernels write gradients over operands, not into a slice of the stack that a loop makes of them."""
    n, h, v = 48, 64, 1000
    shapes: list[Any] = [((3, n, h), jnp.bfloat16), ((v, h), jnp.bfloat16), ((3, n), jnp.int32)]

    def total(hidden: Any, weight: Any, labels: Any) -> Any:
        loss = functools.partial(linear_cross_entropy, implementation=implementation, backward=backward)
        if name == "mapped":
            return jnp.sum(jax.vmap(loss, (0, None, 0))(hidden, weight, labels))
        return jax.lax.scan(lambda x, part: (x + loss(part[0], weight, part[1]), None), 0.0, (hidden, labels))[0]

    def of_logits(logits: Any, labels: Any) -> Any:
        gradient = jax.grad(functools.partial(cross_entropy, implementation=implementation))
        return jax.lax.map(lambda given: gradient(*given), (logits, labels))

    program: Any = jax.value_and_grad(total, (0, 1))
    if name == "stored logits":
        program, shapes = of_logits, [((3, 8192, 131072), jnp.bfloat16), ((3, 8192), jnp.int32)]
    slices = h200.slices_of_kernels(h200.compile_for_h200(program, *h200.arrays(*shapes))[0].as_text())
    # Of the stored logits a kernel reads a slice.
    assert not [x for x in slices if name != "stored logits" or " dynamic-update-slice(" in x]


@pytest.mark.nightly
@pytest.mark.parametrize(("backward", "needed"), [MODES[0], *MODES[2:]])
def test_few_ragged_tiles_on_an_h200_are_not_alive_together(backward: Any, needed: tuple[str, ...]) -> None:
    arguments = h200.arrays(*_arguments((2048, 1024, 151936), jnp.bfloat16))
    options = {"implementation": "xla", "backward": backward}
    compiled, _ = h200.compile_for_h200(_function(needed, **options), *arguments)
    assert _used(compiled) <= 1.05 * explain(*arguments[:2], differentiate=needed, **options).peak_bytes


@pytest.mark.nightly
@pytest.mark.parametrize(("backward", "products"), [("in_forward", 3), ("recompute", 4)])
@pytest.mark.parametrize(("vocab_size", "tiles_apart"), [(131072, False), (151936, True)])
def test_an_h200s_products_read_and_write_in_place(
    backward: Any, products: int, vocab_size: int, tiles_apart: bool
) -> None:
    """Each once for the tiles of a loop, as cuBLAS does them, and without copies of what they read and add to."""
    arguments = h200.arrays(*_arguments((8192, 4096, vocab_size), jnp.bfloat16))
    options = {"implementation": "xla", "backward": backward}
    function, by_cublas = _function(("hidden", "weight"), **options), {"xla_gpu_enable_triton_gemm": False}
    text = h200.compile_for_h200(function, *arguments, options=by_cublas)[0].as_text()
    made = text.count('custom_call_target="__cublas$lt$matmul"')
    # A ragged tile's are apart, and of each of the plain forward's two ways the first tile's.
    most = 2 * (products - 1) + 6 if backward == "recompute" else 2 * products + 1 if tiles_apart else products
    assert products <= made <= most
    columns = explain(*arguments[:2], **options).columns
    copied = re.findall(rf"= \w+\[{columns},4096\]\S* (?:fusion|copy)\(.*", text)
    # The sum that a ragged tile's share is added to by cuBLAS; see the test below.
    assert len(copied) <= (tiles_apart and backward == "in_forward")
    loops = [line for line in text.splitlines() if re.search(r" while\(", line)]
    unknown = [line for line in loops if "known_trip_count" not in line]
    assert len(unknown) <= 1  # over blocks of the rows that count


def test_a_ragged_tiles_share_of_the_weights_gradient_is_added_in_place_on_an_h200() -> None:
    """XLA's fusion writes where it reads if both are dynamic slices; of a static one it copies the whole sum."""
    arguments = h200.arrays(*_arguments((8192, 2048, 151936), jnp.bfloat16))
    function = _function(("hidden", "weight"), implementation="xla", backward="in_forward")
    text = h200.compile_for_h200(function, *arguments)[0].as_text()
    of_sum = r"^%fused_dynamic_update_slice.*?-> f32\[151936,2048\] {(.*?)^}"
    adds = [fusion for fusion in re.findall(of_sum, text, re.MULTILINE | re.DOTALL) if " add(" in fusion]
    assert len(adds) >= 2
    for add in adds:
        assert " dynamic-slice(" in add
        assert not re.search(r" slice\(", add)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("implementation", "backward", "needed"),
    [("mosaic_gpu", *MODES[0]), ("triton", *MODES[2]), ("triton", *MODES[3]), ("xla", *MODES[2])],
)
def test_a_wide_weights_copy_is_part_of_the_peak(backward: Any, needed: tuple[str, ...], implementation: Any) -> None:
    """A float32 master weight, which kernels read as a copy in the compute dtype, and XLA tile by tile."""
    hidden, weight, labels = _arguments((8192, 1024, 65536), jnp.bfloat16)
    given = h200.arrays(hidden, weight.update(dtype=jnp.float32), labels)
    options = {"implementation": implementation, "backward": backward, "dtype": jnp.bfloat16}
    used = _used(h200.compile_for_h200(_function(needed, **options), *given)[0])
    told = explain(*given[:2], differentiate=needed, **options)
    assert told.weight_copy_bytes == (0 if implementation == "xla" else 2 * 65536 * 1024)
    assert 0.5 <= used / told.peak_bytes <= 1.1, f"{used=} {told=}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("implementation", "backward"), [("mosaic_gpu", "recompute"), ("triton", "in_forward"), ("xla", "recompute")]
)
def test_a_deterministic_program_for_an_h200_sorts_nothing(backward: Any, implementation: Any) -> None:
    """XLA sorts all entries of a scatter, unless it knows that none is written twice."""
    arguments = h200.arrays(*_arguments((16384, 768, 32768), jnp.bfloat16))
    function = _function(("hidden", "weight"), backward=backward, implementation=implementation)
    deterministic = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
    text = h200.compile_for_h200(function, *arguments, options=deterministic)[0].as_text()
    assert " while(" in text  # over blocks of rows, whose results are written where they belong
    assert " sort(" not in text


@pytest.mark.nightly
@pytest.mark.parametrize(("backward", "needed"), [MODES[0], MODES[2], MODES[3]])
@pytest.mark.parametrize("chips", [1, 4])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_memory_on_a_tpu(topology: str, chips: int, backward: Any, needed: tuple[str, ...]) -> None:
    """On one chip, and on four that have a part of the vocabulary each."""
    mesh, shape = tpu_mesh(topology, chips), (8192, 4096, 131072)
    places = (PartitionSpec(), PartitionSpec("tpu"), PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, place))
        for x, place in zip(_arguments(shape, jnp.bfloat16), places, strict=True)
    ]
    options = {"implementation": "xla", "backward": backward}
    if chips == 1:
        function = _function(needed, **options)
    else:
        results = (PartitionSpec(), places[:2]) if needed else PartitionSpec()
        part = _function(needed, **options, mesh_axes=MeshAxes(vocabulary="tpu"))
        function = jax.shard_map(part, mesh=mesh, in_specs=places, out_specs=results)
    compiled = compile_for_tpu(function, *arguments)
    told = explain(*arguments[:2], differentiate=needed, **options)
    n, h, v = shape
    v //= chips
    assert _largest_new_array(compiled.as_text(), {n * h, v * h}) <= told.scratch_bytes // 4
    used, numbers_by_row = compiled.memory_analysis().temp_size_in_bytes, 100 * n
    assert used <= told.scratch_bytes + told.accumulator_bytes + numbers_by_row, f"{used=} {told=}"
