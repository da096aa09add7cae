"""JAX's own tools on one device: `jax.export`, of fixed and of symbolic sizes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_ce import (
    cross_entropy,
    linear_cross_entropy,
    linear_row_statistics,
    linear_top_k,
    selective_log_softmax,
)

HIDDEN, WEIGHT = (jnp.asarray(np.random.default_rng(0).normal(size=n), jnp.float32) for n in ((3, 5, 8), (64, 8)))
LABELS = np.arange(15, dtype=np.int32).reshape(3, 5)
LABELS[1:, 3:] = -100
SIZES = export.symbolic_shape("b, t")
SYMBOLIC = [jax.ShapeDtypeStruct((*SIZES, *x.shape[2:]), x.dtype) for x in (HIDDEN, LABELS)]


def gradients(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return jax.value_and_grad(functools.partial(linear_cross_entropy, **options), (0, 1))(hidden, weight, labels)


@pytest.mark.parametrize(
    "function",
    [
        linear_cross_entropy,
        gradients,
        functools.partial(gradients, implementation="xla"),
        lambda h, w, ids: linear_row_statistics(h, w, ids).log_prob,
        lambda h, w, ids: linear_top_k(h, w, 5).values,
    ],
    ids=["loss", "gradients", "xla", "statistics", "top-k"],
)  # fmt: skip
def test_symbolic_rows_are_refused_with_what_works(function: Callable[..., Any]) -> None:
    hidden, labels = SYMBOLIC
    words = r"hidden has shape \(b, t, 8\), .* export a fixed batch, .*-100.*implementation='reference'"
    with pytest.raises(ValueError, match=words):
        export.export(jax.jit(function))(hidden, WEIGHT, labels)


@pytest.mark.parametrize("function", [cross_entropy, selective_log_softmax])
def test_symbolic_rows_of_stored_logits_are_too(function: Callable[..., Any]) -> None:
    labels = SYMBOLIC[1]
    logits = jax.ShapeDtypeStruct((*labels.shape, 64), jnp.float32)
    with pytest.raises(ValueError, match=r"logits has shape \(b, t, 64\), .* or take jax\.nn\.log_softmax"):
        export.export(jax.jit(function))(logits, labels)


def test_the_reference_takes_symbolic_rows() -> None:
    hidden, labels = SYMBOLIC
    of_any = jax.jit(functools.partial(gradients, implementation="reference"))
    found = export.export(of_any)(hidden, WEIGHT, labels).call(HIDDEN, WEIGHT, LABELS)
    want = gradients(HIDDEN, WEIGHT, LABELS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, want)


def test_a_fixed_batch_is_exported_and_filled_up_with_ignored_rows() -> None:
    fixed = export.export(jax.jit(gradients), platforms=("cpu", "cuda"))(
        jnp.zeros((8, 5, 8)), WEIGHT, jnp.zeros((8, 5), jnp.int32)
    )
    more = ((0, 8 - HIDDEN.shape[0]), (0, 0))
    filled = jnp.pad(HIDDEN, (*more, (0, 0))), WEIGHT, jnp.pad(LABELS, more, constant_values=-100)
    loss, (of_hidden, of_weight) = fixed.call(*filled)
    found = loss, (of_hidden[: HIDDEN.shape[0]], of_weight)
    want = gradients(HIDDEN, WEIGHT, LABELS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, want)
