"""Forward mode, which gradients that are streamed do not have, is refused in words.

JAX's own error is a bare TypeError, which `entry.program` translates where forward mode differentiates a call. What
`jax.linearize` returns is evaluated outside of any call, so that `reverse_mode_only` puts an operation in front, which
has no evaluation: reverse mode only transposes it, to nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

REFUSAL = (
    "pallas_ce has derivatives in reverse mode only: in place of jax.jvp, jax.jacfwd or jax.linearize use jax.grad, "
    "jax.vjp or jax.jacrev; or a function with a head by implementation='reference', which materialises the logits, "
    "and in place of one of stored logits plain JAX on jax.nn.log_softmax"
)

# What JAX's own error says, a TypeError, where forward mode reaches a `custom_vjp`.
FORWARD_MODE = "can't apply forward-mode autodiff"


def reverse_mode_only[F: Callable[..., Any]](function: F) -> F:
    """A `custom_vjp` with an error for `jax.linearize` that says what to do."""

    @functools.wraps(function)
    def probed(*arguments: Any) -> Any:
        probe = _probe([x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)])
        return _tied(function(*arguments), probe)

    return probed  # type: ignore[return-value]


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(REFUSAL)


# Takes tangents, `[]` float32.
_tangent_p = jex.Primitive("pallas_ce_reverse_mode_only")
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda *_: jax.core.ShapedArray((), jnp.float32))
ad.deflinear2(_tangent_p, lambda _, *xs: [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs])
batching.primitive_batchers[_tangent_p] = lambda xs, _: (_tangent_p.bind(*xs), None)
mlir.register_lowering(_tangent_p, _refuse)


@jax.custom_jvp
def _probe(arrays: Any) -> jax.Array:
    """0, with a tangent that comes before all others and that forward mode cannot evaluate."""
    del arrays
    return jnp.zeros((), jnp.float32)


def _probe_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    del primals
    varied = [x for x in jax.tree.leaves(tangents) if not isinstance(x, SymbolicZero)]
    zero = jnp.zeros((), jnp.float32)
    return zero, _tangent_p.bind(*varied) if varied else zero


@jax.custom_jvp
def _tied(found: Any, probe: jax.Array) -> Any:
    """`found`, whose tangents depend on `probe`'s."""
    del probe
    return found


def _tied_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    of_found, of_probe = tangents

    def both(x: Any) -> Any:
        return x if x.dtype == jax.dtypes.float0 else x + jnp.broadcast_to(of_probe.astype(x.dtype), x.shape)

    return primals[0], jax.tree.map(both, of_found)


_probe.defjvp(_probe_jvp, symbolic_zeros=True)
_tied.defjvp(_tied_jvp)
