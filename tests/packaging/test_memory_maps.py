"""A test process gives back the memory maps of compiled programs before Linux refuses more."""

from collections.abc import Iterator
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from tests import memory_maps

pytestmark = pytest.mark.skipif(not memory_maps.count(), reason="this system does not list a process's memory maps")
_traced: list[jax.Array] = []


@pytest.fixture(scope="module")
def lowest_bound() -> Iterator[None]:
    with mock.patch.object(memory_maps, "MOST", 0):
        yield


@jax.jit
def _compiled(x: jax.Array) -> jax.Array:
    _traced.append(x)
    return x


def test_compiled_programs_are_dropped_above_the_bound_and_not_below(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory_maps.count()
    programs = [jax.jit(lambda x, i=i: jnp.cumsum(jnp.sin(x)) + i) for i in range(20)]
    for program in programs:
        program(jnp.ones(8))
    grown = memory_maps.count()
    assert grown > before + 40

    monkeypatch.setattr(memory_maps, "MOST", grown + 1)
    memory_maps.give_back()
    assert memory_maps.count() > before + 40
    monkeypatch.setattr(memory_maps, "MOST", before)
    memory_maps.give_back()
    assert memory_maps.count() < grown - 40


@hypothesis.settings(max_examples=3)
@hypothesis.given(x=st.integers(0, 9))
def test_they_are_dropped_between_drawn_examples_too(lowest_bound: None, x: int) -> None:
    traced = len(_traced)
    _compiled(x)
    assert len(_traced) == traced + 1
