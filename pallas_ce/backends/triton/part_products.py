"""Gradient products of a part of the vocabulary, in place by a kernel: see `product_kernel`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.triton import binding, configs
from pallas_ce.head import Head


def product(
    head: Head,
    dlogits: jax.Array,
    total: jax.Array,
    start: jax.Array | int,
    filled: jax.Array | None,
    hidden: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """`total` with a product of `dlogits [n, c]`, of the columns from `start []` on and the first `filled []` rows.

    `dlogits·weight` is added to `total [n, H]`. With `hidden [n, H]` the part of the weight's gradient `total` is
    replaced by `scale·dlogitsᵀ·hidden`.
    """
    (rows, columns), spec, for_hidden = dlogits.shape, head.spec, hidden is None
    config = configs.product_for(spec, binding.capability(), columns)
    assert config is not None
    if hidden is None:
        left, right, sizes = dlogits, head.weight.astype(spec.dtype), (rows, spec.hidden_size, columns)
    else:
        hidden = hidden.astype(spec.dtype)
        left, right = (dlogits, hidden) if spec.vocab_axis == 0 else (hidden, dlogits)
        sizes = left.shape[1], right.shape[1], rows
    arrays = {"left": left, "right": right, binding.BEFORE: total}
    if scale is not None:
        arrays["scale"] = scale.astype(jnp.float32).reshape(1)
    constants: dict[str, Any] = {
        **dict(zip("MNK", sizes, strict=True)),
        "VOCABULARY": spec.vocab_size,
        "STRIDE": spec.weight_rows,
        "AXIS": spec.vocab_axis,
        "FOR_HIDDEN": for_hidden,
        "COUNTED": for_hidden and head.valid_columns is not None,
        "PARTS": total.dtype.itemsize // 2,
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
    }
    existing = spec.vocab_size if head.valid_columns is None else head.valid_columns
    bounds = rows if filled is None else filled, start, existing
    arrays["bounds"] = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in bounds])
    tiles, outputs = config.tiles(*sizes[:2]), {binding.STORED: jax.ShapeDtypeStruct(total.shape, total.dtype)}
    return binding.call("product_kernel", arrays, outputs, constants, config, tiles)[binding.STORED]
