"""The label rule for every integer dtype."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.api.checks import ids
from pallas_ce.statistics.labels import NO_TARGET, as_array, canonical, check, counted

DTYPES = ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
VOCABULARIES = [1, 5, 100, 127, 128, 129, 200, 256, 300, 40_000, 100_000, 2**31 - 1]


def _values(dtype: str, vocab_size: int) -> list[int]:
    """What lies around every border."""
    limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    near = [0, 1, 5, 99, vocab_size - 1, vocab_size, limits.max - 1, limits.max, limits.min, -1, -7, -100]
    near += [2**31 - 1, 2**31, 2**31 + 5, 2**32, 2**32 + 5, 2**63 + 5]
    return [value for value in near if limits.min <= value <= limits.max]


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_of_any_integer_dtype_are_told_apart_from_the_vocabulary(dtype: str) -> None:
    with jax.enable_x64(True) if "64" in dtype else contextlib.nullcontext():
        for vocab_size in VOCABULARIES:
            values = _values(dtype, vocab_size)
            labels = jnp.asarray(np.array(values, np.int8 if dtype in ("int4", "uint4") else dtype), dtype)
            found = canonical(labels, vocab_size)
            inside = [0 <= value < vocab_size for value in values]
            assert labels.dtype == dtype
            assert found.dtype == np.int32
            assert found.tolist() == [v if i else NO_TARGET for v, i in zip(values, inside, strict=True)]
            assert counted(found, -100).tolist() == inside
            for ignored in (0, 5, 99, -1, 2**40, None):
                want = [i and v != ignored for v, i in zip(values, inside, strict=True)]
                assert counted(found, ignored).tolist() == want


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_host_labels_beyond_32_bits_do_not_wrap_around_into_the_vocabulary(dtype: str) -> None:
    labels = np.array([3, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1], dtype)
    assert as_array(labels).tolist() == [3, 2**31 - 1, NO_TARGET, NO_TARGET, NO_TARGET]
    assert as_array(np.array([-100, -(2**31), -(2**32) + 3])).tolist() == [-100, -(2**31), NO_TARGET]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_arrays_of_64_bits_are_not_cut_where_the_64_bit_mode_has_ended(dtype: str) -> None:
    with jax.enable_x64(True):
        labels = jnp.asarray(np.array([3, 2**32 + 3, 2**32 - 1, 2**63 - 1], dtype))
    assert canonical(labels, 5).tolist() == [3, NO_TARGET, NO_TARGET, NO_TARGET]
    assert jax.jit(lambda x: canonical(x, 5))(labels).tolist() == [3, NO_TARGET, NO_TARGET, NO_TARGET]


def test_lists_of_integers_do_not_wrap_around_either() -> None:
    for given in ([2, 2**32 + 2], [np.int64(2), np.int64(2**32 + 2)]):
        assert canonical(ids("labels", given), 5).tolist() == [2, NO_TARGET]
    assert canonical(ids("labels", [jnp.int32(2), 1]), 5).tolist() == [2, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_integer_dtype_are_validated(dtype: str) -> None:
    with jax.enable_x64(True):
        labels = jnp.asarray([3, 7]).astype(dtype)
    check(labels, -100, 200)
    check(labels, 7, 5)
    with pytest.raises(ValueError, match=r"labels\[1\]=7 is neither in \[0, vocab_size=5\) nor ignore_index=-100"):
        check(labels, -100, 5)
