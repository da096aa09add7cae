"""Every function, under JAX's strictest rules for dtypes and ranks, under which a program may run."""

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
from pallas_ce import group_advantages, kl_estimate, linear_cross_entropy, linear_cross_entropy_and_gradients
from tests.pallas_ce.cases import CASES, KEY, LABELLED, OBJECTIVES, Sizes, Way, total

B, T, H, V = 2, 6, 8, 31
_RNG = np.random.default_rng(0)
HIDDEN, WEIGHT, LOG_PROBS = (_RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, H), (V, H), (B, T)))
LABELS = _RNG.integers(-1, V, (B, T)).astype(np.int32)
MASK, HEAD = LABELS >= 0, {"hidden": HIDDEN, "weight": WEIGHT}


def _labelled(function: Callable[..., Any], x: Any) -> Any:
    return function(x["hidden"], x["weight"], LABELS)


def _masked(function: Callable[..., Any], x: Any) -> Any:
    return function(**x, mask=MASK)


# What the examples of all functions leave out.
CALLS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{name: (functools.partial(_labelled, function), HEAD) for name, function in LABELLED.items()},
    **{name: (functools.partial(_masked, function), dict.fromkeys(names, LOG_PROBS))
       for name, (function, names) in OBJECTIVES.items()},
    **{f"kl_estimate, {name}": (lambda x, name=name: kl_estimate(x, -x, estimator=name), LOG_PROBS)
       for name in ("k1", "k2", "k3")},
    **{
        f"group_advantages, {scale}": (functools.partial(group_advantages, group_size=2, scale=scale), LOG_PROBS[0])
        for scale in ("batch", "none")
    },
}  # fmt: skip


def assert_promotes_nothing(function: Callable[[Any], Any], arrays: Any, dtype: Any) -> None:
    """Under JAX's strictest rules, in 64-bit mode where its default dtypes would show."""
    with jax.enable_x64(dtype == jnp.bfloat16):
        given = jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            jax.jit(jax.grad(lambda arrays: total(function(arrays)))).lower(given)


@pytest.mark.nightly(keep=len(CALLS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_function_and_its_gradients_promote_nothing(name: str, dtype: Any) -> None:
    assert_promotes_nothing(*CALLS[name], dtype)


@pytest.mark.nightly(keep=len(CASES) // 2)
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, case in CASES.items() for way in case.ways])
def test_an_example_of_every_function_promotes_nothing(name: str, way: Way) -> None:
    """Of float32 arrays `spoilt.check` shows it."""
    case, s = CASES[name], Sizes()
    assert_promotes_nothing(lambda a: case.ours(s, a, *way), {x: s.array(x) for x in case.inputs}, jnp.bfloat16)


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
        return framework.LossHead(
            H, V, use_bias=True, lora_rank=2, dtype=jnp.bfloat16, label_smoothing=0.1, z_loss=1e-3, **rngs
        )

    for module in (head(), framework.MultiTokenLossHead(head(), 2, **rngs)):

        def loss(hidden: jax.Array, module: Any = module) -> Any:
            if framework is flax_modules.nnx:
                return module(hidden, LABELS)
            return module.apply(module.init(KEY, hidden, LABELS), hidden, LABELS)

        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            jax.jit(jax.grad(loss)).lower(hidden)
