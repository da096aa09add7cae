"""Powers of two from bits, against NumPy's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.statistics.gradient import exponent_above, power_of_two


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponents_and_powers_are_those_of_frexp_and_ldexp(dtype: Any) -> None:
    x = np.asarray(
        [1e-37, 0.1, np.nextafter(dtype(1), dtype(0)), 1, 1.5, 2, np.nextafter(dtype(8), dtype(9)), 8e37], dtype
    )
    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(exponent_above))(x)
        np.testing.assert_array_equal(found, np.frexp(x)[1])
        np.testing.assert_array_equal(power_of_two(-found, np.dtype(dtype)), np.ldexp(dtype(1), -np.frexp(x)[1]))
        assert power_of_two(jnp.int32(5000), np.dtype(dtype)) == 2.0 ** (np.finfo(dtype).maxexp - 1)
        assert power_of_two(jnp.int32(-5000), np.dtype(dtype)) == np.finfo(dtype).smallest_normal
        for nothing in ([], [0], [0, np.inf, np.nan]):
            assert exponent_above(jnp.asarray(nothing, dtype)) == 1


def test_what_is_not_finite_does_not_decide_how_the_others_fit() -> None:
    assert exponent_above(jnp.array([3.0, -100.0, np.nan, -np.inf, np.inf])) == 7
