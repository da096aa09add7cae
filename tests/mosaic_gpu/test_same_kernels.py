"""A kernel is the same in every program of every process: compiled once, and found in a compilation cache."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce import linear_cross_entropy
from tests import compile_for_h200 as h200


def arguments() -> list[Any]:
    mesh = h200.h200_mesh()
    shapes = ((328, 136), jnp.bfloat16), ((1240, 136), jnp.bfloat16), ((328,), jnp.int32)
    return [h200.shaped(mesh, *x) for x in shapes]


def test_a_kernel_is_the_same_in_the_next_program() -> None:
    def kernels(factor: float) -> set[str]:
        jax.clear_caches()

        def loss(*arrays: jax.Array) -> jax.Array:
            return factor * linear_cross_entropy(*arrays, implementation="mosaic_gpu", backward="recompute")

        text = h200.lower_for_h200(jax.jit(jax.grad(loss, (0, 1))), *arguments()).as_text()
        return set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text))

    first = kernels(1.0)
    assert len(first) >= 2
    assert kernels(2.0) == first


def test_a_stored_program_holds_its_kernels_machine_code() -> None:
    """A start that finds the program in the cache assembles none."""
    loss = functools.partial(linear_cross_entropy, implementation="mosaic_gpu")
    entry = b"pallas_ce_forward_mosaic_gpu_kernel"  # so called when it is assembled
    assert entry not in h200.lower_for_h200(jax.jit(loss), *arguments()).as_text().encode()
    assert entry in h200.compile_for_h200(loss, *arguments())[0].runtime_executable().serialize()
