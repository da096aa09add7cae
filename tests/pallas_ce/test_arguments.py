"""What arguments may be, and labels that are validated; `test_errors.py` has what they may not be."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce
from pallas_ce import explain, linear_cross_entropy
from tests.pallas_ce.cases import LOSSES

HIDDEN, WEIGHT = jnp.ones((4, 3)), jnp.ones((5, 3))
LABELS = jnp.array([0, 1, 2, 4])
NAN = float("nan")


@pytest.mark.parametrize("ignore_index", [-100, 255, 3])
def test_validate_labels_accepts_good_labels_and_ignored_ones(ignore_index: int) -> None:
    labels = np.array([0, ignore_index, 4, 2])
    loss = linear_cross_entropy(HIDDEN, WEIGHT, labels, validate_labels=True, ignore_index=ignore_index)
    np.testing.assert_allclose(loss, np.log(5), rtol=1e-6)
    linear_cross_entropy(HIDDEN[:0], WEIGHT, labels[:0], validate_labels=True)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_validate_labels_refuses_labels_that_are_being_traced(transform: Any) -> None:
    message = "validate_labels=True reads the labels' values.*or pass validate_labels=False"
    hidden, labels = jnp.ones((2, 4, 3)), jnp.zeros((2, 4), int)
    with pytest.raises(TypeError, match=message):
        transform(lambda h, y: linear_cross_entropy(h, WEIGHT, y, validate_labels=True))(hidden, labels)


def test_validate_labels_reads_labels_that_jit_and_grad_do_not_trace() -> None:
    loss = jax.jit(jax.grad(lambda h: linear_cross_entropy(h, WEIGHT, LABELS, validate_labels=True)))
    assert loss(HIDDEN).shape == HIDDEN.shape


def test_arguments_may_be_numpy_arrays_lists_and_numbers() -> None:
    want = linear_cross_entropy(HIDDEN, WEIGHT, LABELS)
    got = linear_cross_entropy(
        np.ones((4, 3)), [[1.0] * 3] * 5, [0, 1, 2, 4], vocab_size=np.int64(5), logit_scale=np.float64(1)
    )
    np.testing.assert_array_equal(got, want)
    options: Any = {"z_loss": np.float32(0.1), "logit_softcap": jnp.float32(9), "scratch_bytes": np.int64(2**20)}
    assert np.isfinite(linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **options))
    for beyond_32_bits in (np.int64(2**32 + 3), np.array(2**32 + 3)):
        assert linear_cross_entropy(HIDDEN[0], WEIGHT, beyond_32_bits) == 0
    assert explain(np.ones((4, 3)), np.ones((5, 3))).logits_bytes == 4 * 4 * 5


LOGITS = jnp.zeros((4, 5))
BY_NORMALIZER: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(loss, HIDDEN, WEIGHT, LABELS) for name, loss in LOSSES.items()},
    "cross_entropy": functools.partial(pallas_ce.cross_entropy, LOGITS, LABELS),
    "linear_chain_crf": functools.partial(pallas_ce.linear_chain_crf, LOGITS, LABELS, jnp.zeros((5, 5))),
    "policy_loss": functools.partial(pallas_ce.policy_loss, -jnp.ones((2, 3)), jnp.ones(2)),
}


@pytest.mark.parametrize("name", BY_NORMALIZER)
def test_counts_that_32_bits_do_not_hold_are_normalizers(name: str) -> None:
    options = {"num_samples": 3} if name == "sampled_softmax" else {}

    def loss(normalizer: Any) -> Any:
        return BY_NORMALIZER[name](normalizer=normalizer, **options)

    for count in (3_000_000_000, np.int64(3_000_000_000), np.array(3_000_000_000)):
        np.testing.assert_allclose(loss(count), loss(3e9), rtol=1e-6)
    for wrong in (-1, -0.5, NAN):
        with pytest.raises(ValueError, match=f"normalizer={wrong} must be a finite number, at least 0"):
            loss(wrong)
    with pytest.raises(TypeError, match="normalizer has dtype complex64; it must be real"):
        loss(jnp.complex64(1))
