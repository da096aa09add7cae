"""What a mask leaves out of a post-training objective contributes nothing, whatever it holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_ce.cases import OBJECTIVES, OF_TOP_K

MASK = np.array([[True, True, False], [False, False, False]])
CONTENTS = np.array([[0, 0, np.nan], [np.inf, -np.inf, np.nan]], np.float32)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_entries_contribute_nothing_whatever_they_hold(name: str) -> None:
    function, names = OBJECTIVES[name]
    places = (4,) if names is OF_TOP_K else ()
    rng = np.random.default_rng(0)
    clean = {key: -rng.exponential(size=(2, 3, *places)).astype(np.float32) for key in names}
    contents, mask = (x.reshape(2, 3, *[1] * len(places)) for x in (CONTENTS, MASK))
    bad = {key: np.where(mask, x, contents) for key, x in clean.items()}

    def total(x: Any) -> Any:
        found = function(**x, mask=MASK)
        return jnp.sum(found[0] if isinstance(found, tuple) else found), found

    (gradients, want), (others, got) = (jax.grad(total, has_aux=True)(x) for x in (clean, bad))
    jax.tree.map(np.testing.assert_array_equal, (others, got), (gradients, want))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((others, got)))
    assert not any(np.any(np.asarray(gradient)[~MASK]) for gradient in others.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_nan_in_an_entry_that_counts_is_seen_in_the_loss_and_its_gradient(name: str) -> None:
    function, names = OBJECTIVES[name]
    rng = np.random.default_rng(0)
    clean = {key: -rng.exponential(size=(2, 3, *(4,) * (names is OF_TOP_K))).astype(np.float32) for key in names}

    @functools.partial(jax.grad, has_aux=True)
    def run(x: Any) -> Any:
        found = function(**x, mask=MASK)
        found = found[0] if isinstance(found, tuple) else found
        return jnp.sum(found), found

    for key in names:
        bad = clean | {key: clean[key].copy()}
        bad[key][0, 1] = np.nan
        gradients, found = run(bad)
        assert np.isnan(found).any(), key
        # The gradient of a sum or a hinge does not depend on its terms.
        if key != "entropy" and not name.startswith(("sequences' log-prob", "hinge")):
            assert np.isnan(gradients[names[0]][0, 1]).any(), key
        assert np.all(np.isfinite(gradients[names[0]][1]))
