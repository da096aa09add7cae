"""`precision`: how a head's products multiply. Arguments are read here, once, into what a `HeadSpec` holds."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

# What a call takes as a precision. Signatures print the alias's name.
type PrecisionLike = str | Precision | DotAlgorithmPreset

_NAMES = ("default", "high", "highest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32", "fastest")
_OF_FLOAT8 = "ANY_F8"  # what presets for 8-bit operands begin with
_WORKING = (*_NAMES, *(name for name in DotAlgorithmPreset.__members__ if not name.startswith(_OF_FLOAT8)))

# The algorithm of a product of operands of these dtypes by default.
_ITSELF = {
    np.dtype(jnp.bfloat16): DotAlgorithmPreset.BF16_BF16_F32,
    np.dtype(np.float16): DotAlgorithmPreset.F16_F16_F32,
    np.dtype(np.float64): DotAlgorithmPreset.F64_F64_F64,
}


def read(precision: PrecisionLike) -> Precision | DotAlgorithmPreset:
    """The member that it names.

    Raises:
        ValueError: a name that JAX does not know, or an algorithm for 8-bit operands.
        TypeError: neither a name nor a member.
    """
    found = precision
    if isinstance(precision, str):
        named = DotAlgorithmPreset.__members__
        found = Precision(precision) if precision in _NAMES else named.get(precision, precision)
    if isinstance(found, Precision):
        return found
    if not isinstance(found, str | DotAlgorithmPreset):
        raise TypeError(
            f"precision={precision!r} is a {type(precision).__name__}; it must be one name for all products, a "
            "jax.lax.Precision, a jax.lax.DotAlgorithmPreset, or None"
        )
    if isinstance(found, str) or found.name.startswith(_OF_FLOAT8):
        wrong = "is unknown" if isinstance(found, str) else "multiplies 8-bit operands, which no head has"
        raise ValueError(f"precision={precision!r} {wrong}; choose from {', '.join(map(repr, _WORKING))}, or None")
    return found


def name(precision: PrecisionLike) -> str:
    """A name that `read` knows it by."""
    found = read(precision)
    return found.name if isinstance(found, DotAlgorithmPreset) else found.name.lower()


def resolve(precision: PrecisionLike | None, dtype: np.dtype) -> Precision | DotAlgorithmPreset:
    """How operands of `dtype` are multiplied, the same member for all that means the same.

    None is full float32 for float32 operands, unless JAX's configuration says otherwise: a GPU's own default is TF32, a
    TPU's bfloat16. Of other operands JAX's three levels say nothing, and the configuration is about 32-bit ones.
    """
    if precision is None:
        configured = jax.config.jax_default_matmul_precision if dtype == np.float32 else None
        precision = Precision.HIGHEST if configured is None else configured
    found = read(precision)
    if found in (DotAlgorithmPreset.DEFAULT, _ITSELF.get(dtype)):
        return Precision.DEFAULT
    return Precision.DEFAULT if isinstance(found, Precision) and dtype != np.float32 else found
