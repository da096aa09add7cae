"""What both modes' `custom_vjp` rules share: which inputs are differentiated, and refusing to go further."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from pallas_ce.head import Head, Wanted, scale_gradient

_REFUSAL = (
    "pallas_ce computes first derivatives in reverse mode only: its gradients are streamed, not traced, and cannot be "
    "differentiated again (neither by grad of grad nor by jvp, jacfwd or hessian). "
    "implementation='reference' materialises the logits and supports any order."
)


@jax.custom_jvp
def _barrier(tree: Any) -> Any:
    return tree


@_barrier.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(_REFUSAL)


def first_order_only(tree: Any) -> Any:
    """The arrays of `tree`; differentiating what is computed from them raises NotImplementedError."""
    return _barrier(tree)


def wanted_inputs(hidden: Any, head: Any) -> Wanted:
    """Reads off `custom_vjp`'s primals (with `symbolic_zeros=True`) which inputs are differentiated."""
    return Wanted(
        hidden=hidden.perturbed,
        weight=head.weight.perturbed,
        bias=head.bias is not None and head.bias.perturbed,
        logit_scale=head.logit_scale is not None and head.logit_scale.perturbed,
    )


def values_of(tree: Any) -> Any:
    """The primal values of a tree of `custom_vjp` primals."""
    return jax.tree.map(lambda primal: primal.value, tree, is_leaf=lambda x: hasattr(x, "perturbed"))


def is_zero(cotangent: Any) -> bool:
    """Whether JAX says that nothing depends on this output."""
    return isinstance(cotangent, SymbolicZero)


# The arrays of `custom_vjp`'s primals: hidden, head, labels, mask.
Inputs = tuple[jax.Array, Head, jax.Array | None, jax.Array | None]


class Known(NamedTuple):
    """What a forward has found, given to a later evaluation of the same problem so that it need not be found again.

    For callers whose differentiation keeps arrays from forward to backward and not closures: `evaluate.keep` makes it,
    and the functions there that take it have the same values and gradients with it as without.

    Attributes:
        statistics: `[N]` each, those that the loss reads and those that its derivatives do.
        hidden: in_forward's sum `[N, H]` for hidden's gradient; None where nothing needs it, as for the others.
        weight: its sum for the weight.
        bias: its sum for the bias.
    """

    statistics: dict[str, jax.Array]
    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None


class Gradients(NamedTuple):
    """Gradients in their inputs' dtypes; None where not wanted."""

    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    logit_scale: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """What a forward leaves for the backward: the inputs themselves, and `kept`.

    JAX traces a forward once for each set of differentiated inputs but remembers only one structure of residuals, so
    neither the structure nor static fields may depend on that set; shapes may. `flags` holds nothing, and its
    shape says what is wanted; `kept` holds `absent()` arrays in place of None.

    The inputs are saved as they came: JAX then knows them to be inputs and stores no copy of the weight, not even one
    for each step of a scan.
    """

    hidden: jax.Array
    head: Head
    labels: jax.Array | None
    mask: jax.Array | None
    kept: Any
    flags: jax.Array

    @property
    def wanted(self) -> Wanted:
        """Which inputs are differentiated, read off the flags' shape."""
        return Wanted(*(size > 1 for size in self.flags.shape))


def flags_of(wanted: Wanted) -> jax.Array:
    """An array whose shape holds `wanted`: 2 for yes, 1 for no.

    Never 0: XLA fails on residuals without elements that cross a `shard_map` or `pmap` boundary.
    """
    return jnp.zeros([1 + int(flag) for flag in dataclasses.astuple(wanted)], jnp.int8)


def absent() -> jax.Array:
    """Stands for None among residuals."""
    return jnp.zeros(1, jnp.int8)


def finish(
    hidden: jax.Array,
    head: Head,
    wanted: Wanted,
    hidden_sum: jax.Array | None,
    bias_sum: jax.Array | None,
    factor: jax.Array,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients of hidden, bias and scale from `dlogits·weight` and `Σ dlogits`, each multiplied and rounded once.

    Args:
        hidden: `[N, H]`.
        head: the head.
        wanted: which of them to return.
        hidden_sum: `[N, H]` in the accumulator dtype, before the scale.
        bias_sum: `[V']`, likewise.
        factor: `[]`: what undoes the normalisation, times the upstream scalar.
    """
    scale = factor if head.logit_scale is None else factor * head.logit_scale
    d_hidden = d_bias = d_scale = None
    if wanted.hidden:
        assert hidden_sum is not None
        d_hidden = (scale * hidden_sum).astype(hidden.dtype)
    if wanted.bias:
        assert bias_sum is not None
        assert head.bias is not None
        d_bias = (scale * bias_sum).astype(head.bias.dtype)
    if wanted.logit_scale:
        assert hidden_sum is not None
        d_scale = factor * scale_gradient(hidden, hidden_sum, head.bias, bias_sum)
    return d_hidden, d_bias, d_scale


def input_cotangents(saved: Saved, gradients: Gradients) -> tuple[Any, ...]:
    """The cotangents of `(hidden, head, labels, mask)`, zero where `gradients` has None."""
    zeros = zero_cotangent((saved.hidden, saved.head, saved.labels, saved.mask))
    d_head = dataclasses.replace(
        zeros[1], **{name: g for name, g in gradients._asdict().items() if name != "hidden" and g is not None}
    )
    return zeros[0] if gradients.hidden is None else gradients.hidden, d_head, zeros[2], zeros[3]


def zero_cotangent(tree: Any) -> Any:
    """Zeros, in float0 for integers as JAX wants them."""

    def zero(x: jax.Array) -> Any:
        return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(zero, tree)
