"""What the table of statistics has and the kernels have not is refused when a call is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ce import linear_loss
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, epilogues

# In in_forward a kernel makes dlogits in float16 only.
SHAPES = [jax.ShapeDtypeStruct((256, 128), jnp.float16), jax.ShapeDtypeStruct((512, 128), jnp.float16)]


def test_a_field_without_translation_is_refused() -> None:
    spec: Any = None
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' does not compute \['sum_cubes'\] of a Partial"):
        epilogues.piece_partial(spec, ("max", "sum_cubes"), {}, jnp.int32(0), jnp.zeros((4, 8)), None)


@pytest.mark.usefixtures("local_h100")
@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_a_term_without_translation_is_refused(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def collision(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        def row_loss(statistics: Any) -> jax.Array:
            return statistics.sum_sq_probs

        return linear_loss(row_loss, hidden, weight, None, implementation="mosaic_gpu", backward=mode)

    gradients = jax.value_and_grad(collision, (0, 1))
    jax.eval_shape(gradients, *SHAPES)
    monkeypatch.setattr(dlogits_kernel, "_TRANSLATED", dlogits_kernel._TRANSLATED - {"prob_sq"})
    jax.clear_caches()
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' has no term for \['prob_sq'\] in dlogits"):
        jax.eval_shape(gradients, *SHAPES)
