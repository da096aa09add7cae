"""What is not finite shows where plain JAX shows it, under the GPU interpreter."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_ce import not_finite

BFLOAT16 = np.dtype(jnp.bfloat16)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is NumPy's


@pytest.mark.nightly(keep=3)
@pytest.mark.usefixtures("small_backend", "maxima_keep_nan")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["weight", "bias", "hidden"])
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_losses_and_gradients(place: str, value: float, backward: Any, interpreted: Any) -> None:
    options = {"implementation": "mosaic_gpu", "backward": backward}
    not_finite.assert_as_plain_jax(place, value, BFLOAT16, compiled=interpreted, **options)


@pytest.mark.nightly(keep=2)
@pytest.mark.usefixtures("small_backend", "maxima_keep_nan")
@pytest.mark.parametrize(("place", "value"), [("weight", np.nan), ("hidden", np.nan), ("weight", np.inf)])
def test_statistics(place: str, value: float, interpreted: Any) -> None:
    options = {"implementation": "mosaic_gpu", "compiled": interpreted}
    not_finite.assert_statistics_as_defined(place, value, BFLOAT16, **options)
