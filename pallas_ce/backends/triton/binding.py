"""A Triton kernel as a JAX operation: the one place that knows Triton's compiler and jaxlib's launcher.

The kernel is compiled when the program is lowered, and its PTX travels in the program; JAX's plugin assembles it. Two
things are unlike what `jax_triton` does:

* *Scratch.* A kernel with tensor descriptors needs memory in which each of its programs writes them. The launcher would
  allocate it in every launch, and the allocation would end up in the CUDA graph that XLA captures the launch in, as a
  child graph, which may hold none: `CUDA_ERROR_NOT_SUPPORTED`. So XLA allocates it, as one more result. A compiled
  kernel's parameters are its own, then scratch, then a profiler's buffer; the launcher is told of no scratch, passes
  the result as the last parameter that it knows of, and appends two null pointers. CUDA reads as many parameters as the
  kernel has, so the first stands for the profiler's buffer, which is not used, and the second is not read.
* *Nothing is measured*: tiles come from a table, and there is no autotuner.

Sizes are compile-time constants. As arguments they would hide their divisibility, and loads would be narrower.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import numpy as np
from jax.interpreters import mlir

from pallas_ce.backends import device as targets
from pallas_ce.backends.triton.configs import Config
from pallas_ce.streaming.loops import apart

_TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}

# Bytes at whose multiples arrays begin, as the kernels are told and the launcher checks; and descriptors must.
_ALIGNMENT = 16
_SCRATCH_ALIGNMENT = 128

# KiB of shared memory that a program can have, by compute capability; elsewhere the least.
_SHARED_KIB = {80: 163, 90: 227, 100: 227, 103: 227}
_LEAST_SHARED_KIB = 99

# The PTX to write, as 87 for 8.7, by compute capability, and elsewhere: CUDA 12.8's, or 12.9's for GPUs that came with
# it. JAX's CUDA 12 plugin has no newer assembler, and Triton from 3.7 on would write 9.x for some GPUs.
_PTX, _PTX_ELSEWHERE = {103: 88, 121: 88}, 87

# An input of the first name is the memory in which the output of the second is written.
BEFORE, STORED = "before", "stored"

# For a kernel that makes five descriptors, the most that its programs have room for.
SCRATCH_BYTES = 5 * 128


class Kernel(NamedTuple):
    """A kernel with all that it is compiled from; hashable."""

    function: str  # its name
    inputs: tuple[tuple[str, str], ...]  # names and types of array parameters that are read, in the order of operands
    outputs: tuple[tuple[str, str], ...]  # and of the ones that are written, in the order of results
    constants: tuple[tuple[str, Any], ...]  # its other parameters
    programs: int  # how many are launched
    warps: int  # of a program
    stages: int  # how many windows of the operands are under way
    scratch: bool  # whether it makes descriptors
    capability: int | None  # the compute capability, as 90; None where it is not known


def capability() -> int | None:
    """The compute capability of the GPU that is traced for, as 90; None where it is not known."""
    kind = targets.cuda_kind()
    found = None if kind is None else targets.compute_capability(kind)
    return None if found is None else int(found.replace(".", ""))


def _function(name: str) -> Any:
    """A kernel, imported on first use: without Triton the backend can still say that it is missing."""
    from pallas_ce.backends.triton import kernel, product_kernel

    kernels = {"head_kernel": kernel.head_kernel, "product_kernel": product_kernel.product_kernel}
    return kernels[name]


def _ptx_version(capability: int | None) -> int:
    """The PTX to write: no newer than what JAX's assembler reads, nor than what Triton's does."""
    from triton.backends.nvidia import compiler

    newest = compiler.ptx_get_version(compiler.get_ptxas(capability).version)
    return min(newest, _PTX.get(capability or 0, _PTX_ELSEWHERE))


@functools.lru_cache(maxsize=1024)
def compiled(kernel: Kernel) -> Any:
    """The kernel as Triton compiles it for its device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(kernel.function)
    arrays, constants = dict(kernel.inputs + kernel.outputs), dict(kernel.constants)
    names = function.arg_names
    constants |= {name: None for name in names if name not in arrays and name not in constants}
    places = {name: (names.index(name),) for name in names}
    source = ASTSource(
        fn=function,
        signature={name: arrays.get(name, "constexpr") for name in names},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", _ALIGNMENT]] for name in arrays},
    )
    options = {
        "num_warps": kernel.warps,
        "num_stages": kernel.stages,
        "ptx_version": _ptx_version(kernel.capability),
        "enable_fp_fusion": True,  # which was the default; Triton 3.9 warns that this will change
    }
    built = triton.compile(source, target=GPUTarget("cuda", kernel.capability, 32), options=options)
    metadata, most = built.metadata, _SHARED_KIB.get(kernel.capability or 0, _LEAST_SHARED_KIB)
    if metadata.shared > 1024 * most:
        raise NotImplementedError(
            f"implementation='triton' needs {metadata.shared // 1024} KiB of shared memory with Triton "
            f"{triton.__version__}, and a GPU of compute capability {kernel.capability} has {most}: use 'xla'"
        )
    scratch = metadata.global_scratch_size
    if scratch > SCRATCH_BYTES * kernel.scratch or (scratch and metadata.global_scratch_align > _SCRATCH_ALIGNMENT):
        raise NotImplementedError(
            f"implementation='triton' has no room for the {scratch} bytes of scratch that Triton {triton.__version__} "
            "asks for in each program: use 'xla'"
        )
    return built


_call_p = jex.core.Primitive("pallas_ce_triton")
_call_p.multiple_results = True


@_call_p.def_abstract_eval
def _abstract(*arrays: Any, kernel: Kernel, results: Sequence[jax.ShapeDtypeStruct]) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]


def call(
    function: str,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    constants: Mapping[str, Any],
    config: Config,
    tiles: int,
) -> dict[str, jax.Array]:
    """The kernel's outputs by name, from work on `tiles` tiles; parameters that are not given are None in the kernel.

    The launcher goes by the order of the kernel's parameters, where outputs follow inputs. A new field or term of the
    statistics' table, which the kernel does not translate, is no parameter of it and is refused.
    """
    order = _function(function).arg_names
    if missing := sorted((inputs.keys() | outputs.keys()) - set(order)):
        raise NotImplementedError(f"implementation='triton' has nothing for {missing} in its kernel: use 'xla'")
    inputs = {name: inputs[name] for name in order if name in inputs}
    outputs = {name: outputs[name] for name in order if name in outputs}
    # With descriptors, for which they need scratch, programs work on many tiles.
    scratch = config.descriptors
    programs = min(tiles, targets.multiprocessors()) if scratch else tiles
    kernel = Kernel(
        function,
        tuple((name, _TYPES[x.dtype.name]) for name, x in inputs.items()),
        tuple((name, _TYPES[np.dtype(x.dtype).name]) for name, x in outputs.items()),
        tuple(sorted({**constants, "WINDOW": config.window, "GROUP": config.group}.items())),
        programs,
        config.warps,
        config.stages,
        scratch,
        capability(),
    )
    results = list(outputs.values())
    if scratch:
        results.append(jax.ShapeDtypeStruct((programs * SCRATCH_BYTES,), np.uint8))
    found = apart(_call_p.bind(*apart(list(inputs.values())), kernel=kernel, results=tuple(results)))
    return dict(zip(outputs, found, strict=False))


def _lower(ctx: Any, *operands: Any, kernel: Kernel, results: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """The launch as a call of jaxlib's handler, which may be captured in a CUDA graph."""
    from jaxlib import gpu_triton

    if kernel.capability is None:
        raise NotImplementedError(
            "implementation='triton' compiles for a GPU that is known when the call is traced, and none was: use 'xla'"
        )
    built = compiled(kernel)
    metadata, arrays = built.metadata, len(kernel.inputs) + len(kernel.outputs)
    parameters = [gpu_triton.create_array_parameter(0, _ALIGNMENT) for _ in range(arrays)]
    if kernel.scratch:
        parameters.append(gpu_triton.create_array_parameter(0, _SCRATCH_ALIGNMENT))
    code = gpu_triton.TritonKernel(
        metadata.name, metadata.num_warps, 1, metadata.shared, built.asm["ptx"], "", kernel.capability
    )
    launch = gpu_triton.TritonKernelCall(code, kernel.programs, 1, 1, parameters)
    names = [[name for name, _ in some] for some in (kernel.inputs, kernel.outputs)]
    aliases = {names[0].index(BEFORE): names[1].index(STORED)} if BEFORE in names[0] else {}
    rule = jax.ffi.ffi_lowering("triton_kernel_call_ffi", operand_output_aliases=aliases)
    return rule(ctx, *operands, opaque=zlib.compress(launch.to_proto(kernel.function, b"")))


mlir.register_lowering(_call_p, _lower, platform="cuda")
