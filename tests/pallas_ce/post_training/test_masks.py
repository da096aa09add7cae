"""What a mask leaves out of a post-training objective contributes nothing, whatever it holds."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import dpo_loss, policy_loss, sequence_log_probs, top_k_distillation_loss

MASK = np.array([[True, True, False], [False, False, False]])
CONTENTS = np.array([[0, 0, np.nan], [np.inf, -np.inf, np.nan]], np.float32)

OF_TOKENS = "log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages"
OF_TOP_K = "log_probs", "teacher_log_probs"
OF_PAIRS = "chosen", "rejected", "ref_chosen", "ref_rejected"
policy = functools.partial(policy_loss, kl_coefficient=0.1, entropy_coefficient=0.1, return_metrics=True)
distilled = functools.partial(top_k_distillation_loss, aggregation="sequence_mean")
# By name, a function of a mask and of arrays of these names.
OBJECTIVES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "tokens": (policy, OF_TOKENS),
    "tokens of fixed length": (functools.partial(policy, aggregation="fixed_length", length=3), OF_TOKENS),
    "sequences": (functools.partial(policy, level="sequence", aggregation="sequence_mean"), OF_TOKENS),
    "sequences by token": (functools.partial(policy, level="sequence_token", aggregation="none"), OF_TOKENS),
    **{
        f"{divergence}, {tail=}": (functools.partial(distilled, divergence=divergence, tail=tail), OF_TOP_K)
        for divergence in ("forward_kl", "reverse_kl", "jsd")
        for tail in (True, False)
    },
    **{
        kind: (functools.partial(dpo_loss, kind=kind, return_metrics=True), OF_PAIRS)
        for kind in ("sigmoid", "hinge", "ipo")
    },
    **{
        f"sequences' log-probabilities, {average=}": (
            functools.partial(sequence_log_probs, average=average), ("log_probs",)
        )
        for average in (True, False)
    },
}  # fmt: skip


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
