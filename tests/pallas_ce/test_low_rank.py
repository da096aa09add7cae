"""A weight with a low-rank term: its programs on a GPU, and what Triton refuses."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import LowRank, explain, linear_cross_entropy
from tests import compile_for_h200 as h200


def test_triton_refuses_a_large_rank_by_name() -> None:
    hidden, weight, up, down = (jnp.ones(shape, jnp.bfloat16) for shape in ((12, 5), (31, 5), (31, 400), (400, 5)))
    with pytest.raises(ValueError, match=r"triton.*LowRank"):
        linear_cross_entropy(hidden, LowRank(weight, up, down), np.arange(12), implementation="triton")


@pytest.mark.nightly
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla", "triton"])
def test_an_h200s_program_makes_no_array_of_the_weights_size(
    implementation: Any, vocab_axis: int, backward: Any
) -> None:
    """With the weight frozen it takes two large products' memory: the plain head's, and 64 MiB at most."""
    n, h, v, r = 8192, 1536, 65536, 16
    of_weight = [((v, h), jnp.bfloat16), ((v, r), jnp.float32), ((r, h), jnp.float32)]
    if vocab_axis == 1:
        of_weight = [(shape[::-1], dtype) for shape, dtype in of_weight]
    hidden, weight, up, down, labels = h200.arrays(((n, h), jnp.bfloat16), *of_weight, ((n,), jnp.int32))
    options: Any = {"implementation": implementation, "backward": backward, "vocab_axis": vocab_axis}

    def plain(hidden: Any, weight: Any, labels: Any) -> Any:
        return jax.value_and_grad(lambda x: linear_cross_entropy(x, weight, labels, **options))(hidden)

    def with_term(hidden: Any, weight: Any, up: Any, down: Any, labels: Any) -> Any:
        def loss(hidden: Any, up: Any, down: Any) -> Any:
            return linear_cross_entropy(hidden, LowRank(weight, up, down, 2.0), labels, **options)

        return jax.value_and_grad(loss, (0, 1, 2))(hidden, up, down)

    alone = h200.compile_for_h200(plain, hidden, weight, labels)[0].memory_analysis()
    compiled = h200.compile_for_h200(with_term, hidden, weight, up, down, labels)[0]
    assert compiled.memory_analysis().temp_size_in_bytes <= alone.temp_size_in_bytes + 64 * 2**20
    # Of an instruction's line, what lies before its name: the type of its result, maybe a tuple.
    lines = re.findall(r" = (.*?) ([a-z][a-z-]*)\(", compiled.as_text())
    large = {name for result, name in lines if f"[{v},{h}]" in result or f"[{h},{v}]" in result}
    assert large <= {"parameter", "get-tuple-element", "tuple", "while", "bitcast"}, large
    if implementation == "xla":
        told = explain(hidden, LowRank(weight, up, down, 2.0), differentiate=("hidden",), **options)
        assert told.peak_bytes <= 1.25 * alone.temp_size_in_bytes
