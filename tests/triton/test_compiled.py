"""The kernel compiled for every architecture of the table, without a GPU: no spilled register, and it fits."""

import functools
import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_distillation
from pallas_ce.backends.protocol import Gradient
from pallas_ce.backends.triton import binding, configs, launch
from pallas_ce.backends.triton.block import TritonBlock
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.table import PRIMITIVES
from tests import compile_for_h200 as h200

pytest.importorskip("triton")

# The instruction that multiplies 16-bit operands.
MULTIPLIES = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma", 12: "mma.sync"}

LOSS, EVERY = frozenset({"lse", "target_logit"}), frozenset(PRIMITIVES)
PASSES = ("forward", "stash", "dlogits", "logits")
# Arrays of a head and its rows, and results of a pass, beside plain cross entropy's.
OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "capped": ("softcap",),
    "term": ("term",),
    "entropy": ("entropy", "prob_log_prob"),
    "some": ("bias", "softcap", "inverse_temperature", "entropy", "prob_log_prob"),
    "every": ("bias", "scale", "softcap", "inverse_temperature", "u", *PRIMITIVES, *Coefficients._fields),
}

FULL, TF32 = jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH
THREE = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
CASES = [
    *((use, o, axis, jnp.bfloat16, 8192, None) for use in PASSES for o in OPTIONS if o != "term" for axis in (0, 1)),
    *((use, "term", axis, jnp.bfloat16, v, None) for use in PASSES for axis in (0, 1) for v in (8192, 8190)),
    *((use, o, 1, jnp.bfloat16, 8190, None) for use in PASSES for o in ("plain", "capped", "some", "every")),
    *((use, options, 0, jnp.float16, 8190, None) for use in PASSES for options in ("plain", "every")),
    *((use, o, 0, jnp.float32, 8190, p) for use in PASSES for o in ("plain", "every") for p in (FULL, TF32, THREE)),
    *((use, "plain", 1, jnp.float32, 8192, TF32) for use in PASSES),
    *((use, o, 0, jnp.float32, 8192, TF32) for use in PASSES for o in ("capped", "entropy", "some")),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled anew, and the user's cache is left alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    binding.compiled.cache_clear()
    yield
    binding.compiled.cache_clear()


def launched(run: Any, *given: Any) -> binding.Kernel:
    """The one kernel of a function."""
    calls = jax.make_jaxpr(run)(*given).jaxpr.eqns
    (kernel,) = [call.params["kernel"] for call in calls if call.primitive is binding._call_p]
    return kernel


def kernel_of(use: str, options: str, axis: int, dtype: Any, columns: int, precision: Any) -> binding.Kernel:
    """The kernel that a call of this kind launches at 1000 × `columns`, H 4096."""
    rows, size, given = 1000, 4096, OPTIONS[options]

    def array(name: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32) if name in given else None

    cap = 30.0 if "softcap" in given else None
    how = jax.lax.Precision.DEFAULT if precision is None else precision
    rank = 24 if "term" in given else 0
    spec = HeadSpec(size, columns, columns, axis, np.dtype(dtype), cap, precision=how, rank=rank)
    weight = jax.ShapeDtypeStruct((columns, size) if axis == 0 else (size, columns), dtype)
    head = Head(
        weight,
        *(array("bias", columns), array("scale"), array("u", columns), spec),
        up=array("term", columns, rank),
        down=array("term", rank, size),
    )
    batch = Batch(
        jax.ShapeDtypeStruct((rows, size), dtype), None, array("inverse_temperature", rows), array("term", rows, rank)
    )
    names = LOSS | EVERY.intersection(given)
    vector = jax.ShapeDtypeStruct((rows,), jnp.float32)
    coefficients = Coefficients(**{name: vector for name in Coefficients._fields if name in ("prob", *given)})

    def run(head: Head, batch: Batch, coefficients: Coefficients, vector: Any) -> Any:
        match use:
            case "forward":
                return launch.statistics(head, batch, names)
            case "stash":
                partial, stored = TritonBlock(head, batch, None).exponentials(vector, names)
                return partial(), stored
            case "logits":
                return launch.logits([head], [batch])
        coefficients = coefficients._replace(target=None, argmax=None)
        return launch.dlogits(head, batch, Gradient(coefficients, vector))

    return launched(run, head, batch, coefficients, vector)


def product_of(use: str, axis: int, dtype: Any) -> binding.Kernel:
    """The kernel of a gradient product of a part of 16384 columns, with a weight's gradient of that dtype."""
    rows, columns, size, vocabulary = 1000, 16384, 4096, 50_000
    spec = HeadSpec(size, vocabulary, vocabulary, axis, np.dtype(jnp.bfloat16), None)
    shape = (vocabulary, size) if axis == 0 else (size, vocabulary)
    head = Head(jax.ShapeDtypeStruct(shape, jnp.bfloat16), None, None, None, spec)
    dlogits, hidden = (jax.ShapeDtypeStruct((rows, of), jnp.bfloat16) for of in (columns, size))

    def run(head: Head, dlogits: Any, hidden: Any, total: Any, start: Any, scale: Any) -> Any:
        further = () if use == "for hidden" else (hidden, scale)
        return launch.product(head, dlogits, total, start, None, *further)

    total = jax.ShapeDtypeStruct((rows, size) if use == "for hidden" else shape, dtype)
    start, scale = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    return launched(run, head, dlogits, hidden, total, start, scale)


def spilled(built: Any, capability: int, folder: Path) -> int:
    """Bytes that Triton's assembler stores or loads because registers ran out."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    source = folder / "kernel.ptx"
    source.write_text(built.asm["ptx"])
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", str(source)]
    said = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True, check=True).stderr
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert found
    return sum(map(int, found))


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("use", "dtype"), [("for hidden", jnp.float32), ("for weight", jnp.bfloat16), ("for weight", jnp.float32)]
)
@pytest.mark.parametrize("capability", list(configs.PRODUCTS))
def test_no_product_spills_or_is_too_large(
    capability: int, use: str, dtype: Any, axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "capability", lambda: capability)
    built = binding.compiled(product_of(use, axis, dtype))
    assert spilled(built, capability, tmp_path) == 0
    assert MULTIPLIES[capability // 10] in built.asm["ptx"]


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("capability", "case"),
    list(itertools.product(configs.NARROW, CASES)),
    ids=lambda x: x if isinstance(x, int) else "-".join(map(str, (*x[:3], np.dtype(x[3]).name, *x[4:]))),
)
def test_no_entry_of_the_table_spills_or_is_too_large(
    capability: int, case: tuple[str, str, int, Any, int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "capability", lambda: capability)
    kernel = kernel_of(*case)
    built = binding.compiled(kernel)
    assert spilled(built, capability, tmp_path) <= 8  # one register, stored and loaded once a tile
    assert built.metadata.num_warps == kernel.warps
    precision = case[5]
    assert ("fma.rn.f32" if precision is FULL else MULTIPLIES[capability // 10]) in built.asm["ptx"]
    assert ("tf32" in built.asm["ptx"]) == (precision in (TF32, THREE))
    assert f".version 8.{8 if capability in (103, 121) else 7}\n" in built.asm["ptx"]
    assert ("cp.async.bulk.tensor" in built.asm["ptx"]) == kernel.scratch
    assert (built.metadata.global_scratch_size > 0) == kernel.scratch
    # Its parameters: arrays, scratch, and the profiler's buffer, in this order; see `binding`.
    entry = built.asm["ptx"][built.asm["ptx"].index(".entry") :]
    header = entry[: entry.index("{")]
    assert header.count(".param") == len(kernel.inputs) + len(kernel.outputs) + 2
    names = [name for name, _ in kernel.inputs + kernel.outputs]
    assert names == sorted(names, key=binding._function("head_kernel").arg_names.index)


@pytest.mark.parametrize("use", PASSES)
def test_clamps_and_maxima_of_logits_are_instructions_that_keep_nan(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each logit one, as it would be with those that drop NaN."""
    monkeypatch.setattr(binding, "capability", lambda: 90)
    found = binding.compiled(kernel_of(use, "plain", 0, jnp.bfloat16, 8192, None)).asm["ptx"]
    assert re.search(r"\bmax\.NaN\.f32", found)
    assert not re.search(r"\b(max|min)\.f32", found)


@pytest.mark.parametrize("capability", list(configs.PRODUCTS))
def test_products_read_only_rows_of_dlogits_that_are_written(capability: int) -> None:
    rows = [choice.config.rows for choice in configs.NARROW[capability]]
    assert len(rows) == 5
    assert all(count % configs.PRODUCTS[capability].window == 0 for count in rows)


@pytest.mark.parametrize(("assembler", "written"), [("12.4", (84, 84)), ("12.8", (87, 87)), ("13.4", (87, 88))])
def test_no_newer_ptx_is_written_than_the_older_of_two_assemblers_reads(
    assembler: str, written: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import compiler

    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: SimpleNamespace(version=assembler))
    assert (binding._ptx_version(90), binding._ptx_version(103)) == written


def test_another_default_of_triton_for_fused_products_and_sums_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "capability", lambda: 90)
    kernel = kernel_of("forward", "some", 0, jnp.bfloat16, 8192, None)
    expected = binding.compiled(kernel)
    assert "fma.rn.f32" in expected.asm["ptx"]
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    binding.compiled.cache_clear()
    assert binding.compiled(kernel).asm["ptx"] == expected.asm["ptx"]


def test_tiles_that_take_too_much_shared_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "capability", lambda: 86)
    deep = configs.NARROW[86][0].config._replace(stages=5)
    monkeypatch.setitem(configs.NARROW, 86, (configs.Choice(deep),))
    with pytest.raises(NotImplementedError, match=r"needs \d+ KiB of shared memory .* capability 86 has 99: use 'xla'"):
        binding.compiled(kernel_of("forward", "plain", 0, jnp.bfloat16, 8192, None))


@pytest.mark.nightly
@pytest.mark.parametrize("divergence", ["jsd", "forward_kl", "reverse_kl"])
def test_programs_of_two_heads_read_stored_logits_without_storing_more(divergence: Any) -> None:
    """XLA fuses all that it makes of them into passes over the two, in float32 stored nowhere."""
    n, v, h = 16384, 131072, 4096
    given = h200.arrays(
        ((n, h), jnp.bfloat16), ((v, h), jnp.bfloat16), ((n, 2 * h), jnp.bfloat16), ((v, 2 * h), jnp.bfloat16)
    )
    loss = functools.partial(linear_distillation, divergence=divergence, implementation="triton")
    for program in (loss, jax.value_and_grad(loss, (0, 1))):
        compiled, _ = h200.compile_for_h200(program, *given)
        assert compiled.memory_analysis().temp_size_in_bytes <= 2**29
        assert compiled.as_text().count('"triton_kernel_call_ffi"') == (2 if program is loss else 6)
