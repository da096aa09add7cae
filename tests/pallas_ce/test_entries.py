"""Single entries of the logits, which XLA makes beside a kernel's: of operands as the kernel multiplies them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import entries
from pallas_ce.head import Batch, Head, HeadSpec


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
