"""Timed programs: bare products, stored logits, and our losses, all `(hidden, weight, labels) -> ...` in bfloat16."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce import linear_cross_entropy
from pallas_ce.backends.protocol import Implementation

Program = Callable[..., Any]
Shape = tuple[int, int, int]

# What every point times beside its own programs; `THREE` is the floor of forward and backward.
BARE = "bare"
THREE = (BARE, "for_hidden", "for_weight")

# Our programs, and stored logits'; another's forward is called "forward" and by its name.
FORWARD = "forward"
IN_FORWARD = "in_forward"
RECOMPUTE = "recompute"
CANONICAL = "canonical"


def bare(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The logits' product alone, written as bfloat16."""
    del labels
    return jnp.einsum("nh,vh->nv", hidden, weight)


def for_hidden(hidden: jax.Array, weight: jax.Array, logits: jax.Array) -> jax.Array:
    """The product of hidden's gradient, from any `[N, V]` in place of dlogits."""
    del hidden
    return jnp.einsum("nv,vh->nh", logits, weight)


def for_weight(hidden: jax.Array, weight: jax.Array, logits: jax.Array) -> jax.Array:
    """The product of the weight's gradient."""
    del weight
    return jnp.einsum("nv,nh->vh", logits, hidden)


def canonical(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of stored bfloat16 logits, the fastest of the plain ways."""
    return of_logits(bare(hidden, weight, labels), labels)


def canonical_float32(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The same of stored float32 logits, which the product of bfloat16 operands writes."""
    return of_logits(jnp.einsum("nh,vh->nv", hidden, weight, preferred_element_type=jnp.float32), labels)


def of_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy in plain JAX."""
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0].astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=1) - target)


def ours(implementation: Implementation | None, **options: Any) -> Program:
    """Our loss with these options."""
    return functools.partial(linear_cross_entropy, implementation=implementation, **options)


def both(loss: Program) -> Program:
    """Loss and both gradients."""
    return jax.value_and_grad(loss, argnums=(0, 1))


def ignoring(loss: Program, share: float) -> Program:
    """The loss with that share of the labels, at random, replaced by the one that is ignored."""

    def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        ignored = jax.random.bernoulli(jax.random.key(5), share, labels.shape)
        return loss(hidden, weight, jnp.where(ignored, -100, labels))

    return run


def inputs(n: int, v: int, h: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal hidden states and weight, for logits of standard deviation 1, and random labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (n, h), dtype)
    weight = jax.random.normal(keys[1], (v, h), dtype) * jnp.asarray(h**-0.5, dtype)
    return hidden, weight, jax.random.randint(keys[2], (n,), 0, v)
