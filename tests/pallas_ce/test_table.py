"""The table of row statistics: a new one is an entry; nothing else lists it; every row is served accurately."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import RowStatistics
from pallas_ce.statistics.row import finalise, merge, partial_of_tile
from pallas_ce.statistics.table import DERIVED, FIELDS, PRIMITIVES, TERMS, Coefficients, Partial

NAMES = frozenset({"varentropy"})
FLAT = np.random.default_rng(0).normal(size=4096) * 0.01


def test_every_public_statistic_has_one_entry_and_every_entry_is_read() -> None:
    assert {*RowStatistics._fields, "log_sum", "sum_weights"} == {*PRIMITIVES, *DERIVED}
    assert not PRIMITIVES.keys() & DERIVED.keys()
    assert {field for entry in PRIMITIVES.values() for field in entry.fields} == {*FIELDS} == {*Partial._fields}
    assert {*TERMS} | {"target", "logit_weights", "argmax", "entropy"} == {*Coefficients._fields}
    described = inspect.getdoc(RowStatistics) or ""
    for name in RowStatistics._fields:
        assert f"\n    {name}: " in described


@pytest.mark.parametrize(
    "row",
    [
        FLAT,
        FLAT * 100,
        FLAT * 3000,
        np.round(FLAT * 2**14) / 2**10 + 5000,
        *(np.where(np.arange(4096) == 777, high, FLAT) for high in (2.0, 8.0, 20.0)),
        np.where(np.arange(4096) % 2, FLAT, -np.inf),
    ],
    ids=["flat", "normal", "peaked", "offset", "outlier 2", "outlier 8", "outlier 20", "columns of -inf"],
)
def test_varentropy_is_accurate_however_little_of_the_row_the_maximum_holds(row: np.ndarray) -> None:
    """Measured from the maximum instead of the mean, the outlier of 2 alone would cost three digits."""
    z = row.astype(np.float32)[None]
    wide = z.astype(np.float64) - z.max()
    p = np.exp(wide) / np.exp(wide).sum()
    finite = np.where(p > 0, wide, 0)
    want = (p * (finite - (p * finite).sum()) ** 2).sum()
    columns = jnp.arange(4096, dtype=jnp.int32)

    @jax.jit
    def part(z: jax.Array, columns: jax.Array) -> Partial:
        return partial_of_tile(z, columns, None, None, None, NAMES)

    parts = (part(z[:, i : i + 512], columns[i : i + 512]) for i in range(0, 4096, 512))
    got = finalise(functools.reduce(merge, parts), NAMES)["varentropy"]
    np.testing.assert_allclose(got[0], want, rtol=1e-5)


def test_an_unknown_statistic_is_answered_with_those_there_are():
    with pytest.raises(
        AttributeError, match=r"no 'logprob'; its statistics are lse, target_logit, log_prob, .*varentropy"
    ):
        _ = RowStatistics().logprob
