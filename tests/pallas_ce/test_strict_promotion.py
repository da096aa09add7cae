"""Functions that take no head or are built on heads, under JAX's strictest rules for dtypes and ranks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_modules.linen
import flax_modules.nnx
from pallas_ce import (
    LowRank,
    Task,
    build_loss_fn,
    chunked_cross_entropy,
    cross_entropy,
    dpo_loss,
    group_advantages,
    kl_estimate,
    linear_chain_crf,
    linear_cross_entropy,
    linear_cross_entropy_and_gradients,
    linear_log_probs,
    mean_squared_lse,
    multi_task_cross_entropy,
    policy_loss,
    selective_log_softmax,
    sequence_log_probs,
    top_k_distillation_loss,
)
from tests.pallas_ce.functions import KEY, total

B, T, H, V, K = 2, 6, 8, 31, 3
_RNG = np.random.default_rng(0)
HIDDEN, WEIGHT, LOGITS, CANDIDATES, UP, DOWN, LOG_PROBS, OTHERS = (
    _RNG.normal(size=shape).astype(np.float32)
    for shape in ((B, T, H), (V, H), (B, T, V), (B, T, K), (V, 2), (2, H), (B, T), (B, T))
)
LABELS = _RNG.integers(-1, V, (B, T)).astype(np.int32)
TAGS, MASK, SEVERAL = np.maximum(LABELS, 0) % K, LABELS >= 0, np.stack([LABELS, LABELS[:, ::-1]], -1)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-3}

CALLS: dict[str, tuple[Callable[..., Any], Any]] = {
    "cross_entropy": (
        lambda z: cross_entropy(
            z, LABELS, **SMOOTHED, class_weights=np.ones(V, np.int32), token_weights=np.ones((B, T), np.int8),
            logit_softcap=5.0, return_metrics=True,
        ),
        (LOGITS,),
    ),
    "cross_entropy by token": (lambda z: cross_entropy(z, LABELS, reduction="none"), (LOGITS,)),
    "chunked_cross_entropy": (lambda z: chunked_cross_entropy(z, LABELS, 4, normalizer=7), (LOGITS,)),
    "mean_squared_lse": (lambda z: mean_squared_lse(z, LABELS), (LOGITS,)),
    "selective_log_softmax": (lambda z: selective_log_softmax(z, SEVERAL), (LOGITS,)),
    "linear_log_probs of several": (
        lambda h, w: linear_log_probs(h, w, SEVERAL, temperature=0.7, return_entropy=True, return_hit=True),
        (HIDDEN, WEIGHT),
    ),
    "linear_cross_entropy, LowRank": (
        lambda h, w, up, down: linear_cross_entropy(h, LowRank(w, up, down, 2.0), LABELS, shift=1),
        (HIDDEN, WEIGHT, UP, DOWN),
    ),
    "linear_chain_crf": (lambda e, t: linear_chain_crf(e, TAGS, t, mask=MASK), (CANDIDATES, np.ones((K, K)))),
    "linear_chain_crf, matrices by position": (
        lambda e, t: linear_chain_crf(e, TAGS, t, normalizer=3),
        (CANDIDATES, np.ones((B, T - 1, K, K))),
    ),
    "multi_task_cross_entropy": (
        lambda h, w, u: multi_task_cross_entropy(h, {"a": Task(w, LABELS), "b": Task(u, LABELS, 2, SMOOTHED)}),
        (HIDDEN, WEIGHT, -WEIGHT),
    ),
    "a configured loss": (
        lambda z: build_loss_fn({"loss_fn": "cross_entropy", "z_loss_weight": 0.1})(z, LABELS), (LOGITS,)
    ),
    "sequence_log_probs": (lambda x: sequence_log_probs(x, MASK, average=True), (LOG_PROBS,)),
    **{
        f"dpo_loss, {kind}": (
            lambda x, y, kind=kind: dpo_loss(
                x, y, y, x, MASK, kind=kind, label_smoothing=0.1 if kind == "sigmoid" else 0.0, return_metrics=True
            ),
            (LOG_PROBS, OTHERS),
        )
        for kind in ("sigmoid", "hinge", "ipo")
    },
    **{
        f"policy_loss, {level}, {aggregation}": (
            lambda x, y, level=level, aggregation=aggregation: policy_loss(
                x, y, MASK, old_log_probs=y, ref_log_probs=y, entropy=x, level=level, aggregation=aggregation,
                kl_coefficient=0.1, entropy_coefficient=np.float32(0.1), ratio_limit=3, return_metrics=True,
                length=8 if aggregation == "fixed_length" else None,
            ),
            (LOG_PROBS, OTHERS),
        )
        for level, aggregation in (
            ("token", "token_mean"), ("sequence", "sequence_mean"), ("sequence_token", "fixed_length")
        )
    },
    **{
        f"kl_estimate, {name}": (functools.partial(kl_estimate, estimator=name), (LOG_PROBS, OTHERS))
        for name in ("k1", "k2", "k3")
    },
    **{
        f"group_advantages, {scale}": (functools.partial(group_advantages, group_size=2, scale=scale), (LOG_PROBS[0],))
        for scale in ("group", "batch", "none")
    },
    **{
        f"top_k_distillation_loss, {name}, {tail=}": (
            lambda x, name=name, tail=tail: top_k_distillation_loss(x, x - 1, MASK, divergence=name, tail=tail),
            (-np.abs(CANDIDATES) - 2,),
        )
        for name, tail in (("forward_kl", True), ("reverse_kl", False), ("jsd", True))
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_function_and_its_gradients_promote_nothing(name: str, dtype: Any) -> None:
    function, arrays = CALLS[name]
    with jax.enable_x64(dtype == jnp.bfloat16):
        given = [jnp.asarray(x, dtype) for x in arrays]
        plain = jax.jit(jax.grad(lambda arrays: total(function(*arrays))))
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            plain.lower(given)


def test_gradients_added_to_a_sum_promote_nothing() -> None:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        narrow = (jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN, WEIGHT))
        linear_cross_entropy_and_gradients(
            *narrow, LABELS, jnp.zeros((V, H)), bias=jnp.ones(V), bias_sum=jnp.zeros(V), loss_scale=0.5
        )


def test_hidden_states_beside_a_wider_weight_promote_nothing_of_the_callers() -> None:
    """The compute dtype is their common one by the contract, not by JAX's promotion of a product."""
    with jax.numpy_dtype_promotion("strict"):
        loss = linear_cross_entropy(jnp.asarray(HIDDEN, jnp.bfloat16), WEIGHT, LABELS)
    assert loss == linear_cross_entropy(jnp.asarray(HIDDEN, jnp.bfloat16), WEIGHT, LABELS)


@pytest.mark.parametrize("framework", [flax_modules.nnx, flax_modules.linen])
def test_heads_of_flax_promote_nothing(framework: Any) -> None:
    rngs: Any = {"rngs": nnx.Rngs(0)} if framework is flax_modules.nnx else {}
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)

    def head() -> Any:
        return framework.LossHead(H, V, use_bias=True, lora_rank=2, dtype=jnp.bfloat16, **SMOOTHED, **rngs)

    for module in (head(), framework.MultiTokenLossHead(head(), 2, **rngs)):

        def loss(hidden: jax.Array, module: Any = module) -> Any:
            if framework is flax_modules.nnx:
                return module(hidden, LABELS)
            return module.apply(module.init(KEY, hidden, LABELS), hidden, LABELS)

        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            jax.jit(jax.grad(loss)).lower(hidden)
