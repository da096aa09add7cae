"""NaN and infinity show where plain JAX shows them, and nowhere else; in every function, at drawn places.

`python -m pytest -m gpu tests/pallas_ce/test_not_finite.py` runs the kernels at the sizes they are made for.
"""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce as P
from tests.pallas_ce.cases import CASES, DISTILLATIONS, Sizes, Way
from tests.pallas_ce.checks import with_gradients
from tests.pallas_ce.spoilt import SIZES, check
from tests.pallas_ce.streamed import two_heads

SEEDS = st.integers(0, 2**16)
# Of heads, that is of functions whose arrays depend on the sizes, with tiles of a few columns and with wide ones.
SPOILT = [
    (name, size, *way)
    for name, case in CASES.items()
    for size in SIZES
    for way in case.ways
    if size == "wide" or any("hidden" in x or "logits" in x for x in case.inputs)
]


@pytest.mark.nightly(keep=20)
@pytest.mark.parametrize(("name", "size", "implementation", "backward"), SPOILT)
@hypothesis.settings(max_examples=max(3, hypothesis.settings.default.max_examples // 2))  # each of all inputs
@hypothesis.given(seed=SEEDS)
def test_what_is_not_finite_is_where_plain_jax_has_it(
    name: str, size: str, implementation: str, backward: str, seed: int
) -> None:
    """Results and gradients, in rows that count and that do not, columns that exist and padding, targets and others."""
    check(CASES[name], SIZES[size], (implementation, backward), seed)


# Of 16 bits: stored logits, and float16, whose dlogits need a power of two that all rows share.
NARROW = [
    *(
        (name, CASES[name].ways[0], "bfloat16")
        for name in ("cross_entropy", "chunked_cross_entropy", "mean_squared_lse")
    ),
    *(("linear_cross_entropy", ("xla", backward), "float16") for backward in ("in_forward", "recompute")),
]


@pytest.mark.parametrize(("name", "way", "dtype"), NARROW)
@hypothesis.given(seed=SEEDS)
def test_operands_of_16_bits(name: str, way: Way, dtype: str, seed: int) -> None:
    check(CASES[name], Sizes(classes=301, padded=304, dtype=dtype, scratch_bytes=None), way, seed)


def _one_nan() -> tuple[Any, dict[str, Any]]:
    """Hidden states, and the rest of a head with one NaN in its weight."""
    rng = np.random.default_rng(0)
    hidden, weight, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8), (1000, 8), (1000,)))
    weight[7] = np.nan
    return hidden, {"weight": weight, "bias": bias}


@pytest.mark.parametrize("scratch_bytes", [None, 700])
def test_samples_take_the_first_nan_and_else_the_first_infinity(scratch_bytes: Any) -> None:
    """At a temperature of 0 and at others; `CASES` have limits."""
    hidden, head = _one_nan()
    limits = {"temperature": np.linspace(0, 2, 8, dtype=np.float32), "scratch_bytes": scratch_bytes}
    head["bias"][[3, 100]] = np.inf
    for first in (7, 3):
        found = P.linear_sample(jax.random.key(0), hidden, **head, **limits)
        assert np.all(found.ids == first)
        assert np.all(np.isnan(found.log_probs))
        head["weight"][7] = 0


@pytest.mark.parametrize("statistics", [("max_logit",), ("lse", "max_logit")])
def test_a_maximum_without_other_statistics_has_its_rows_nan(statistics: Any) -> None:
    """XLA's own on a CPU drops it in a row so wide."""
    hidden, head = _one_nan()
    assert np.isnan(P.linear_row_statistics(hidden, **head, statistics=statistics).max_logit).all()


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("divergence", DISTILLATIONS)
@pytest.mark.parametrize("side", ["hidden", "teacher_hidden"])
def test_a_row_with_a_nan_is_nan_in_every_gradient_and_the_others_are_what_they_were(
    divergence: Any, implementation: Any, side: str
) -> None:
    """Also where the student's probability is 0, and 0·NaN might be selected away."""
    arrays = two_heads(0, 6, 4, 23, teacher_h=4)
    arrays["weight"][5] = 0
    arrays["bias"] = np.where((np.arange(23) == 5) & (divergence == "reverse_kl"), -np.inf, 0).astype(np.float32)

    def loss(arrays: Any) -> Any:
        return P.linear_distillation(**arrays, divergence=divergence, implementation=implementation, reduction="none")

    want, right = with_gradients(loss, arrays)
    arrays[side][3, 2] = np.nan
    found, gradients = with_gradients(loss, arrays)
    others = np.arange(6) != 3
    assert np.isnan(found[3])
    assert all(np.isnan(gradients[name]).all() for name in ("weight", "bias"))
    assert np.isnan(gradients["hidden"][3]).all()
    np.testing.assert_allclose(found[others], want[others], rtol=1e-6)
    np.testing.assert_allclose(gradients["hidden"][others], right["hidden"][others], rtol=1e-5, atol=1e-7)


def test_a_weight_of_no_token_does_not_hide_a_nan() -> None:
    """0·(±inf) is 0, and 0·nan is not."""
    z = jnp.array([[0.0, jnp.nan], [0.0, 1.0], [0.0, -jnp.inf]])
    values = P.cross_entropy(z, jnp.array([0, 1, 1]), token_weights=jnp.array([0.0, 1.0, 0.0]), reduction="none")
    assert np.isnan(values[0])
    assert values[1] > 0
    assert values[2] == 0


KERNELS = ("mosaic_gpu", "triton", "xla")
LARGE = Sizes(rows=512, width=256, classes=4080, padded=4096, dtype="bfloat16", scratch_bytes=None)
STATISTICS = ("linear_cross_entropy", "linear_row_statistics", "linear_log_probs", "linear_loss")
OTHERS = ("linear_distillation", "linear_top_k", "linear_sample", "cross_entropy", "sampled", "multi", "selective",
          "mean_squared", "linear_chain")  # fmt: skip
ON_GPU: list[tuple[str, Way]] = [
    (name, (implementation, backward))
    for name in CASES
    if name.startswith(STATISTICS) and "vocab_scale" not in CASES[name].inputs  # which no kernels serve
    for implementation in KERNELS
    for backward in sorted({backward for _, backward in CASES[name].ways} - {"auto"})
] + [(name, way) for name in CASES if name.startswith(OTHERS) for way in CASES[name].ways if way[0] != "reference"]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "way"), ON_GPU)
@hypothesis.given(seed=SEEDS)
def test_kernels_have_what_is_not_finite_where_plain_jax_has_it(name: str, way: Way, seed: int) -> None:
    """But for infinities of class weights, which sums that are measured from another number may make NaN, and of a
    low-rank term's factors, by whose sign a product with what rounds to 0 is decided."""
    case = CASES[name]
    case = case._replace(finite=(*case.finite, "class_weights", "up", "down"))
    check(case.without("temperature") if way[0] == "mosaic_gpu" else case, LARGE, way, seed)
