"""Ids of every integer dtype: the rule of labels, and calls, which give int32's results, of NumPy and of JAX."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_modules.linen
import flax_modules.nnx
from pallas_ce import (
    ClassSample,
    build_loss_fn,
    linear_cross_entropy_and_gradients,
    register_loss,
    sampled_softmax_cross_entropy,
)
from pallas_ce.api import checks
from pallas_ce.statistics.labels import NO_TARGET, canonical, check, counted
from tests.pallas_ce.cases import HEADS, KEY, LABELLED

N, H = 6, 4
HIDDEN = jax.random.normal(jax.random.key(0), (N, H))
DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def _weight(v: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (v, H), jnp.float32)  # in 64-bit mode too


def _sampled(hidden: Any, weight: Any, ids: Any) -> Any:
    """The ids are those that a sampler of the user's own has drawn, too."""
    sample = functools.partial(sampled_softmax_cross_entropy, key=KEY, num_samples=1, reduction="none")
    return sample(hidden, weight, ids, sampler=lambda *_: ClassSample(ids[:1], jnp.full(len(weight), -1.0)))


register_loss("lse of these tests", lambda logits, labels: jnp.mean(logits[:, 0]))


def _of_flax(framework: Any, name: str, hidden: Any, weight: Any, ids: Any) -> Any:
    rngs: Any = {"rngs": nnx.Rngs(0)} if framework is flax_modules.nnx else {}
    module = framework.LossHead(H, len(weight), **rngs)
    module = module if name == "LossHead" else framework.MultiTokenLossHead(module, 2, **rngs)
    given = hidden.reshape(2, 3, H), ids.reshape(2, 3)
    return module(*given) if rngs else module.apply(module.init(KEY, *given), *given)


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{
        name: function
        for name, function in HEADS.items()
        if name not in ("linear_top_k", "linear_row_statistics", "sampled_softmax") and "linear_sample" not in name
    },
    **LABELLED,
    "linear_cross_entropy_and_gradients": lambda hidden, weight, ids: linear_cross_entropy_and_gradients(
        hidden, weight, ids, jnp.zeros_like(weight)
    ),
    "a sampler's ids": _sampled,
    "a loss with z_loss added": lambda hidden, weight, ids: build_loss_fn(
        {"loss_fn": "lse of these tests", "z_loss_weight": 0.1}
    )(hidden @ weight.T, ids),
    **{
        f"{framework.__name__}.{name}": functools.partial(_of_flax, framework, name)
        for framework in (flax_modules.nnx, flax_modules.linen)
        for name in ("LossHead", "MultiTokenLossHead")
    },
}


def _near(vocab_size: int) -> list[int]:
    """Ids at every border, among them those that would be in the vocabulary if they were cut to fewer bits."""
    within = [0, 1, vocab_size // 2, vocab_size - 1]
    return [*within, -1, -100, vocab_size, 2**7, 255, 2**8 + 1, 2**16 + 1, 2**31 + 1, 2**32, 2**32 + 1, 2**63 + 1]


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("name", CALLS)
@hypothesis.settings(max_examples=2)
@hypothesis.given(data=st.data())
def test_ids_of_every_dtype_mean_what_they_are(name: str, data: Any) -> None:
    dtype, v = np.dtype(data.draw(st.sampled_from(DTYPES))), data.draw(st.sampled_from([2, 100, 200, 300]))
    limits = np.iinfo(dtype)
    representable = [i for i in _near(v) if limits.min <= i <= limits.max]
    values = data.draw(st.lists(st.sampled_from(representable), min_size=N, max_size=N))
    # The rule: ids outside the vocabulary do not count, however far.
    plain = jnp.array([i if 0 <= i < v else -100 for i in values], jnp.int32)
    given: Any = np.array(values, dtype)
    x64, where = data.draw(st.booleans()), data.draw(st.sampled_from(["NumPy", "JAX", "JAX, made in 64-bit mode"]))
    if where != "NumPy":
        # Without 64-bit mode JAX cuts NumPy's arrays itself: one of 64 bits is from elsewhere.
        with jax.enable_x64(x64 or "made" in where or dtype.itemsize > 4):
            given = jnp.asarray(given)
    assert given.dtype == dtype
    want = CALLS[name](HIDDEN, _weight(v), plain)
    with jax.enable_x64(x64):
        got = CALLS[name](HIDDEN, _weight(v), given)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


VOCABULARIES = [1, 5, 100, 127, 128, 129, 200, 256, 300, 40_000, 100_000, 2**31 - 1]


def _around(dtype: str, vocab_size: int) -> list[int]:
    """What lies around every border."""
    limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    near = [0, 1, 5, 99, vocab_size - 1, vocab_size, limits.max - 1, limits.max, limits.min, -1, -7, -100]
    near += [2**31 - 1, 2**31, 2**31 + 5, 2**32, 2**32 + 5, 2**63 + 5]
    return [value for value in near if limits.min <= value <= limits.max]


@pytest.mark.parametrize("dtype", ["int4", "uint4", *DTYPES])
def test_labels_of_any_integer_dtype_are_told_apart_from_the_vocabulary_and_validated(dtype: str) -> None:
    with jax.enable_x64(True) if "64" in dtype else contextlib.nullcontext():
        for vocab_size in VOCABULARIES:
            values = _around(dtype, vocab_size)
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
    with jax.enable_x64(True):
        labels = jnp.asarray([3, 7]).astype(dtype)
    check(labels, -100, 200)
    check(labels, 7, 5)
    with pytest.raises(ValueError, match=r"labels\[1\]=7 is neither in \[0, vocab_size=5\) nor ignore_index=-100"):
        check(labels, -100, 5)


def test_lists_of_integers_do_not_wrap_around_either() -> None:
    for given in ([2, 2**32 + 2], [np.int64(2), np.int64(2**32 + 2)]):
        assert canonical(checks.ids("labels", given), 5).tolist() == [2, NO_TARGET]
    assert canonical(checks.ids("labels", [jnp.int32(2), 1]), 5).tolist() == [2, 1]
