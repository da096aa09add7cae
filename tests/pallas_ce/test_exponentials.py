"""What XLA makes beside a kernel: single entries of the logits; and exponentials made a second time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import entries
from pallas_ce.backends.exponentials import Block
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.gradient_products import WeightGradient

ROWS, VOCABULARY = 6, 1000


@dataclasses.dataclass(frozen=True)
class PlainBlock(Block):
    """Exponentials of stored logits; notes how many rows are to be made again.

    Attributes:
        remade: the counts.
    """

    remade: list[int]

    def exponentials(
        self, reference: jax.Array, names: frozenset[str], again: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[Callable[[], Partial], jax.Array]:
        if again is not None:
            self.remade.append(int(again[0]))
        logits = self.head.logits(self.batch)
        found = jnp.exp(logits - reference[:, None])
        partial = Partial(max=logits.max(axis=1), sum_exp=found.sum(axis=1))
        return lambda: partial, found.astype(self.head.spec.dtype)

    def dlogits(self, gradient: Gradient, part: Any = None, into: Any = None) -> jax.Array:
        raise NotImplementedError

    def for_hidden(self, operand: jax.Array) -> jax.Array:
        raise NotImplementedError

    def for_weight(
        self, operand: jax.Array, rows: jax.Array, total: WeightGradient, part: Any = None
    ) -> WeightGradient:
        raise NotImplementedError


def remade(logits: Any, labels: Any, dtype: Any = jnp.bfloat16) -> int:
    """How many rows are made again of a block whose rows all have these logits."""
    spec = HeadSpec(8, logits.size, logits.size, 0, np.dtype(dtype), None)
    head = Head(jnp.zeros((logits.size, 8), dtype), jnp.asarray(logits, jnp.float32), None, None, spec)
    batch = Batch(jnp.zeros((ROWS, 8), dtype), None if labels is None else jnp.asarray(labels, jnp.int32))
    block = PlainBlock(head, batch, None, [])
    partial, _ = block.make(frozenset({"lse"}))
    assert partial.max is not None
    assert partial.sum_exp is not None
    want = jax.nn.logsumexp(head.bias)
    np.testing.assert_allclose(partial.max + jnp.log(partial.sum_exp), jnp.full(ROWS, want), rtol=1e-6, atol=1e-5)
    (count,) = block.remade
    return count


def likely(scale: float = 2.0) -> Any:
    return scale * np.random.default_rng(3).standard_normal(VOCABULARY)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("loss", "again"), [(0.0, 0), (5.0, 0), (62.0, 0), (64.0, ROWS), (300.0, ROWS)])
def test_targets_of_any_loss_that_occurs_are_near_enough(loss: float, again: int, dtype: Any) -> None:
    logits = likely()
    if loss:
        logits[7] = -np.inf
        logits[7] = np.logaddexp.reduce(logits) - loss
    else:
        logits[7] = 90.0
    assert remade(logits, [7] * ROWS, dtype) == again


@pytest.mark.parametrize("labels", [[-1, 3, -1, 999, 0, 5], [[4, 5], [-1, 2], [6, -1], [0, 0], [1, 1], [8, 9]]])
def test_rows_without_a_target_or_with_several(labels: Any) -> None:
    """Logits may have any offset."""
    for offset in (0.0, -500.0):
        assert remade(likely() + offset, labels) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("height", "again"), [(2.0, 0), (80.0, ROWS)])
def test_without_targets_and_in_float16_a_sample_tells(height: float, again: int, dtype: Any) -> None:
    """Of 1000 entries multiples of 15 are the sample, and 7 is none."""
    logits = likely()
    logits[7] = height
    assert remade(logits, [7] * ROWS if dtype == jnp.float16 else None, dtype) == again


@pytest.mark.parametrize(("dtype", "again"), [(jnp.bfloat16, 0), (jnp.float16, ROWS)])
def test_a_sample_with_all_of_the_sum_is_too_high_for_float16(dtype: Any, again: int) -> None:
    logits = np.zeros(64_000)
    logits[0] = 80.0
    assert remade(logits, None, dtype) == again


def first_bits(x: np.ndarray, bits: int) -> np.ndarray:
    """`x` without the bits of its significand behind the first ones."""
    significand, exponent = np.frexp(x.astype(np.float64))
    unit = 2.0 ** (bits + 1)
    return np.ldexp(np.trunc(significand * unit) / unit, exponent)


@pytest.mark.parametrize(("precision", "bits"), [("HIGHEST", 23), ("HIGH", 10), ("DEFAULT", 10)])
def test_a_targets_logit_has_the_bits_that_the_others_have(precision: str, bits: int) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (rng.normal(size=(size, 64)).astype(np.float32) for size in (20, 30))
    spec = HeadSpec(64, 30, 30, 0, np.dtype(np.float32), None, precision=jax.lax.Precision[precision])
    head: Any = Head(jnp.asarray(weight), None, None, None, spec)
    columns = rng.integers(0, 30, size=(20, 3))
    found = entries.logits(head, Batch(jnp.asarray(hidden)), jnp.asarray(columns))
    want = np.take_along_axis(first_bits(hidden, bits) @ first_bits(weight, bits).T, columns, axis=1)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    if bits < 23:  # which are others than all bits would give
        assert np.abs(want - np.take_along_axis(hidden @ weight.T, columns, axis=1)).max() > 1e-3
