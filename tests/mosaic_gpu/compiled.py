"""Functions compiled for an H200 at real sizes: their kernels spill no registers and wait for no product."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests import compile_for_h200 as h200

MIB = 2**20

_mesh = functools.cache(h200.h200_mesh)


def shaped(*shapes: tuple[tuple[int, ...], Any]) -> tuple[Any, ...]:
    """Arguments of these shapes and dtypes on an H200."""
    return tuple(h200.shaped(_mesh(), *shape) for shape in shapes)


def arguments(n: int, v: int, h: int, axis: int = 0, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Hidden states, weight and labels."""
    return shaped(((n, h), dtype), ((v, h) if axis == 0 else (h, v), dtype), ((n,), jnp.int32))


class Compiled(NamedTuple):
    """A program: its text, its memory, and how many kernels were assembled for it."""

    text: str
    memory: Any
    kernels: int


def clean(function: Callable[..., Any], *given: Any, **options: Any) -> Compiled:
    """The function compiled, of whose kernels none spills registers or waits for each product."""
    program, report = h200.compile_for_h200(function, *given, **options)
    assert report.kernels >= 1
    assert report.spilled_bytes == 0
    assert not report.serialised
    assert report.linked == (jax.__version_info__ >= (0, 12)), "nvJitLink assembles kernels from jax 0.12 on"
    return Compiled(program.as_text(), program.memory_analysis(), report.kernels)
