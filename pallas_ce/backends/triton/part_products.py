"""Gradient products of a part of the vocabulary, in place by a kernel: see `product_kernel`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.triton import binding, configs
from pallas_ce.head import Head
from pallas_ce.streaming.gradient_products import WeightGradient


def add_for_hidden(
    head: Head, dlogits: jax.Array, total: jax.Array, start: jax.Array, filled: jax.Array | None
) -> jax.Array:
    """`total [n, H]` with `dlogits [n, c]·weight` of the columns from `start []` on, in the first `filled []` rows."""
    arrays = {"left": dlogits, "right": head.weight.astype(head.spec.dtype), binding.BEFORE: total}
    sizes = {"M": dlogits.shape[0], "N": head.spec.hidden_size, "K": dlogits.shape[1]}
    return _product(head, arrays, sizes, start, filled, dlogits.shape, for_hidden=True)


def put_for_weight(
    head: Head, dlogits: jax.Array, hidden: jax.Array, total: WeightGradient, start: jax.Array, filled: jax.Array | None
) -> jax.Array:
    """`total` with its part from `start []` on replaced by `dlogits [n, c]ᵀ·hidden`, of the first `filled []` rows."""
    assert total.scale is not None
    hidden = hidden.astype(head.spec.dtype)
    left, right = (dlogits, hidden) if head.spec.vocab_axis == 0 else (hidden, dlogits)
    arrays = {"left": left, "right": right, binding.BEFORE: total.array}
    arrays["scale"] = total.scale.astype(jnp.float32).reshape(1)
    sizes = {"M": left.shape[1], "N": right.shape[1], "K": dlogits.shape[0]}
    return _product(head, arrays, sizes, start, filled, dlogits.shape, for_hidden=False)


def _product(
    head: Head,
    arrays: dict[str, jax.Array],
    sizes: dict[str, int],
    start: jax.Array,
    filled: jax.Array | None,
    shape: tuple[int, ...],
    *,
    for_hidden: bool,
) -> jax.Array:
    """One launch, on dlogits of that shape."""
    (rows, columns), spec, total = shape, head.spec, arrays[binding.BEFORE]
    config = configs.product_for(spec, binding.capability(), columns)
    assert config is not None
    existing = spec.vocab_size if head.valid_columns is None else head.valid_columns
    bounds = (rows if filled is None else filled, start, existing)
    constants: dict[str, Any] = {
        **sizes,
        "VOCABULARY": spec.vocab_size,
        "STRIDE": spec.weight_rows,
        "AXIS": spec.vocab_axis,
        "FOR_HIDDEN": for_hidden,
        "COUNTED": for_hidden and head.valid_columns is not None,
        "PARTS": total.dtype.itemsize // 2,
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
    }
    tiles = -(-sizes["M"] // config.rows) * -(-sizes["N"] // config.columns)
    arrays["bounds"] = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in bounds])
    outputs = {binding.STORED: jax.ShapeDtypeStruct(total.shape, total.dtype)}
    return binding.call("product_kernel", arrays, outputs, constants, config, tiles)[binding.STORED]
