"""Calls as programs for an H200 at real sizes: few parts, memory as promised, and a host that is never told."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import explain, linear_cross_entropy, linear_row_statistics
from pallas_ce.backends import entries
from pallas_ce.backends.mosaic_gpu.backend import MosaicBlock
from pallas_ce.backends.mosaic_gpu.kernels import forward_kernel, product_kernel
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES, Config
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.gradient import Coefficients, from_cotangents, saved_statistics
from pallas_ce.statistics.table import PRIMITIVES
from pallas_ce.streaming.gradient_products import WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.tiles import Columns, Tiles
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import Compiled, clean
from tests.mosaic_gpu.conftest import block_of

MIB = 2**20
NAMED: Any = {"implementation": "mosaic_gpu"}


def loss_of(mode: Any, **options: Any) -> Callable[..., Any]:
    return functools.partial(linear_cross_entropy, backward=mode, implementation="mosaic_gpu", **options)


# Compiling takes seconds, and tests of one program stand side by side.
@functools.cache
def compiled_loss(
    mode: str, n: int, v: int, h: int = 4096, places: tuple[int, ...] = (0, 1), axis: int = 0, **options: Any
) -> Compiled:
    """The loss, and its gradients by the operands at these places."""
    loss = loss_of(mode, vocab_axis=axis, **options)
    return clean(jax.value_and_grad(loss, places), *h200.of_head(n, v, h, axis))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "n", "v", "h"),
    [
        (linear_row_statistics, 1024, 131072, 4096),
        (linear_cross_entropy, 8192, 131072, 4096),
        (linear_cross_entropy, 32768, 32768, 4096),
        (linear_cross_entropy, 4096, 262144, 5376),  # whose blocks are no whole number of the kernels' steps
        (linear_row_statistics, 32768, 131072, 4096),
    ],
)
def test_memory_of_statistics_and_of_a_loss_whose_labels_may_be_ignored(function: Any, n: int, v: int, h: int) -> None:
    """Every row may count or not; hidden states are gathered in blocks, not as a whole (256 MiB of 32768 rows)."""
    text, memory, _ = clean(functools.partial(function, implementation="mosaic_gpu"), *h200.of_head(n, v, h))
    assert memory.temp_size_in_bytes <= PARTIALS_BYTES + 4 * MIB
    if function is linear_cross_entropy:
        assert_the_device_chooses(text)


def reductions(program: Any) -> Iterator[Any]:
    """The sums in a traced program, its kernels' among them."""

    def is_program(x: Any) -> bool:
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "reduce_sum":
            yield equation
        for inner in filter(is_program, jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)):
            yield from reductions(inner)


@pytest.mark.parametrize("n", [1024, 8192])  # tiles of either height
def test_no_kernel_leaves_the_order_of_a_rows_sum_to_mosaic(n: int) -> None:
    """Mosaic's order depends on how many rows a thread holds, and so would a row's bits on the number of rows."""
    names = ("lse", "entropy", "varentropy", "sum_sq_probs", "mean_logit")
    function = functools.partial(linear_row_statistics, statistics=names, implementation="mosaic_gpu")
    traced = jax.jit(function).trace(*h200.of_head(n, 32768, 4096)).jaxpr
    shapes = {x.invars[0].aval.shape for x in reductions(traced) if x.invars[0].aval.dtype == jnp.float32}
    by_row = {shape[1] for shape in shapes if len(shape) == 2 and shape[0] in (64, 128)}
    assert by_row == {8}, shapes


class Budget(NamedTuple):
    """Of a loss with its gradients: what it may take beside them, and beside 8 bits of the weight's sum or, in
    recompute, hidden's in float32.

    Attributes:
        mebibytes: of temporary memory.
        fusions: how many of XLA's; compiling takes about as long for each as for a fourth of a kernel.
        options: of the loss.
        lacks: what its text must not hold.
    """

    mode: Any
    n: int
    v: int
    h: int
    mebibytes: int
    axis: int = 0
    fusions: int = 40
    options: Mapping[str, Any] = MappingProxyType({})
    lacks: tuple[str, ...] = ()


BUDGETS = [
    Budget("in_forward", 2048, 131072, 4096, 600, fusions=28),  # one block
    Budget("in_forward", 8192, 131072, 4096, 568),  # a loop over blocks of rows
    Budget("recompute", 8192, 131072, 4096, 192, fusions=29),
    # A bound holds beside the weight's sum.
    Budget("in_forward", 16384, 131072, 4096, 82, options={"scratch_bytes": 82 * MIB}),
    # Nothing is copied to leave out a little padding.
    *(
        Budget(mode, 8192, 50304, 768, mebibytes, 0, 41, {"vocab_size": 50257}, ("50257]", "50257,768]"))
        for mode, mebibytes in (("in_forward", 860), ("recompute", 192))
    ),
    Budget("in_forward", 32768, 262144, 4096, 1136, fusions=42),
    *(Budget(mode, 2048, 32768, 4096, 160) for mode in ("in_forward", "recompute")),  # few rows, and tiles half as tall
    Budget("in_forward", 8192, 201088, 2880, 924),
    Budget("recompute", 8192, 50304, 768, 192, axis=1),
    Budget("recompute", 1024, 262144, 4096, 192),
    Budget("recompute", 16384, 131072, 4096, 192),
]


@pytest.mark.nightly
@pytest.mark.parametrize("budget", BUDGETS)
def test_memory_and_parts_of_a_loss_and_its_gradients(budget: Budget) -> None:
    """`explain` predicts the memory."""
    mode, n, v, h, mebibytes, axis, fusions, options, lacks = budget
    text, memory, assembled = compiled_loss(mode, n, v, h, axis=axis, **options)
    told = explain(*h200.of_head(n, v, h, axis)[:2], backward=mode, vocab_axis=axis, **options, **NAMED)
    beside = 4 * h * n if mode == "recompute" else 0 if told.rows >= n else h * v
    assert memory.temp_size_in_bytes <= beside + mebibytes * MIB
    # The first block's product is the sum's beginning, in place of zeros.
    assert mode == "recompute" or f"f32[{v},{h}]{{1,0}} broadcast(" not in text
    used = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert 0.4 <= used / told.peak_bytes <= 1.1, f"{used / MIB:.0f} MiB, {told}"
    assert not [word for word in lacks if word in text]
    # One of each kernel, whether rows are skipped or not, by its name; XLA would choose a product by timing many.
    kernels = {"forward", "dlogits", "add_for_hidden", "for_weight"}
    if mode == "in_forward":
        kernels = {"stash", "for_hidden", "for_weight" if told.rows >= n else "add_for_weight"}
    assert kernels_of(text) == kernels
    assert assembled == len(kernels)
    assert len(re.findall(r" fusion\(", text)) <= fusions
    assert not re.search(r" dot\(", text)
    assert choices_with_loops(text) == []
    assert_loops_are_counted(text)
    named = r'op_name="[^"]*pallas_ce\.(in_forward|recompute|forward)'
    assert all(re.search(named, line) for line in text.splitlines() if "mosaic_gpu_v2" in line)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "place", "missing", "saved"),
    [
        ("in_forward", 0, "for_weight", 127 * MIB),
        ("in_forward", 1, "for_hidden", 0),
        ("recompute", 0, "for_weight", 0),
        ("recompute", 1, "for_hidden", 64 * MIB),
    ],
)
def test_what_is_frozen_has_neither_product_nor_buffer(mode: str, place: int, missing: str, saved: int) -> None:
    n, v, h = 8192, 131072, 4096
    whole, (text, memory, _) = compiled_loss(mode, n, v), compiled_loss(mode, n, v, places=(place,))
    assert any(missing in name for name in kernels_of(whole.text))
    assert not any(missing in name for name in kernels_of(text))
    assert not re.search(rf"= \w+\[{v if place == 0 else n},{h}\]\{{1,0\}} dot\(", text)
    assert memory.output_size_in_bytes < 2 * h * (n if place == 0 else v) + MIB
    assert memory.temp_size_in_bytes <= whole.memory.temp_size_in_bytes - saved


def test_few_rows_take_few_kernels_beside_ours() -> None:
    """Each of XLA's costs one to four microseconds, and where there are few rows ours take a few hundred."""
    text = clean(loss_of("auto"), *h200.of_head(1024, 32768, 4096)).text
    launched = re.findall(r" (fusion|copy|sort|scatter|while|conditional)\(", text.split("\nENTRY ")[1])
    assert len(launched) <= 9, launched


@pytest.mark.nightly
def test_the_device_chooses_in_the_smallest_programs_which_take_little_memory() -> None:
    def statistics(hidden: Any, weight: Any, labels: Any) -> Any:
        given = {"statistics": ("lse",), "row_mask": labels > 0, "implementation": "mosaic_gpu"}
        return linear_row_statistics(hidden, weight, None, **given).lse

    for program in (loss_of("auto"), statistics):
        text, memory, _ = clean(program, *h200.of_head(4096, 32768, 4096))
        assert memory.temp_size_in_bytes <= PARTIALS_BYTES + 4 * MIB
        assert_the_device_chooses(text)


def assert_loops_are_counted(text: str) -> None:
    """A loop whose length only the device knows tells the host, and so does a choice between branches with loops."""
    assert all("known_trip_count" in line for line in text.splitlines() if re.search(r" while\(", line))


def assert_the_device_chooses(text: str) -> None:
    """XLA has it choose by itself only behind four launches or more that follow each other."""
    assert_loops_are_counted(text)
    assert choices_with_loops(text) == [False]
    place = 0
    for kind in re.findall(r"^  (?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", text.split("\nENTRY ")[1], re.MULTILINE):
        place = 0 if kind == "while" else place + (kind in ("fusion", "custom-call", "copy", "conditional"))
        assert kind != "conditional" or place >= 5


def choices_with_loops(text: str) -> list[bool]:
    """Of each conditional of a compiled program, whether a branch, or what that calls, holds a loop."""
    bodies = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))

    def loops(name: str) -> bool:
        body = bodies.get(name, "")
        return " while(" in body or any(map(loops, re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", body)))

    branches = re.findall(r" conditional\(.*?true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)", text)
    return [any(map(loops, both)) for both in branches]


def kernels_of(text: str) -> set[str]:
    """Names of the kernels in a compiled program."""
    calls = [line for line in text.splitlines() if "mosaic_gpu_v2" in line]
    return {name for line in calls for name in re.findall(r'op_name="[^"]*/pallas_ce_(\w+)', line)}


@pytest.mark.nightly
def test_kernels_that_a_program_uses_twice_are_compiled_once() -> None:
    loss = loss_of("recompute")

    def twice(hidden: Any, weight: Any, labels: Any) -> Any:
        return loss(hidden, weight, labels) + loss(-hidden, weight, labels[::-1])

    assert clean(jax.value_and_grad(twice, argnums=(0, 1)), *h200.of_head(8192, 131072, 4096)).kernels == 4


@pytest.mark.nightly
def test_a_kernel_is_the_same_in_the_next_program() -> None:
    def kernels(factor: float) -> set[str]:
        jax.clear_caches()
        function = jax.grad(lambda *arrays: factor * loss_of("recompute")(*arrays), (0, 1))
        text = h200.lower_for_h200(jax.jit(function), *h200.of_head(328, 1240, 144)).as_text()
        return set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text))

    first = kernels(1.0)
    assert len(first) >= 2
    assert kernels(2.0) == first


def test_a_stored_program_holds_its_kernels_machine_code() -> None:
    """A start that finds the program in the compilation cache assembles none."""
    loss, given = loss_of("auto"), h200.of_head(328, 1240, 144)
    entry = b"pallas_ce_forward_mosaic_gpu_kernel"  # so called when it is assembled
    assert entry not in h200.lower_for_h200(jax.jit(loss), *given).as_text().encode()
    assert entry in h200.compile_for_h200(loss, *given)[0].runtime_executable().serialize()


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "axis"), [("in_forward", 1), ("recompute", 0)])
def test_gradients_in_float16(mode: str, axis: int) -> None:
    loss = loss_of(mode, vocab_axis=axis, label_smoothing=0.1)
    clean(jax.value_and_grad(loss, (0, 1)), *h200.of_head(4096, 32768, 2048, axis, jnp.float16))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "scratch_bytes", "v"),
    [("recompute", 2**19, 2000), ("in_forward", 2**19, 2008), ("recompute", None, 2008), ("in_forward", None, 2000)],
)
def test_kernels_read_no_slices_where_they_lie(mode: Any, scratch_bytes: int | None, v: int) -> None:
    """Kernels need matrices that begin at multiples of 256 bytes; XLA does not look where a slice begins."""
    n, h = 264, 176

    def loss(rows: Any, parameters: Any, labels: Any) -> Any:
        weight = parameters[7 : 7 + v * h].reshape(v, h)  # of parameters in one vector
        return loss_of(mode, scratch_bytes=scratch_bytes)(rows[1:], weight, labels)

    given = h200.arrays(((n + 1, h), jnp.bfloat16), ((8 + v * h,), jnp.bfloat16), ((n,), jnp.int32))
    assert not h200.slices_of_kernels(clean(jax.value_and_grad(loss, argnums=(0, 1)), *given).text)


# Each kernel alone, with all tiles that the rules may choose.
LOSS = frozenset({"lse", "target_logit"})
EVERY = frozenset(PRIMITIVES)
VARENTROPY = frozenset({"lse", "varentropy"})
OPTIONS = ("bias", "scale", "weights", "softcap")


def coefficients_of(names: frozenset[str], by_row: Any) -> Coefficients:
    """Coefficients for the dlogits kernel where the statistics in `names` are differentiated."""
    saved = dict.fromkeys(saved_statistics(names), by_row)
    return from_cotangents(dict.fromkeys(names, by_row), saved)._replace(target=None, argmax=None)


def compiled_kernel(
    kernel: str, n: int, v: int, h: int, axis: int, names: frozenset[str], options: tuple[str, ...]
) -> Compiled:
    """One kernel alone, compiled; its vectors by row stand in for each other."""

    def run(hidden: Any, weight: Any, labels: Any, by_row: Any, by_column: Any, scalar: Any) -> Any:
        bias, scale, weights, softcap = (
            x if name in options else None
            for name, x in zip(OPTIONS, (by_column, scalar, by_column, 30.0), strict=True)
        )
        head = Head(weight, bias, scale, weights, HeadSpec(h, v, v, axis, np.dtype(hidden.dtype), softcap))
        if kernel == "forward":
            found = forward_kernel.statistics(head, hidden, names)
            return entries.with_targets(found, head, Batch(hidden, labels), names)
        if kernel == "stash":
            partial, stored = MosaicBlock(head, Batch(hidden), None).exponentials(by_row, names)
            return partial(), stored
        return MosaicBlock(head, Batch(hidden), None).dlogits(Gradient(coefficients_of(names, by_row), by_row))

    further = h200.arrays(((n,), jnp.float32), ((v,), jnp.float32), ((), jnp.float32))
    return clean(run, *h200.of_head(n, v, h, axis), *further)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    ("kernel", "n", "v", "h", "axis", "names", "options"),
    [
        ("forward", 1024, 131072, 4096, 0, LOSS, ()),
        ("forward", 8192, 131072, 4096, 0, LOSS, ()),
        ("forward", 8192, 131072, 4096, 1, LOSS | {"entropy"}, ()),
        ("forward", 8192, 131072, 4096, 0, frozenset({"lse", "mean_logit", "entropy"}), ()),
        ("forward", 8192, 131072, 4096, 0, frozenset({"lse"}), OPTIONS),
        ("forward", 8192, 50304, 4096, 0, EVERY, OPTIONS),
        ("stash", 2048, 131072, 4096, 0, LOSS, ()),
        ("stash", 2048, 131072, 4096, 1, LOSS | {"mean_logit"}, ("bias",)),
        ("stash", 2048, 50304, 4096, 0, EVERY, OPTIONS),
        ("dlogits", 8192, 4096, 4096, 0, LOSS, ()),
        ("dlogits", 8192, 4096, 4096, 1, LOSS, ("bias",)),
        ("dlogits", 8192, 4096, 4096, 0, EVERY, ()),
        ("forward", 8192, 131072, 4096, 0, frozenset({"varentropy"}), ()),
        ("forward", 8192, 131072, 4096, 0, VARENTROPY | {"entropy", "mean_logit"}, ("bias",)),
        ("stash", 2048, 131072, 4096, 0, VARENTROPY | {"entropy"}, ()),  # which its derivative reads
        ("stash", 2048, 131072, 4096, 1, VARENTROPY | {"entropy", "target_logit"}, ("bias",)),
        ("dlogits", 8192, 4096, 4096, 0, VARENTROPY, ("bias",)),
        ("dlogits", 8192, 4096, 4096, 0, EVERY, OPTIONS),
        # Sizes that need smaller swizzles or leave a ragged edge.
        *(
            (kernel, 2048, *size, LOSS, ())
            for kernel in ("forward", "stash")
            for size in ((8192, 4112, 0), (8208, 4096, 1), (50256, 768, 0), (201088, 2880, 0))
        ),
    ],
)
def test_kernels(
    kernel: Any, n: int, v: int, h: int, axis: int, names: frozenset[str], options: tuple[str, ...], capfd: Any
) -> None:
    memory = compiled_kernel(kernel, n, v, h, axis, names, options).memory
    assert "skipping" not in capfd.readouterr().err  # a warning to users, for each kernel that jax 0.12 does not fuse
    # Partial statistics and their padded inputs, or sums by column of each block of rows.
    assert memory.temp_size_in_bytes <= PARTIALS_BYTES + 8 * MIB


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("config", product_kernel._TILES)
def test_products_with_all_their_tiles(config: Config, vocab_axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, added to a sum, and as a new gradient."""
    for name in ("hidden_config", "weight_config"):
        monkeypatch.setattr(product_kernel, name, lambda *given: config)

    def run(stored: Any, weight: Any, hidden: Any, total: Any, weights_total: Any, valid: Any, lower: Any) -> Any:
        block = block_of(weight, hidden, vocab_axis, valid, last=valid == 1)
        every: Any = RowBlock(0, Tiles(n, n).tile(0), None, None, None)
        new, scale = WeightGradient(jax.lax.empty(weight.shape, weight.dtype), adds=False), total[0, 0]
        return (
            block.for_hidden(stored, jnp.ones(n), np.dtype(np.float32)),
            block.add_for_hidden(stored, total, Columns(0, v), every),
            dataclasses.replace(block, valid_rows=None).for_weight(stored, hidden, new._replace(scale=scale)),
            block.for_weight(stored, hidden, WeightGradient(weights_total, valid > 0)),
            block.for_weight(stored, hidden, WeightGradient(weight, valid > 0, scale, bits=lower)),
        )

    n, v, h = 2048, 32768, 1024
    of_weight = (v, h) if vocab_axis == 0 else (h, v)
    given = h200.arrays(((n, v), jnp.bfloat16), (of_weight, jnp.bfloat16), ((n, h), jnp.bfloat16))
    lower = h200.arrays((product_kernel.lower_shape(*of_weight), jnp.bfloat16))
    clean(run, *given, *h200.arrays(((n, h), jnp.float32), (of_weight, jnp.float32), ((), jnp.int32)), *lower)
