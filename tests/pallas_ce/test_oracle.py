"""The oracle's gradients against central differences of its values: a wrong oracle would bless a wrong library."""

from typing import Any

import numpy as np
import pytest

from tests.pallas_ce import oracle
from tests.pallas_ce.problems import make


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_gradients(reduction: str) -> None:
    p = make(0, 6, 3, 5)
    rng = np.random.default_rng(1)
    p.arrays |= {"bias": rng.normal(size=5), "logit_scale": 1.3, "token_weights": rng.uniform(0.5, 2, size=6)}
    p.options = {"class_weights": rng.uniform(0.5, 2, size=4), "label_smoothing": 0.2, "z_loss": 0.1,
                 "logit_softcap": 3.0, "vocab_size": 4, "reduction": reduction}  # fmt: skip
    cotangent = rng.normal(size=6) if reduction == "none" else 1.7
    _, gradients = oracle.cross_entropy(p.arrays, p.labels, p.options, cotangent)
    for name, gradient in gradients.items():
        numeric = oracle.differences(
            lambda a: np.sum(cotangent * oracle.cross_entropy(a, p.labels, p.options)[0]), p.arrays, name
        )
        np.testing.assert_allclose(gradient, numeric, atol=1e-8, err_msg=name)


def test_statistics_slopes_with_several_targets_and_temperatures() -> None:
    p = make(0, 5, 3, 4)
    labels = np.array([[0, 0, 1], [-100, 2, 3], [3, 1, 0], [4, 4, 4], [2, 2, 2]])
    options = {"logit_softcap": 2.0, "temperature": np.linspace(0.5, 2, 5)}
    rng = np.random.default_rng(0)
    logits = oracle.Logits(p.arrays, **options)
    values, slopes = oracle.statistics(logits, labels)
    cotangents = {name: rng.normal(size=values[name].shape) for name in ("log_prob", "entropy")}

    def total(arrays: Any) -> Any:
        found = oracle.statistics(oracle.Logits(arrays, **options), labels)[0]
        return sum((found[name] * g).sum() for name, g in cotangents.items())

    numeric = oracle.differences(total, p.arrays, "hidden")
    gradient = logits.gradients(oracle.pull_back(slopes, cotangents))["hidden"]
    np.testing.assert_allclose(gradient, numeric, atol=1e-7)


def test_statistics_slopes() -> None:
    p = make(0, 5, 3, 4)
    u = np.array([0.5, 0.0, -1.0, 2.0])
    logits = oracle.Logits(p.arrays)
    _, slopes = oracle.statistics(logits, p.labels, u)
    for name, slope in slopes.items():
        numeric = oracle.differences(
            lambda a, name=name: oracle.statistics(oracle.Logits(a), p.labels, u)[0][name].sum(), p.arrays, "hidden"
        )
        np.testing.assert_allclose(logits.gradients(slope)["hidden"], numeric, atol=1e-7, err_msg=name)
