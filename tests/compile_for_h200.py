"""Compiling for an NVIDIA H200 on a machine without one: down to machine code, nothing is run.

It shows what the interpreter cannot: layouts, alignment and shared memory that do not fit, register spills, products
that the assembler serialises, and XLA's temporary memory. It needs the `gpu-compile` extra and no driver.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_ce.backends.mosaic_gpu.gemm import launch

# XLA's description of the device, as a GpuTargetConfigProto in text form.
_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  device_memory_size: 150000000000
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
"""

_NUMBERS = itertools.count()


class Compiled(NamedTuple):
    """A program: its text, its memory, and how many Mosaic kernels were assembled for it."""

    text: str
    memory: Any
    kernels: int


def needs_plugin() -> None:
    """Skips the test where JAX's plugin for CUDA is missing, which compiles and makes Triton's launches."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("compiling for an H200 needs the gpu-compile extra")


def h200_mesh(gpus: int = 1, axis: str = "gpu") -> Mesh:
    """A mesh of `gpus` H200s of one process, to compile for; skips the test where the extra is missing."""
    needs_plugin()
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{gpus}", target_config=_TARGET)
    return Mesh(np.array(topology.devices), (axis,), axis_types=(AxisType.Auto,))


def shaped(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec | None = None) -> Any:
    """An argument of that shape, dtype and sharding, without values."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))


_one = functools.cache(h200_mesh)


def arrays(*like: Any) -> tuple[Any, ...]:
    """Arguments on one H200, without values: of a shape and a dtype each, or like an array."""
    given = (x if isinstance(x, tuple) else (x.shape, x.dtype) for x in like)
    return tuple(shaped(_one(), *x) for x in given)


def of_head(n: int, v: int, h: int, axis: int = 0, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Hidden states, weight and labels on one H200."""
    return arrays(((n, h), dtype), ((v, h) if axis == 0 else (h, v), dtype), ((n,), jnp.int32))


def compile_for_h200(
    function: Callable[..., Any],
    *arguments: Any,
    donate_argnums: int | tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, str]:
    """The program compiled for the arguments' devices, with XLA's options, and what the assembler said of its kernels.

    No result of our kernels that takes an operand's memory is fused with a slice, where it would be lost.
    """
    jitted = jax.jit(function, donate_argnums=donate_argnums)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    with tempfile.TemporaryFile() as log:
        # Kernels that are not like any other are compiled for each program, and reported on.
        with _printing_to(log), mock.patch.object(launch, "name_dumps", _numbered):
            compiled = lower_for_h200(jitted, *arguments).compile(options)
        log.seek(0)
        said = log.read().decode(errors="replace")
    in_place = r"(mosaic_gpu|triton_kernel)\w*\".*output_to_operand_aliasing"
    assert not [fusion for fusion in _slice_fusions(compiled.as_text()) if re.search(in_place, fusion)]
    return compiled, said


def clean(function: Callable[..., Any], *arguments: Any, donate_argnums: int | tuple[int, ...] = ()) -> Compiled:
    """The function compiled, of whose kernels none spills registers or waits for each product."""
    program, said = compile_for_h200(function, *arguments, donate_argnums=donate_argnums)
    kernels = said.count("Compiling entry function")
    assert kernels >= 1
    assert not re.search(r"[1-9]\d* bytes spill (?:stores|loads)", said)
    assert not re.search(r"wgmma.*serialized due to", said)
    linked = re.search(r"^info +: used", said, re.MULTILINE) is not None
    assert linked == (jax.__version_info__ >= (0, 12)), "nvJitLink assembles kernels from jax 0.12 on"
    return Compiled(program.as_text(), program.memory_analysis(), kernels)


def lower_for_h200(jitted: Any, *arguments: Any) -> Any:
    """A jitted function lowered for the arguments' devices."""
    if len(arguments[0].sharding.device_set) > 1:
        return jitted.lower(*arguments)
    device = AbstractDevice("NVIDIA H200", 132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        return jitted.trace(*arguments).lower(lowering_platforms=("cuda",))


def slices_of_kernels(text: str) -> list[str]:
    """A program's slices that Mosaic's and cuBLAS's kernels read or write in place, but for an array's beginning.

    XLA fuses them with the kernel, whatever their addresses. Of those that cuBLAS takes only parts of vectors count:
    rows of a matrix are as well aligned as they are long, and by their length it chooses what it does.
    """
    found = []
    for fusion in _slice_fusions(text):
        of_rows = r" dynamic-(update-)?slice\(| slice\(.*slice={\[[1-9]"
        kinds = of_rows if "mosaic_gpu" in fusion else r" slice\(.*slice={\[[1-9]\d*:\d+\]}"
        found += [line for line in fusion.splitlines() if re.search(kinds, line)]
    return found


def _slice_fusions(text: str) -> list[str]:
    """XLA's fusions of a kernel with slices that it reads or writes in place."""
    return re.findall(r"^%dynamic-slice-fusion.*?^}", text, re.MULTILINE | re.DOTALL)


def _numbered(_: str) -> None:
    """Within a kernel: gives it a number of its own."""

    @plgpu.inline_mgpu()
    def set_number(context: Any) -> None:
        context.module.operation.attributes["mosaic_gpu.number"] = mlir.ir.StringAttr.get(str(next(_NUMBERS)))

    set_number()


@contextlib.contextmanager
def _printing_to(file: Any) -> Iterator[None]:
    """Sends the process's standard output there; the assembler prints from C++."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
