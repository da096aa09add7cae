"""How a kernel is launched: a persistent thread block of two warpgroups on each multiprocessor."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from pallas_ce.backends.arrays import apart
from pallas_ce.backends.mosaic_gpu.gemm import loop
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue
from pallas_ce.backends.mosaic_gpu.schedule import WARPGROUPS, Product

_NUMBERS = "numbers"


def run(
    name: str,
    product: Product,
    matrices: tuple[Any, ...],
    epilogue: Epilogue,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    numbers: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """Runs one kernel, which profilers show by its name; returns its outputs by name.

    TMA loads the `matrices`. The epilogue reads `inputs`, may change `jax.Ref`s among them, and finds `numbers`, `[]`
    int32, as `[1]`; None is left out. It writes `outputs`: of a shape and dtype, or arrays changed in place.
    """
    if any(isinstance(x, jax.Array) for x in outputs.values()):
        before = {k: apart(x) if isinstance(x, jax.Array) else lax.empty(x.shape, x.dtype) for k, x in outputs.items()}

        def write(refs: dict[str, Any]) -> None:
            run(name, product, matrices, epilogue, inputs | refs, {}, numbers)

        return apart(pl.run_state(write)(before))
    inputs, given = ({key: x for key, x in of.items() if x is not None} for of in (inputs, numbers))
    shapes = tuple((key, value.shape, jnp.dtype(value.dtype)) for key, value in outputs.items())
    function = kernel_function(name, product, len(matrices), epilogue, tuple(inputs), tuple(given), shapes)
    with jax.named_scope(name):
        others = [x if isinstance(x, jax.Ref) else _at_run_time(x) for x in inputs.values()]
        if given:  # packed into one array, so that XLA prepares them in one operation
            others.append(_at_run_time(jnp.stack([jnp.asarray(x, jnp.int32) for x in given.values()])))
        results = apart(function(*matrices, *others))
    return dict(zip(outputs, results, strict=True))


def _at_run_time(x: jax.Array) -> jax.Array:
    """`x`, kept from constant folding: an executable does not align its constants, and kernels need aligned arrays."""
    return x + lax.optimization_barrier(jnp.zeros((), x.dtype))


def name_dumps(name: str) -> None:
    """Names the files that JAX's debugging options write of a kernel; called within it.

    By default JAX numbers the kernels of a process, and the number is part of a kernel. The same kernel would be
    compiled again for the next program, and a persistent compilation cache would miss a program compiled after others.
    """

    @plgpu.inline_mgpu()
    def set_name(context: Any) -> None:
        context.module.operation.attributes["mosaic_gpu.dump_basename"] = mlir.ir.StringAttr.get(name)

    set_name()


@functools.lru_cache(maxsize=1024)
def kernel_function(
    name: str,
    product: Product,
    matrices: int,
    epilogue: Epilogue,
    input_names: tuple[str, ...],
    numbers: tuple[str, ...],
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...],
) -> Any:
    """The kernel as a jitted function `(*matrices, *inputs, numbers) -> outputs`: one for each set of static facts.

    A kernel that a program uses twice is thus traced, lowered and assembled once. A function must not serve several
    sets: JAX 0.11 confuses the grids of a kernel function that is used with several.
    """
    names = (*input_names, *[_NUMBERS][: len(numbers)], *(output for output, _, _ in outputs))

    def kernel_body(*arrays: Any) -> None:
        name_dumps(name)
        refs = dict(zip(names, arrays[matrices:], strict=True))
        refs |= {number: refs[_NUMBERS].at[pl.ds(place, 1)] for place, number in enumerate(numbers)}
        loop.run(list(arrays[:matrices]), refs, product, epilogue)

    kernel_body.__name__ = name
    kernel = plgpu.kernel(
        kernel_body,
        out_type=tuple(jax.ShapeDtypeStruct(*shape) for _, *shape in outputs),
        grid=(product.workers,),
        grid_names=("worker",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,  # `loop` and `layouts` place the barriers
        ),
    )

    def run(*arrays: Any) -> Any:
        return kernel(*arrays)

    run.__name__ = name
    return jax.jit(run)
