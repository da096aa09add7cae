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


@pytest.mark.parametrize(
    ("labels", "options", "u"),
    [
        (make(0, 5, 3, 4).labels, {}, np.array([0.5, 0.0, -1.0, 2.0])),
        (  # several targets, and temperatures
            np.array([[0, 0, 1], [-100, 2, 3], [3, 1, 0], [4, 4, 4], [2, 2, 2]]),
            {"logit_softcap": 2.0, "temperature": np.linspace(0.5, 2, 5)},
            None,
        ),
    ],
)
def test_statistics_slopes(labels: np.ndarray, options: dict[str, Any], u: Any) -> None:
    p, rng = make(0, 5, 3, 4), np.random.default_rng(0)

    def statistics(arrays: Any) -> tuple[Any, Any]:
        return oracle.statistics(oracle.Logits(arrays, **options), labels, u)

    values, slopes = statistics(p.arrays)
    for name in slopes:
        cotangent = rng.normal(size=values[name].shape)
        numeric = oracle.differences(
            lambda a, name=name, g=cotangent: (statistics(a)[0][name] * g).sum(), p.arrays, "hidden"
        )
        dz = oracle.pull_back(slopes, {name: cotangent})
        gradient = oracle.Logits(p.arrays, **options).gradients(dz)["hidden"]
        np.testing.assert_allclose(gradient, numeric, atol=1e-7, err_msg=name)
