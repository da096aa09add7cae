"""Each kernel alone as machine code for an H200 at real sizes, with all tiles that the rules may choose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import entries
from pallas_ce.backends.mosaic_gpu.kernels import (
    dlogits_kernel,
    forward_kernel,
    narrow_sum,
    partials,
    product_kernel,
    stash_kernel,
)
from pallas_ce.backends.mosaic_gpu.schedule import PARTIALS_BYTES, Config, rule
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.gradient import Coefficients, from_cotangents, saved_statistics
from pallas_ce.statistics.table import PRIMITIVES
from tests.mosaic_gpu.compiled import MIB, Compiled, arguments, clean, shaped

LOSS = frozenset({"lse", "target_logit"})
EVERY = frozenset(PRIMITIVES)
VARENTROPY = frozenset({"lse", "varentropy"})
OPTIONS = ("bias", "scale", "weights", "softcap")


def coefficients_of(names: frozenset[str], by_row: Any) -> Coefficients:
    """Coefficients for the dlogits kernel where the statistics in `names` are differentiated."""
    saved = dict.fromkeys(saved_statistics(names), by_row)
    return entries.without(from_cotangents(dict.fromkeys(names, by_row), saved))


def compiled_kernel(
    kernel: str, n: int, v: int, h: int, axis: int, config: Config, names: frozenset[str], options: tuple[str, ...]
) -> Compiled:
    """One kernel alone, compiled; its vectors by row stand in for each other."""

    def run(hidden: Any, weight: Any, labels: Any, by_row: Any, by_column: Any, scalar: Any) -> Any:
        bias, scale, weights, softcap = (
            x if name in options else None
            for name, x in zip(OPTIONS, (by_column, scalar, by_column, 30.0), strict=True)
        )
        head = Head(weight, bias, scale, weights, HeadSpec(h, v, v, axis, np.dtype(hidden.dtype), softcap))
        if kernel == "forward":
            found = forward_kernel.statistics(head, hidden, names, config)
            return entries.with_targets(found, head, Batch(hidden, labels), names)
        if kernel == "stash":
            partial, stored = stash_kernel.stash(head, hidden, by_row, names, config)
            return partial(), stored
        return dlogits_kernel.dlogits(head, hidden, by_row, coefficients_of(names, by_row), config)

    further = shaped(((n,), jnp.float32), ((v,), jnp.float32), ((), jnp.float32))
    return clean(run, *arguments(n, v, h, axis), *further)


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize(
    ("kernel", "n", "v", "axis", "names", "options"),
    [
        ("forward", 1024, 131072, 0, LOSS, ()),
        ("forward", 8192, 131072, 0, LOSS, ()),
        ("forward", 8192, 50304, 1, frozenset({"lse", "entropy"}), ()),
        ("forward", 8192, 131072, 1, LOSS | {"entropy"}, ()),
        ("forward", 8192, 131072, 0, frozenset({"lse", "mean_logit", "entropy"}), ()),
        ("forward", 8192, 131072, 0, frozenset({"lse"}), OPTIONS),
        ("forward", 8192, 50304, 0, EVERY, OPTIONS),
        ("stash", 2048, 131072, 0, LOSS, ()),
        ("stash", 2048, 131072, 1, LOSS | {"mean_logit"}, ()),
        ("stash", 2048, 131072, 1, LOSS | {"mean_logit"}, ("bias",)),
        ("stash", 2048, 50304, 0, EVERY, OPTIONS),
        ("dlogits", 8192, 4096, 0, LOSS, ()),
        ("dlogits", 8192, 4096, 1, LOSS, ("bias",)),
        ("dlogits", 8192, 4096, 0, EVERY, ()),
        ("forward", 8192, 131072, 0, frozenset({"varentropy"}), ()),
        ("forward", 8192, 131072, 0, VARENTROPY | {"entropy", "mean_logit"}, ("bias",)),
        ("stash", 2048, 131072, 0, VARENTROPY | {"entropy"}, ()),  # which its derivative reads
        ("stash", 2048, 131072, 1, VARENTROPY | {"entropy", "target_logit"}, ("bias",)),
        ("dlogits", 8192, 4096, 0, VARENTROPY, ("bias",)),
        ("dlogits", 8192, 4096, 0, EVERY, OPTIONS),
    ],
)
def test_kernels(kernel: Any, n: int, v: int, axis: int, names: frozenset[str], options: tuple[str, ...]) -> None:
    vectors = partials.vectors(names) + (kernel == "stash")  # with the reference
    if kernel == "dlogits":
        vectors = sum(c is not None for c in coefficients_of(names, jnp.ones(1)))
    config = rule(kernel, HeadSpec(4096, v, v, axis, np.dtype(jnp.bfloat16), None), vectors, len(options))
    memory = compiled_kernel(kernel, n, v, 4096, axis, config, names, options).memory
    # Partial statistics and their padded inputs, or sums by column of each block of rows.
    assert memory.temp_size_in_bytes <= PARTIALS_BYTES + 8 * MIB


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("config", product_kernel._TILES)
def test_products_with_all_their_tiles(config: Config, vocab_axis: int) -> None:
    """In parts, added to a sum, and as a new gradient."""

    def run(stored: Any, weight: Any, hidden: Any, total: Any, weights_total: Any, valid: Any, lower: Any) -> Any:
        given = stored, hidden, vocab_axis, config
        new = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        return (
            product_kernel.for_hidden(stored, weight, vocab_axis, config, valid),
            product_kernel.add_for_hidden(stored, weight, vocab_axis, config, total, valid_rows=valid),
            product_kernel.for_weight(*given, new, multiplier=total[0, 0]),
            product_kernel.for_weight(*given, weights_total, replaced=valid == 0, valid_rows=valid),
            narrow_sum.add_for_weight(
                *given[:3], (weight, lower), first=valid == 0, last=valid == 1, valid_rows=valid, multiplier=total[0, 0]
            ),
        )

    n, v, h = 2048, 32768, 1024
    of_weight = (v, h) if vocab_axis == 0 else (h, v)
    given = shaped(((n, v), jnp.bfloat16), (of_weight, jnp.bfloat16), ((n, h), jnp.bfloat16))
    lower = shaped((narrow_sum.lower_shape(*of_weight), jnp.bfloat16))
    clean(run, *given, *shaped(((n, h), jnp.float32), (of_weight, jnp.float32), ((), jnp.int32)), *lower)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("h", "v", "axis"), [(4112, 8192, 0), (4096, 8208, 1), (768, 50256, 0), (2880, 201088, 0)])
def test_sizes_that_need_smaller_swizzles_or_leave_a_ragged_edge(h: int, v: int, axis: int) -> None:
    for kernel in ("forward", "stash"):
        compiled_kernel(kernel, 2048, v, h, axis, Config(), LOSS, ())
