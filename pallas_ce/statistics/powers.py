"""Powers of two, exact: what scales numbers by them costs no accuracy.

Exponents are read and written as bits: `jnp.frexp` and `jnp.ldexp` of JAX 0.12.0 do not tell over which mesh axes their
results vary, which a checked `shard_map` refuses.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def exponent_above(x: jax.Array) -> jax.Array:
    """`[]` int32: the least e with `|x| < 2**e` for all of `x` that are finite; 1 where none is a normal number but 0.

    Numbers that are not finite fit no range, and must not decide how the others fit.
    """
    facts = np.finfo(x.dtype)
    x = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0), initial=0.0)
    x = jnp.where(x == 0, jnp.ones((), x.dtype), x)
    return (lax.bitcast_convert_type(x, _integers(facts)) >> facts.nmant).astype(jnp.int32) - (facts.maxexp - 2)


def power_of_two(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    """`2**exponent`, exact; the nearest normal number of `dtype` where that is none."""
    facts = np.finfo(dtype)
    biased = jnp.clip(exponent, facts.minexp, facts.maxexp - 1) + (facts.maxexp - 1)
    return lax.bitcast_convert_type(biased.astype(_integers(facts)) << facts.nmant, dtype)


def _integers(facts: "np.finfo[Any]") -> np.dtype:  # in quotes: NumPy 2.1 cannot subscript it
    return np.dtype(f"int{facts.bits}")
