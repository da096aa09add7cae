"""The GPU interpreter with race detection, and problems small enough for it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import callback as jax_callback
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_ce.backends.mosaic_gpu import schedule
from pallas_ce.backends.mosaic_gpu.backend import MosaicBlock
from pallas_ce.backends.mosaic_gpu.gemm import launch
from pallas_ce.backends.mosaic_gpu.kernels import materialized_kernel, product_kernel
from pallas_ce.backends.mosaic_gpu.schedule import Config
from pallas_ce.head import Batch, Head, HeadSpec
from tests.pallas_ce.kernel_cases import Case, problem_of

_plain_copy, _PlainTask = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.AsyncCopySmemToGmemTask
_copy = threading.local()


class _AddingTask(_PlainTask):  # type: ignore[misc,valid-type]
    """A copy out of shared memory that adds to its destination; the interpreter does not know it."""

    def _at_destination(self, memory: Any) -> tuple[Any, Any] | None:
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        clipped = gpu_callbacks._clip_store_to_shape(self.dst_access, np.zeros(self.dst_access.shape), shape)
        if clipped is None:
            return None
        found = memory.get_buffer_content(self.dst_allocation_key, clipped[0], self.thread)
        return clipped[0], np.array(found[0])

    def pre_read(self, tma_thread_id: int, shared_memory: Any) -> None:
        self.old = self._at_destination(shared_memory)
        super().pre_read(tma_thread_id, shared_memory)

    def post_write(self, tma_thread_id: int, shared_memory: Any) -> None:
        if self.old is not None:
            where, new = self._at_destination(shared_memory)  # type: ignore[misc]
            shared_memory.store_buffer_content(self.dst_allocation_key, where, self.old[1] + new, self.thread)
        super().post_write(tma_thread_id, shared_memory)


def _copy_or_add(*, reduction_op: Any, **given: Any) -> Any:
    _copy.adds = reduction_op == "add"
    return _plain_copy(reduction_op=None, **given)


def _task(**given: Any) -> Any:
    return (_AddingTask if _copy.adds else _PlainTask)(**given)


def _call_directly(*args: Any, callback: Any, **_: Any) -> Any:
    """What the interpreter calls, on NumPy's arrays: to put each argument on a device took most of the tests' time."""
    numbers = [np.ndim(x) == 0 and np.issubdtype(np.result_type(x), np.integer) for x in args]
    return jax.tree.map(
        np.asarray, callback(*[int(x) if is_one else x for x, is_one in zip(args, numbers, strict=True)])
    )


RACE = "RACE DETECTED"


@pytest.fixture
def interpreted(capfd: pytest.CaptureFixture[str], tiles: Any) -> Iterator[Callable[..., Any]]:
    """The interpreter runs a test's kernels, which fails where it sees a race; `interpreted(f)(*args)` runs f."""

    def run(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.block_until_ready(jax.jit(f)(*args))

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with contextlib.ExitStack() as stack:
        stack.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
        stack.enter_context(mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", _copy_or_add))
        stack.enter_context(mock.patch.object(gpu_callbacks, "AsyncCopySmemToGmemTask", _task))
        stack.enter_context(mock.patch.object(jax_callback, "io_callback_impl", _call_directly))
        stack.enter_context(mock.patch.object(launch, "name_dumps"))  # it has no program to write
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)))
        yield run
    said = "".join(capfd.readouterr())
    assert RACE not in said, said[:2000]


@pytest.fixture
def maxima_keep_nan() -> Iterator[None]:
    """As a GPU's do, and a CPU's by XLA do not; not for all tests, as XLA crashes on some programs then."""

    def larger(a: Any, b: Any) -> Any:
        return jnp.where((a > b) | (a != a), a, b)

    def largest(x: Any, axes: Any, **_: Any) -> Any:
        least = -np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min
        return lax.reduce(x, np.array(least, x.dtype), larger, axes)

    with mock.patch.dict(mlir._platform_specific_lowerings["cpu"]):
        for primitive, rule in ((lax.max_p, larger), (lax.reduce_max_p, largest)):
            mlir.register_lowering(primitive, mlir.lower_fun(rule, multiple_results=False), platform="cpu")
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the kernels tiles that suit the interpreter, which `tiles(**options)` changes."""

    def stored(itemsize: int, piece: int | None = None) -> Config:
        return Config(rows=64, columns=128, stages=2, sms=3, piece=piece)

    def use(**options: Any) -> None:
        config = Config(**{"rows": 64, "columns": 64, "stages": 3, "sms": 4, **options})
        monkeypatch.setattr(schedule, "rule", lambda *given: config)
        monkeypatch.setattr(product_kernel, "_TILES", (config,))
        monkeypatch.setattr(materialized_kernel, "tiles", stored)

    use()
    return use


class Problem(NamedTuple):
    """A head and a block of rows."""

    hidden: jax.Array
    head: Head
    labels: jax.Array


def make_problem(case: Case, weights: bool = False) -> Problem:
    """The problem of a case, with weights of the logits if these are to be, and NaN in the weight's padding."""
    p, (_, h, v) = problem_of(case), case.sizes
    weight = np.where(np.arange(v + case.padding)[:, None] < v, p.arrays["weight"], np.nan).astype(case.dtype)
    bias, scale = (jnp.asarray(p.arrays[name]) if name in p.arrays else None for name in ("bias", "logit_scale"))
    u = jax.random.normal(jax.random.key(4), (v,)).at[v // 2].set(0.0) if weights else None
    spec = HeadSpec(h, v + case.padding, v, case.axis, np.dtype(case.dtype), case.options.get("logit_softcap"))
    head = Head(jnp.asarray(weight if case.axis == 0 else weight.T), bias, scale, u, spec)
    return Problem(jnp.asarray(p.arrays["hidden"]), head, jnp.asarray(np.maximum(p.labels, -1)))


def block_of(weight: Any, rows: Any, vocab_axis: int, valid: Any = None, last: Any = None) -> MosaicBlock:
    """The kernels of a block for a plain weight `[V, H]`, or `[H, V]`, and its hidden states `[n, H]`."""
    v, h = weight.shape[vocab_axis], weight.shape[1 - vocab_axis]
    head = Head(weight, None, None, None, HeadSpec(h, v, v, vocab_axis, np.dtype(weight.dtype), None))
    return MosaicBlock(head, Batch(rows), valid, last=last)
