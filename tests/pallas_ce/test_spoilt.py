"""NaN and infinities in each input of each public function, at drawn places, beside plain JAX; and on GPUs.

`python -m pytest -m gpu tests/pallas_ce/test_spoilt.py` runs the kernels at the sizes they are made for.
"""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce as P
from tests.pallas_ce import oracle
from tests.pallas_ce.spoilt import SIZES, Sizes, Way, check, without
from tests.pallas_ce.spoilt_functions import FUNCTIONS

SEEDS = st.integers(0, 2**16)
# Of heads, that is of functions whose arrays depend on the sizes, with tiles of a few columns and with wide ones.
CASES = [
    (name, size, *way)
    for name, function in FUNCTIONS.items()
    for size in SIZES
    for way in function.ways
    if size == "wide" or any("hidden" in x or "logits" in x for x in function.inputs)
]


@pytest.mark.nightly(keep=24)
@pytest.mark.parametrize(("name", "size", "implementation", "backward"), CASES)
@hypothesis.given(seed=SEEDS)
def test_what_is_not_finite_is_where_plain_jax_has_it(
    name: str, size: str, implementation: str, backward: str, seed: int
) -> None:
    """Results and gradients, in rows that count and that do not, columns that exist and padding, targets and others."""
    check(FUNCTIONS[name], SIZES[size], (implementation, backward), seed)


def _one_nan(where: str) -> tuple[Any, dict[str, Any], np.ndarray]:
    """Hidden states, the rest of a head with one NaN, and labels."""
    rng = np.random.default_rng(0)
    hidden, weight, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8), (1000, 8), (1000,)))
    (weight if where == "weight" else bias)[7] = np.nan
    return hidden, {"weight": weight, "bias": bias}, np.arange(8) + 8


@pytest.mark.parametrize("where", ["weight", "bias"])
def test_one_nan_in_the_head_makes_every_row_nan(where: str) -> None:
    """Of a vocabulary so wide that XLA's maximum on a CPU loses the NaN; of stored logits too."""
    hidden, head, labels = _one_nan(where)
    logits = hidden @ head["weight"].T + head["bias"]
    z, found = logits, P.linear_row_statistics(hidden, **head, labels=labels, statistics=P.RowStatistics._fields)
    for name, x in found._asdict().items():
        assert np.all(x == 7 if name == "argmax" else np.isnan(x)) or name == "target_logit", name
    results = {
        "loss": P.linear_cross_entropy(hidden, **head, labels=labels),
        "log-probabilities": P.linear_log_probs(hidden, **head, labels=labels),
        "the 3 largest": P.linear_top_k(hidden, k=3, **head).log_probs,
        "stored logits": P.cross_entropy(z, labels),
        "entries": P.selective_log_softmax(z, labels),
        "squares": P.mean_squared_lse(z, labels),
    }
    assert [name for name, x in results.items() if not np.all(np.isnan(x))] == []
    assert np.all(P.linear_top_k(hidden, k=3, **head).ids[:, 0] == 7)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}, {"top_k": 5, "top_p": 0.9}])
def test_samples_take_the_first_nan_and_else_the_first_infinity(limits: dict[str, Any]) -> None:
    hidden, head, _ = _one_nan("weight")
    head["bias"][[3, 100]] = np.inf
    found = P.linear_sample(jax.random.key(0), hidden, **head, **limits)
    assert np.all(found.ids == 7)
    assert np.all(np.isnan(found.log_probs))
    finite = np.where(np.isnan(head["weight"]), 0, head["weight"])
    assert np.all(P.linear_sample(jax.random.key(0), hidden, finite, bias=head["bias"], **limits).ids == 3)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("spoils", ["hidden", "teacher_hidden"])
def test_a_nan_row_of_student_or_teacher_has_a_nan_divergence_and_gradients(divergence: Any, spoils: str) -> None:
    rng = np.random.default_rng(0)
    hidden, teacher = (rng.normal(size=(8, 5)).astype(np.float32) for _ in range(2))
    weight, other = (rng.normal(size=(1000, 5)).astype(np.float32) for _ in range(2))
    (hidden if spoils == "hidden" else teacher)[3, 2] = np.nan

    def total(hidden: Any, weight: Any) -> Any:
        found = P.linear_distillation(hidden, weight, teacher, other, divergence=divergence, reduction="none")
        return jnp.sum(found), found

    (d_hidden, d_weight), found = jax.grad(total, (0, 1), has_aux=True)(hidden, weight)
    np.testing.assert_array_equal(np.isnan(found), np.arange(8) == 3)
    np.testing.assert_array_equal(np.isnan(d_hidden).all(axis=1), np.arange(8) == 3)
    assert np.all(np.isnan(d_weight))


def test_a_nan_among_the_largest_makes_their_divergence_nan() -> None:
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        for tail in (True, False):
            for given in (([[-1.0, np.nan]], [[-1.0, -1.0]]), ([[-1.0, -1.0]], [[-1.0, np.nan]])):
                arrays = (jnp.asarray(x, jnp.float32) for x in given)
                found = P.top_k_distillation_loss(*arrays, divergence=divergence, tail=tail)  # type: ignore[arg-type]
                assert np.isnan(found), (divergence, tail, given)


def test_a_nan_emission_or_transition_makes_the_chain_nan() -> None:
    tags = np.array([0, 1, 2])
    emissions, transitions = np.zeros((3, 3), np.float32), np.zeros((3, 3), np.float32)
    spoilt_emissions, spoilt_column = emissions.copy(), transitions.copy()
    spoilt_emissions[1, 0], spoilt_column[:, 1] = np.nan, np.nan
    for given in ((spoilt_emissions, transitions), (emissions, spoilt_column)):
        loss, gradients = jax.value_and_grad(lambda e, t: P.linear_chain_crf(e, tags, t), (0, 1))(*given)
        assert np.isnan(loss)
        assert all(np.all(np.isnan(x)) for x in gradients)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6])
def test_the_mixtures_divergence_vanishes_like_its_weight(implementation: Any, beta: float) -> None:
    """A relative error of 1e-4, however near 0 or 1 β is."""
    rng = np.random.default_rng(1)
    shapes = {"hidden": (9, 6), "weight": (300, 6), "teacher_hidden": (9, 7), "teacher_weight": (300, 7)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found = P.linear_distillation(
        **arrays, divergence="jsd", beta=beta, reduction="none", implementation=implementation
    )
    wide = oracle.to64(arrays)
    teacher = {"hidden": wide.pop("teacher_hidden"), "weight": wide.pop("teacher_weight")}
    p, q = oracle.Logits(wide).p, oracle.Logits(teacher).p
    small = min(beta, 1 - beta)
    # In float64 the sum over the mixture is right to 1e-16 / β: enough where its second order is taken for small β.
    want = oracle.divergence("jsd", beta, p, q)
    np.testing.assert_allclose(np.asarray(found) / small, want / small, rtol=1e-4)


KERNELS = ("mosaic_gpu", "triton", "xla")
LARGE = Sizes(rows=512, width=256, classes=4080, padded=4096, dtype="bfloat16", scratch_bytes=None)
ON_GPU: list[tuple[str, Way]] = [
    (name, (implementation, backward))
    for name in ("linear_cross_entropy", "linear_cross_entropy, capped", "linear_cross_entropy, low rank",
                 "linear_row_statistics", "linear_log_probs", "linear_loss")
    for implementation in KERNELS
    for backward in sorted({backward for _, backward in FUNCTIONS[name].ways} - {"auto"})
] + [
    (name, way)
    for name, function in FUNCTIONS.items()
    for way in function.ways
    if name.startswith(("linear_distillation", "linear_top_k", "linear_sample", "cross_entropy", "sampled", "multi",
                        "selective", "mean_squared", "linear_chain")) and way[0] != "reference"
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "way"), ON_GPU)
@hypothesis.given(seed=SEEDS)
def test_kernels_have_what_is_not_finite_where_plain_jax_has_it(name: str, way: Way, seed: int) -> None:
    """But for infinities of class weights, which sums that are measured from another number may make NaN, and of a
    low-rank term's factors, by whose sign a product with what rounds to 0 is decided."""
    function = FUNCTIONS[name]
    function = function._replace(finite=(*function.finite, "class_weights", "up", "down"))
    check(without(function, "temperature") if way[0] == "mosaic_gpu" else function, LARGE, way, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("implementation", KERNELS)
def test_one_nan_in_a_head_of_kernels_makes_every_row_and_every_gradient_nan(
    implementation: str, backward: str, where: str
) -> None:
    rng = np.random.default_rng(0)
    hidden, weight, labels = jnp.ones((512, 256), jnp.bfloat16), rng.normal(size=(4096, 256)), np.arange(512) + 8
    weight, bias = jnp.asarray(0.05 * weight, jnp.bfloat16), jnp.zeros(4096)
    weight, bias = (weight.at[7, 2].set(jnp.nan), bias) if where == "weight" else (weight, bias.at[7].set(jnp.nan))
    options = {"implementation": implementation}
    rows = P.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none", **options)
    assert np.all(np.isnan(rows))

    def loss(hidden: Any, weight: Any, bias: Any) -> Any:
        return P.linear_cross_entropy(hidden, weight, labels, bias=bias, backward=backward, **options)

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(hidden, weight, bias)
    assert all(np.all(np.isnan(np.asarray(x, np.float32))) for x in (value, *gradients))
