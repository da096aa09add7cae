"""What a mask leaves out of a post-training objective contributes nothing, whatever it holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_ce.cases import OBJECTIVES

MASK = np.array([[True, True, False], [False, False, False]])
CONTENTS = np.array([[0, 0, np.nan], [np.inf, -np.inf, np.nan]], np.float32)


def _example(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Results with the gradients of their sum, as a function of arrays; and arrays."""
    function, names = OBJECTIVES[name]
    rng = np.random.default_rng(0)

    @functools.partial(jax.grad, has_aux=True)
    def run(x: Any) -> Any:
        found = function(**x, mask=MASK)
        return jnp.sum(found[0] if isinstance(found, tuple) else found), found

    return run, {key: -rng.exponential(size=MASK.shape).astype(np.float32) for key in names}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_entries_contribute_nothing_whatever_they_hold(name: str) -> None:
    run, clean = _example(name)
    bad = {key: np.where(MASK, x, CONTENTS) for key, x in clean.items()}
    want, got = run(clean), run(bad)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(got))
    assert not any(np.any(np.asarray(gradient)[~MASK]) for gradient in got[0].values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_nan_in_an_entry_that_counts_is_seen_in_the_loss_and_its_gradient(name: str) -> None:
    run, clean = _example(name)
    for key in clean:
        bad = clean | {key: clean[key].copy()}
        bad[key][0, 1] = np.nan
        gradients, found = run(bad)
        assert np.isnan(found[0] if isinstance(found, tuple) else found).any(), key
        # The gradient of a sum or a hinge does not depend on its terms.
        first = gradients[next(iter(clean))]
        if key != "entropy" and not name.startswith(("sequences' log-prob", "hinge")):
            assert np.isnan(first[0, 1]).any(), key
        assert np.all(np.isfinite(first[1]))
