"""The k largest on Hopper: the kernel that stores logits, under the interpreter; the whole, and what it compiles to."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_top_k
from pallas_ce.backends.mosaic_gpu.kernels.logits_kernel import StoredBlocks
from pallas_ce.head import HeadSpec
from pallas_ce.streaming.budget import DEFAULT_SCRATCH_BYTES
from tests.compile_for_h200 import clean, of_head
from tests.pallas_ce.streamed import assert_top_k, exact_head, stored_logits


@pytest.mark.nightly(keep=3)
@pytest.mark.usefixtures("maxima_keep_nan")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(
    ("n", "v", "k", "config", "options"),
    [
        (70, 328, 5, {"sms": 3}, {"temperature": 0.3, "logit_softcap": 2.0}),
        # From where e^{z/T - max z} overflows.
        (300, 336, 64, {}, {"row_mask": np.arange(300) % 3 != 1, "temperature": np.linspace(0.02, 4, 300)}),
        (40, 1112, 5, {"columns": 128, "stages": 2}, {"nan": True, "dtype": jnp.float16}),
        (130, 304, 77, {"rows": 128, "columns": 128}, {"vocab_size": 300, "logit_scale": 1.3, "temperature": 0.7}),
        (20, 96, 12, {"row_group": 1}, {"vocab_size": 67, "vocab_axis": 1}),
        (9, 8, 3, {}, {"vocab_size": 5}),
    ],
)
def test_equals_the_top_k_of_stored_logits(
    n: int, v: int, k: int, config: dict[str, int], options: dict[str, Any], tiles: Any, interpreted: Any
) -> None:
    tiles(**config)
    check(interpreted, n, v, k, options, two_blocks="nan" not in options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(
    ("n", "v", "k", "options"),
    [
        (3000, 131072, 64, {}),
        (1000, 50272, 64, {"vocab_axis": 1, "temperature": 0.7, "row_mask": np.arange(1000) % 5 != 1}),
        (300, 32000, 5, {"vocab_axis": 1, "vocab_size": 31000, "logit_softcap": 30.0}),
        (77, 1000, 700, {"temperature": np.linspace(0.5, 4, 77)}),
        (1, 128256, 1, {}),
        (300, 32008, 1, {"nan": True}),
        (300, 32008, 64, {"nan": True}),
    ],
)
def test_on_a_gpu_it_equals_the_top_k_of_stored_logits(n: int, v: int, k: int, options: dict[str, Any]) -> None:
    check(jax.jit, n, v, k, options, two_blocks=n > 500)


def check(run: Callable[..., Any], n: int, v: int, k: int, options: dict[str, Any], two_blocks: bool) -> None:
    """Small whole numbers: exact in 16 bits, with many equal logits and some of -inf; in several blocks of rows.

    With "nan", NaN in a row of hidden states and, so it seems to most rows, in two of the weight. It comes first.
    """
    arrays, options = exact_head(n, n, 32, v, 0.5), dict(options)
    if options.pop("nan", False):
        arrays["bias"][:] = 0
        arrays["hidden"][3, 5] = np.nan
        arrays["weight"][[v // 2, v - 1], 7] = np.inf  # where hidden is 0 that is NaN
    dtype = options.pop("dtype", jnp.bfloat16)
    hidden, weight = (jnp.asarray(arrays[name], dtype) for name in ("hidden", "weight"))
    if options.get("vocab_axis"):
        weight = weight.T
    blocks = StoredBlocks(HeadSpec(32, v, v, 0, np.dtype(dtype), None), k, None)
    scratch = blocks.block_sizes(n // 2 + 1).scratch_bytes if two_blocks else None

    def top_k(hidden: jax.Array, weight: jax.Array) -> Any:
        return linear_top_k(
            hidden, weight, k, bias=arrays["bias"], implementation="mosaic_gpu", scratch_bytes=scratch, **options
        )

    found = run(top_k)(hidden, weight)
    stored = {name: options[name] for name in ("vocab_size", "logit_softcap") if name in options}
    with np.errstate(invalid="ignore"):
        z = stored_logits(**arrays, **stored, scale=options.get("logit_scale", 1.0)).astype(np.float32)
    cap_error = 2e-7 * (options.get("logit_softcap") or 0)  # the kernels' tanh is good to 1e-7
    temperature, mask = options.get("temperature", 1.0), options.get("row_mask")
    assert_top_k(found, z, k, temperature, mask, float(np.finfo(np.float32).eps), cap_error)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("n", "v", "h", "axis", "scratch"),
    [
        (16384, 131072, 4096, 1, 640 * 2**20),
        (1024, 50272, 768, 1, None),
        (100, 128256, 4096, 0, None),
    ],
)
def test_at_real_sizes_no_register_spills_and_scratch_holds(n: int, v: int, h: int, axis: int, scratch: Any) -> None:
    def top_k(hidden: Any, weight: Any) -> Any:
        return linear_top_k(hidden, weight, 64, vocab_axis=axis, implementation="mosaic_gpu", scratch_bytes=scratch)

    text, memory, kernels = clean(top_k, *of_head(n, v, h, axis)[:2])
    assert kernels == 1
    # Beside the scratch, a loop carries three arrays of the results' size, written at the end.
    assert memory.temp_size_in_bytes <= (scratch or DEFAULT_SCRATCH_BYTES) + 3 * 4 * 64 * n
    lengths = re.findall(r" sort\(f32\[\d+,(\d+)\]", text) or re.findall(r"\(f32\[\d+,(\d+)\][^)]*\) sort\(", text)
    assert max(map(int, lengths)) <= 1024
