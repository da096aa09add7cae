"""What both modes' `custom_vjp` rules share: which inputs are differentiated, and refusing to go further."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from pallas_ce.backends.protocol import HeadSums
from pallas_ce.head import Batch, Head, NeedsGrad, scale_gradient
from pallas_ce.parallel.shards import Axes, Shards, Sums, psum

_REFUSAL = (
    "pallas_ce computes first derivatives in reverse mode only: its gradients are streamed, not traced, and cannot be "
    "differentiated again (neither by grad of grad nor by jvp, jacfwd or hessian). "
)
_USE_REFERENCE = "implementation='reference' materialises the logits and supports any order."


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _barrier(instead: str, array: Any) -> Any:
    return array


@_barrier.defjvp
def _refuse(instead: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(_REFUSAL + instead)


def first_order_only(tree: Any, instead: str = _USE_REFERENCE) -> Any:
    """The arrays of `tree`; differentiating what is computed from them raises NotImplementedError naming `instead`."""
    # Each array has its own, so that those nothing is computed from are neither kept nor asked for.
    return jax.tree.map(functools.partial(_barrier, instead), tree)


def inputs_needing_grad(hidden: Any, head: Any) -> NeedsGrad:
    """Reads off `custom_vjp`'s primals (with `symbolic_zeros=True`) which inputs are differentiated."""
    return NeedsGrad(
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


# The arrays of `custom_vjp`'s primals: batch, head, mask.
Inputs = tuple[Batch, Head, jax.Array | None]


class Known(NamedTuple):
    """What a forward has found, given to a later evaluation of the same problem so that it need not be found again.

    For callers whose differentiation keeps arrays from forward to backward and not closures: `evaluate.keep` makes it,
    and the functions there that take it have the same values and gradients with it as without.

    Attributes:
        statistics: `[N]` each, those that the loss reads and those that its derivatives do.
        hidden: in_forward's sum `[N, H]` for hidden's gradient; None where nothing needs it, as for the others.
        weight: its sum for the weight.
        bias: its sum for the bias.
        logit_scale: its sum for the scale.
    """

    statistics: dict[str, jax.Array]
    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    logit_scale: jax.Array | None = None


class Gradients(NamedTuple):
    """Gradients in their inputs' dtypes; None where not needed."""

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
    shape says what is needs_grad; `kept` holds `absent()` arrays in place of None.

    The inputs are saved as they came: JAX then knows them to be inputs and stores no copy of the weight, not even one
    for each step of a scan.
    """

    batch: Batch
    head: Head
    mask: jax.Array | None
    kept: Any
    flags: jax.Array

    @property
    def needs_grad(self) -> NeedsGrad:
        """Which inputs are differentiated, read off the flags' shape."""
        return NeedsGrad(*(size > 1 for size in self.flags.shape))


def flags_of(needs_grad: NeedsGrad) -> jax.Array:
    """An array whose shape holds `needs_grad`: 2 for yes, 1 for no.

    Never 0: XLA fails on residuals without elements that cross a `shard_map` or `pmap` boundary.
    """
    return jnp.zeros([1 + int(flag) for flag in dataclasses.astuple(needs_grad)], jnp.int8)


def absent() -> jax.Array:
    """Stands for None among residuals."""
    return jnp.zeros(1, jnp.int8)


def sum_over_devices(
    shards: Shards, hidden: jax.Array, head: Head, needs_grad: NeedsGrad, hidden_sum: jax.Array | None, sums: HeadSums
) -> HeadSums:
    """The head's small sums from this device's share of them, beside the weight's as it came.

    When those for hidden and weight are rounded and summed is a mode's affair. The scale's gradient is made here, from
    `hidden_sum` and the bias's: see `scale_gradient`.
    """
    scale = None
    if needs_grad.logit_scale:
        assert hidden_sum is not None
        scale = shards.sum_scale(scale_gradient(hidden, hidden_sum, head.bias, sums.bias))
    bias = None if sums.bias is None or not needs_grad.bias else shards.sum_bias(sums.bias)
    return HeadSums(sums.weight, bias, scale)


def finish(
    hidden: jax.Array,
    head: Head,
    hidden_sum: jax.Array | None,
    sums: HeadSums,
    upstream: jax.Array | None = None,
    axes: Sums | None = None,
) -> Gradients:
    """Gradients from their sums, times the upstream scalar (None: 1) and the logit scale, each rounded once.

    Where each device has a share of a gradient, the shares are added up over `axes`; the weight's, see `Shards`, when
    they have been rounded.
    """
    axes = axes or Sums()
    upstream = jnp.ones((), head.spec.accumulator) if upstream is None else upstream
    scale = upstream if head.logit_scale is None else upstream * head.logit_scale

    def rounded(total: jax.Array | None, like: jax.Array | None, axes: Axes) -> jax.Array | None:
        return None if total is None or like is None else psum(scale * total, axes).astype(like.dtype)

    return Gradients(
        rounded(hidden_sum, hidden, axes.hidden),
        None if (weight := rounded(sums.weight, head.weight, ())) is None else psum(weight, axes.weight),
        rounded(sums.bias, head.bias, axes.bias),
        None if sums.logit_scale is None else psum(upstream * sums.logit_scale, axes.logit_scale),
    )


def input_cotangents(saved: Saved, gradients: Gradients) -> tuple[Any, ...]:
    """The cotangents of `(batch, head, mask)`, zero where `gradients` has None."""
    d_batch, d_head, d_mask = zero_cotangent((saved.batch, saved.head, saved.mask))
    found = {name: g for name, g in gradients._asdict().items() if g is not None}
    if "hidden" in found:
        d_batch = d_batch._replace(hidden=found.pop("hidden"))
    return d_batch, dataclasses.replace(d_head, **found), d_mask


def zero_cotangent(tree: Any) -> Any:
    """Zeros, in float0 for integers as JAX wants them."""

    def zero(x: jax.Array) -> Any:
        return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(zero, tree)
