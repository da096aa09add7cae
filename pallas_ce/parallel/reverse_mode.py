"""Forward mode, which gradients that are streamed do not have, is refused in words.

JAX's own error, where forward mode reaches a `custom_vjp`, is a bare TypeError. So all tangents go through an operation
before, which has no evaluation: reverse mode only transposes it. `entry.program` translates the error elsewhere.
"""

from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

REFUSAL = (
    "pallas_ce has derivatives in reverse mode only: in place of jax.jvp, jax.jacfwd or jax.linearize use jax.grad, "
    "jax.vjp or jax.jacrev; or a function with a head by implementation='reference', which materialises the logits, "
    "and in place of one of stored logits plain JAX on jax.nn.log_softmax"
)

# What JAX's own error says, a TypeError, where forward mode is batched before it reaches that operation.
FORWARD_MODE = "can't apply forward-mode autodiff"


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(REFUSAL)


# The identity of a tangent.
_tangent_p = jex.Primitive("pallas_ce_reverse_mode_only")
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent_p] = lambda xs, dims: (_tangent_p.bind(*xs), dims[0])
mlir.register_lowering(_tangent_p, _refuse)


@jax.custom_jvp
def reverse_mode_only[Tree](tree: Tree) -> Tree:
    """The same arrays; forward mode through them has an error that says what would work.

    All at once: arrays that are not differentiated are then known to be the same too, and no copy of them is kept.
    """
    return tree


def _through(primals: Any, tangents: Any) -> Any:
    return primals[0], jax.tree.map(lambda t: t if isinstance(t, SymbolicZero) else _tangent_p.bind(t), tangents[0])


reverse_mode_only.defjvp(_through, symbolic_zeros=True)
