"""The temperature of functions that stream beyond row statistics: a number, or one for each row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.api import checks as arguments
from pallas_ce.head import HeadSpec


class Temperature(NamedTuple):
    """The divisor of the capped logits. None where it is the number 1.

    Attributes:
        value: `[]`, or `[...]` with one entry for each row.
    """

    value: jax.Array | None

    @classmethod
    def read(cls, value: Any, leading: tuple[int, ...], zero: bool = False) -> "Temperature":
        """Checked; `zero` says whether 0 is allowed."""
        read = arguments.temperature(value, leading, zero)
        return cls(None if isinstance(read, float) and read == 1.0 else jnp.asarray(read))

    def by_row(self, leading: tuple[int, ...], spec: HeadSpec) -> jax.Array | None:
        """`[N]` in the accumulator dtype, a constant; inside jit."""
        if self.value is None:
            return None
        values = jnp.broadcast_to(lax.stop_gradient(self.value), leading).reshape(math.prod(leading))
        return values.astype(spec.accumulator)
