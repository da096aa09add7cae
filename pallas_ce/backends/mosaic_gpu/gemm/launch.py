"""How a kernel is launched: a persistent thread block of two warpgroups on each multiprocessor."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from pallas_ce.backends.mosaic_gpu.gemm import loop
from pallas_ce.backends.mosaic_gpu.schedule import WARPGROUPS, Product
from pallas_ce.streaming.loops import apart
from pallas_ce.streaming.tiles import pad

_NUMBERS = "numbers"

Named = Mapping[str, Any]
_NONE: Named = MappingProxyType({})


class Operands(NamedTuple):
    """What a kernel reads: matrices, which TMA loads, and inputs of its epilogue."""

    product: Product
    matrices: tuple[Any, ...]
    inputs: Named = _NONE

    def by_row(self, x: jax.Array, value: float = 0) -> jax.Array:
        """A vector by row, padded."""
        return pad(x, (self.product.padded_rows,), value)

    def run(
        self, name: str, epilogue: loop.Epilogue, outputs: Named, inputs: Named = _NONE, numbers: Named = _NONE
    ) -> dict[str, jax.Array]:
        """Runs one kernel, which profilers show by its name; returns its outputs by name.

        The epilogue reads further `inputs`, may change `jax.Ref`s among them, and finds `numbers`, `[]` int32, as
        `[1]`; None is left out. It writes `outputs`: of a shape and dtype, or arrays changed in place.
        """
        if any(isinstance(x, jax.Array) for x in outputs.values()):
            before = {
                key: apart(x) if isinstance(x, jax.Array) else lax.empty(x.shape, x.dtype) for key, x in outputs.items()
            }

            def write(refs: dict[str, Any]) -> None:
                self.run(name, epilogue, {}, {**inputs, **refs}, numbers)

            return apart(pl.run_state(write)(before))
        read = {key: x for key, x in {**self.inputs, **inputs}.items() if x is not None}
        given = {key: x for key, x in numbers.items() if x is not None}
        names = (*read, *[_NUMBERS][: len(given)], *outputs)
        static = self.product, self.product.workers, len(self.matrices), epilogue, names, tuple(given)
        function = kernel_function(name, *static, tuple(outputs.values()))
        with jax.named_scope(name):
            others = [x if isinstance(x, jax.Ref) else _at_run_time(x) for x in read.values()]
            if given:  # packed into one array, so that XLA prepares them in one operation
                others.append(_at_run_time(jnp.stack([jnp.asarray(x, jnp.int32) for x in given.values()])))
            results = apart(function(*self.matrices, *others))
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
    workers: int,
    matrices: int,
    epilogue: loop.Epilogue,
    names: tuple[str, ...],
    numbers: tuple[str, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
) -> Any:
    """The kernel as a jitted function `(*matrices, *inputs, numbers) -> outputs`: one for each set of static facts.

    A kernel that a program uses twice is thus traced, lowered and assembled once. A function must not serve several
    sets: JAX 0.11 confuses the grids of a kernel function that is used with several.
    """

    def kernel_body(*arrays: Any) -> None:
        name_dumps(name)
        refs = dict(zip(names, arrays[matrices:], strict=True))
        refs |= {number: refs[_NUMBERS].at[pl.ds(place, 1)] for place, number in enumerate(numbers)}
        loop.run(list(arrays[:matrices]), refs, product, epilogue)

    kernel_body.__name__ = name
    # `loop` and `layouts` place the barriers.
    options = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True)
    kernel = plgpu.kernel(
        kernel_body,
        out_type=outputs,
        grid=(workers,),
        grid_names=("worker",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=options,
    )
    kernel.__name__ = name
    return jax.jit(kernel)
