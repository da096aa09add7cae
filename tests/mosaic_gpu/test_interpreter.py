"""What the other tests rely on: under the interpreter a race is seen, and what is no race is not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.mosaic_gpu.conftest import RACE


@pytest.mark.parametrize("ordered", [True, False])
def test_a_read_of_what_another_warpgroup_writes_is_a_race_unless_a_barrier_orders_them(
    ordered: bool, interpreter: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def body(given: Any, out: Any, shared: Any, written: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        def write() -> None:
            shared[...] = given[...]
            plgpu.commit_smem()
            plgpu.barrier_arrive(written)

        def read() -> None:
            if ordered:
                plgpu.barrier_wait(written)
            out[...] = shared[...]

        lax.cond(warpgroup == 0, write, read)

    kernel: Any = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
    )
    given = jnp.arange(64.0 * 64).reshape(64, 64)
    found, raised = None, ""
    try:
        found = interpreter(kernel)(given)
    except jax.errors.JaxRuntimeError as error:  # JAX 0.11 prints races, 0.12 raises them
        raised = str(error)
    assert (RACE in raised + "".join(capfd.readouterr())) != ordered
    if ordered:
        np.testing.assert_array_equal(found, given)
