"""A test process drops compiled programs, whose memory maps Linux limits, between drawn examples too."""

from collections.abc import Iterator
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from tests import memory_maps

_traced: list[jax.Array] = []


@pytest.fixture(scope="module")
def no_room() -> Iterator[None]:
    with mock.patch.object(memory_maps, "MOST", 0):
        yield


@jax.jit
def _compiled(x: jax.Array) -> jax.Array:
    _traced.append(x)
    return x


@pytest.mark.skipif(not memory_maps.count(), reason="this system does not list a process's memory maps")
@hypothesis.settings(max_examples=3)
@hypothesis.given(x=st.integers(0, 9))
def test_they_are_dropped_between_drawn_examples_too(no_room: None, x: int) -> None:
    traced = len(_traced)
    _compiled(x)
    assert len(_traced) == traced + 1
