"""Inputs at the edge of the contract, through every backend and mode."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_row_statistics
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, library_loss, library_results
from tests.pallas_ce.problems import STORED, STREAMED, WAYS, Problem, make

every_way = pytest.mark.parametrize(("implementation", "backward"), WAYS)
every_implementation = pytest.mark.parametrize("implementation", ["reference", "xla"])


class Case(NamedTuple):
    """A call; where the oracle is to see another, that; bounds of the errors; whether gradients of
    0 are to be exactly 0; and whether the plain products around stored logits are without NaN."""

    given: Problem
    meant: Problem | None = None
    of_loss: float = 1e-5
    of_gradients: float = 1e-5
    zeros: bool = True
    stored: bool = True
    scratch_bytes: int | None = None


def _with(p: Problem, labels: Any = None, arrays: dict[str, Any] | None = None, **options: Any) -> Problem:
    return Problem(p.arrays | (arrays or {}), p.labels if labels is None else np.asarray(labels), options, p.vocab_axis)


def _cases() -> dict[str, Case]:
    # Padding that leaked into the log-sum-exp would show here; a large maximum would hide it.
    ragged = make(0, 19, 5, 1003, scale=1e-3)
    nothing = {"token_weights": np.ones(9, np.float32)}, {"z_loss": 0.1, "label_smoothing": 0.1}
    small, large = make(0, 12, 4, 100), make(0, 16, 8, 40)
    padded, ignored = make(0, 21, 6, 50), make(0, 40, 6, 50)
    real = np.arange(50) < 40
    behind = {"weight": np.where(real[:, None], padded.arrays["weight"], np.float32(np.nan)),
              "bias": np.where(real, np.float32(0.2), np.float32(np.nan))}  # fmt: skip
    counted = (ignored.labels != -100)[:, None]
    unread = {"hidden": np.where(counted, ignored.arrays["hidden"], np.float32(np.nan))}
    return {
        "small logits, a ragged vocabulary": Case(ragged, of_loss=1e-6),
        "small logits, a ragged vocabulary in tiles": Case(ragged, of_loss=1e-6, scratch_bytes=40_000),
        **{
            f"nothing counts in the {reduction}": Case(
                _with(make(0, 9, 4, 11), [-100] * 9, nothing[0], **nothing[1], reduction=reduction)
            )
            for reduction in ("mean", "sum")
        },
        "no tokens": Case(make(0, 0, 4, 11)),
        "labels that are no classes": Case(_with(small, [99, 100, 0, 127, 5, -7] * 2)),
        # Differences of logits near 1e4 carry 1e4·2^-24 of rounding each: absolute, hence 2e-3 in the probabilities.
        **{
            f"logits of {scale}": Case(_with(large, arrays={"logit_scale": np.float32(scale)}), of_gradients=4e-3)
            for scale in (1e4, -1e4)
        },
        "a vocabulary of one": Case(make(0, 5, 3, 1), zeros=False),
        "padding that holds NaN": Case(
            _with(padded, np.where(padded.labels >= 40, 3, padded.labels), behind, vocab_size=40, label_smoothing=0.1),
            stored=False,
        ),
        "ignored rows that hold NaN": Case(_with(ignored, arrays=unread), ignored, stored=False),
    }


CASES = _cases()


@pytest.mark.nightly(keep=24)
@pytest.mark.parametrize(
    ("name", "implementation", "backward"),
    [
        (name, *way)
        for name, case in CASES.items()
        for way in [*WAYS, *STORED]
        if not (case.scratch_bytes and way not in STREAMED) and (case.stored or way not in STORED)
    ],
)
def test_an_edge_of_the_contract(name: str, implementation: str, backward: Any) -> None:
    case = CASES[name]
    loss, gradients = library_results(case.given, implementation, backward, scratch_bytes=case.scratch_bytes)
    p = case.meant or case.given
    want, want_gradients = oracle.cross_entropy(p.arrays, p.labels, p.options)
    assert_close(loss, want, case.of_loss, floor=0)
    assert_close(gradients, want_gradients, case.of_gradients)
    if case.zeros:
        assert not any(np.any(np.asarray(gradients[name])[want == 0]) for name, want in want_gradients.items())


@every_way
def test_ignored_rows_that_hold_nan_leave_the_scales_gradient_alone(implementation: str, backward: Any) -> None:
    p = _with(CASES["ignored rows that hold NaN"].given, arrays={"logit_scale": np.float32(1.3)})
    assert np.isfinite(library_results(p, implementation, backward)[1]["logit_scale"])


@every_way
def test_smoothing_over_a_minus_infinity_column_is_infinite_unless_its_weight_is_zero(
    implementation: str, backward: Any
) -> None:
    p = _with(make(0, 6, 5, 8), [1] * 6, {"bias": np.where(np.arange(8) == 3, np.float32(-np.inf), 0)})
    loss, gradients = library_results(p, implementation, backward, label_smoothing=0.1)
    assert float(loss) == np.inf
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))
    class_weights = np.where(np.arange(8) == 3, 0.0, 1.0)
    results = library_results(p, implementation, backward, label_smoothing=0.1, class_weights=class_weights)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(results))
    # A traced smoothing of 0 keeps the term in the program: 0·inf must still be 0.
    traced = jax.jit(lambda alpha: library_loss(p, p.arrays, implementation=implementation, label_smoothing=alpha))
    assert np.isfinite(traced(0.0))


@every_implementation
def test_a_row_of_minus_infinity_only_has_statistics_minus_infinity_or_zero(implementation: str) -> None:
    bias = jnp.full(6, -jnp.inf)
    expected = {"lse": -np.inf, "max_logit": -np.inf, "entropy": 0, "sum_sq_probs": 0, "varentropy": 0, "argmax": 0}
    head = jnp.ones((3, 2)), jnp.ones((6, 2))
    found = linear_row_statistics(*head, bias=bias, statistics=[*expected], implementation=implementation)
    for name, want in expected.items():
        np.testing.assert_array_equal(getattr(found, name), want, err_msg=name)

    def log_prob(hidden: jax.Array) -> jax.Array:
        options: Any = {"bias": bias, "statistics": ["log_prob"], "implementation": implementation}
        return jnp.sum(linear_row_statistics(hidden, head[1], jnp.arange(3), **options).log_prob)

    assert not np.any(jax.grad(log_prob)(head[0]))


@pytest.mark.parametrize(("implementation", "backward"), STREAMED)
def test_repeated_calls_give_the_same_bits(implementation: str, backward: Any) -> None:
    p = make(0, 300, 16, 700)
    first, second = (library_results(p, implementation, backward, scratch_bytes=400_000) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("implementation", ["reference", "xla", "stored logits"])
def test_metrics_describe_the_call(implementation: str) -> None:
    p = make(0, 30, 6, 9)
    p.options = {"z_loss": 0.01, "label_smoothing": 0.1}
    p.arrays["token_weights"] = np.linspace(0.5, 2, 30).astype(np.float32)
    logits, counts = oracle.Logits(p.arrays), p.labels >= 0
    for reduction in ("mean", "sum", "none"):
        loss, metrics = library_loss(
            p, p.arrays, implementation=implementation, reduction=reduction, return_metrics=True
        )
        if reduction != "none":
            np.testing.assert_allclose(metrics.cross_entropy + metrics.z_loss, loss, rtol=1e-6)
        assert int(metrics.num_tokens) == counts.sum()
        np.testing.assert_allclose(metrics.accuracy, (logits.z.argmax(1) == p.labels)[counts].mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics.mean_lse, logits.lse[counts].mean(), rtol=1e-5)
    gradient = jax.grad(lambda h: library_loss(p, {**p.arrays, "hidden": h}, return_metrics=True)[1].mean_lse)
    assert not np.any(gradient(jnp.asarray(p.arrays["hidden"])))
