"""Each kernel alone as machine code for an H200 at real sizes, with every tile and schedule that a table may hold."""

from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import entries
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, partials, stash_kernel
from pallas_ce.backends.mosaic_gpu.schedule.config import PARTIALS_BYTES, Config, Kernel, default_tiles
from pallas_ce.backends.mosaic_gpu.tuning import measure
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.gradient import Coefficients, from_cotangents, saved_statistics
from pallas_ce.statistics.table import PRIMITIVES
from tests.mosaic_gpu.compiled import MIB, Compiled, arguments, clean

LOSS = frozenset({"lse", "target_logit"})
EVERY = frozenset(PRIMITIVES)
VARENTROPY = frozenset({"lse", "varentropy"})
OPTIONS = ("bias", "scale", "weights", "softcap")


def coefficients_of(names: frozenset[str], by_row: Any) -> Coefficients:
    """Those that the kernel of dlogits gets where the statistics in `names` are differentiated."""
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

    return clean(run, *arguments(n, v, h, axis))


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize(
    ("kernel", "n", "v", "axis", "names", "options"),
    [
        ("forward", 1024, 131072, 0, LOSS, ()),
        ("forward", 8192, 131072, 0, LOSS, ()),  # a launch so long that thread blocks keep pace, as those below
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
    config = default_tiles(kernel, vectors, len(options))
    memory = compiled_kernel(kernel, n, v, 4096, axis, config, names, options).memory
    # Partial statistics and their padded inputs, or sums by column of each block of rows.
    assert memory.temp_size_in_bytes <= PARTIALS_BYTES + 4 * MIB


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "config"),
    [(kernel, config) for kernel in get_args(Kernel) for config in measure.first_candidates(kernel)],
)
def test_every_tile_and_schedule_that_a_table_may_hold(kernel: Kernel, config: Config) -> None:
    compiled_kernel(kernel, 2048, 131072, 4096, 0, config, LOSS, ())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("h", "v", "axis"), [(4112, 8192, 0), (4096, 8208, 1), (768, 50257, 0), (2880, 201088, 0)])
def test_sizes_that_need_smaller_swizzles_or_leave_a_tail(h: int, v: int, axis: int) -> None:
    for kernel in ("forward", "stash"):
        compiled_kernel(kernel, 2048, v, h, axis, Config(), LOSS, ())
