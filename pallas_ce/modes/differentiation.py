"""What the modes share: a call as data, and gradients that are streamed: once, in reverse mode."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_ce.head import Batch, Head, NeedsGrad, scale_gradient
from pallas_ce.parallel.shards import Axes, Shards, Sums, psum

_REFUSAL = (
    "pallas_ce computes first derivatives in reverse mode only: its gradients are streamed, not traced, and cannot be "
    "differentiated again (neither by grad of grad nor by jvp, jacfwd or hessian). "
)
_USE_REFERENCE = "implementation='reference' materialises the logits and supports any order."


class RowTotal(Protocol):
    """`(statistics [n], (by_row, shared)) -> [n]`, each row's share of the total.

    Attributes:
        defined_at_zero: whether its values and derivatives are finite where statistics and inputs by row are 0. It is
            then given zeros for rows that do not count, else what a row that counts holds.
    """

    defined_at_zero: ClassVar[bool]

    def __call__(self, statistics: dict[str, jax.Array], inputs: tuple[Any, Any], /) -> jax.Array:
        """Each row by itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Call[How]:
    """Static facts of a call.

    Attributes:
        settings: how it is carried out.
        names: the primitive statistics to return.
        row_total: what is summed over the rows; None where it is the statistics that are asked for.
        read: those of `names` that `row_total` reads.
    """

    settings: How
    names: frozenset[str]
    row_total: RowTotal | None = None
    read: frozenset[str] = frozenset()


class Gradients(NamedTuple):
    """Gradients of the inputs, or what they are made of before upstream scalar and scale; None where not needed."""

    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    logit_scale: jax.Array | None = None


class Known(NamedTuple):
    """What a forward has found, given to a later evaluation of the same problem so that it need not be found again.

    For callers whose differentiation keeps arrays from forward to backward and not closures: `evaluate.keep` makes it,
    and the functions there that take it have the same values and gradients with it as without.

    Attributes:
        statistics: `[N]` each, those that the loss reads and those that its derivatives do.
        sums: in_forward's, that the gradients come from.
    """

    statistics: dict[str, jax.Array]
    sums: Gradients = Gradients()


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
        batch: the rows.
        head: the head.
        mask: `[...]` bool, which rows count; None: all.
        inputs: what else is read, with `row_total` its `(by_row, shared)`: pytrees of `[..., *K]`, and of arrays that
            all rows share.
        known: what `evaluate.keep` has found for the same call, or None.
    """

    batch: Batch
    head: Head
    mask: jax.Array | None
    inputs: Any = ((), ())
    known: Known | None = None


class _Saved(NamedTuple):
    """What a forward leaves for the backward: the inputs themselves, and `kept`.

    JAX traces a forward once for each set of differentiated inputs but remembers only one structure of residuals, so
    the structure may not depend on that set; shapes may. So `flags` says by its shape, 2 for yes and 1 for no, which
    inputs are differentiated, and `kept` holds `absent()` arrays in place of None. (No axis has 0 elements: XLA fails
    on empty residuals that cross a `shard_map` or `pmap` boundary.)

    The inputs are saved as they came: JAX then knows them to be inputs and stores no copy of the weight, not even one
    for each step of a scan.
    """

    operands: Operands
    kept: Any
    flags: jax.Array


def absent() -> jax.Array:
    """Stands for None among residuals."""
    return jnp.zeros(1, jnp.int8)


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


def values_of(tree: Any) -> Any:
    """The primal values of a tree of `custom_vjp` primals."""
    return jax.tree.map(lambda primal: primal.value, tree, is_leaf=lambda x: hasattr(x, "perturbed"))


def given(cotangents: Any) -> Any:
    """`cotangents` with None for those of integers, and where JAX says that nothing depends on the output."""

    def none(g: Any) -> bool:
        return isinstance(g, SymbolicZero) or g.dtype == jax.dtypes.float0

    return jax.tree.map(lambda g: None if none(g) else g, cotangents)


def differentiable[Static, Out](
    forward: Callable[[Static, Operands, NeedsGrad | None], tuple[Out, Any]],
    backward: Callable[[Static, Operands, NeedsGrad, Any, Any], Gradients],
) -> Callable[[Static, Operands], Out]:
    """A function with gradients in hidden states and head, once; its other operands are constants to it.

    Args:
        forward: `(static, operands, needs_grad) -> (out, kept)`; `needs_grad` is None where nothing is differentiated.
        backward: `(static, operands, needs_grad, kept, cotangents) -> gradients`, the cotangents as `given`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(static: Static, operands: Operands) -> Out:
        return forward(static, operands, None)[0]

    def saving(static: Static, primals: Any) -> tuple[Out, _Saved]:
        arrays = (primals.batch.hidden, primals.head.weight, primals.head.bias, primals.head.logit_scale)
        flags = [x is not None and x.perturbed for x in arrays]
        operands: Operands = values_of(primals)
        out, kept = forward(static, first_order_only(operands), NeedsGrad(*flags))
        return out, _Saved(operands._replace(known=None), kept, jnp.zeros([1 + flag for flag in flags], jnp.int8))

    def cotangents_of(static: Static, saved: _Saved, cotangents: Any) -> tuple[Any]:
        needs_grad, cotangents = NeedsGrad(*(size > 1 for size in saved.flags.shape)), given(cotangents)
        gradients = Gradients()
        if needs_grad and jax.tree.leaves(cotangents):
            used, kept, cotangents = first_order_only((saved.operands, saved.kept, cotangents))
            gradients = backward(static, used, needs_grad, kept, cotangents)
        zero: Any = jax.tree.map(lambda _: None, saved.operands)
        hidden, *of_head = gradients
        head = dataclasses.replace(zero.head, **dict(zip(Gradients._fields[1:], of_head, strict=True)))
        return (zero._replace(batch=zero.batch._replace(hidden=hidden), head=head),)

    function.defvjp(saving, cotangents_of, symbolic_zeros=True)
    return function


def sum_over_devices(
    shards: Shards, hidden: jax.Array, head: Head, needs_grad: NeedsGrad, sums: Gradients
) -> Gradients:
    """The head's small sums from this device's share of them, beside the weight's as it came.

    When those for hidden and weight are rounded and summed is a mode's affair. The scale's gradient is made here, from
    those of hidden and bias: see `scale_gradient`.
    """
    scale = None
    if needs_grad.logit_scale:
        assert sums.hidden is not None
        scale = psum(scale_gradient(hidden, sums.hidden, head.bias, sums.bias), shards.sums.logit_scale)
    bias = None if sums.bias is None or not needs_grad.bias else shards.sum_bias(sums.bias)
    return Gradients(None, sums.weight, bias, scale)


def finish(
    operands: Operands, sums: Gradients, upstream: jax.Array | None = None, axes: Sums | None = None
) -> Gradients:
    """Gradients from their sums, times the upstream scalar (None: 1) and the logit scale, each rounded once.

    Where each device has a share of a gradient, the shares are added up over `axes`; the weight's, see `Shards`, when
    they have been rounded.
    """
    head, axes = operands.head, axes or Sums()
    upstream = jnp.ones((), head.spec.accumulator) if upstream is None else upstream
    scale = upstream if head.logit_scale is None else upstream * head.logit_scale

    def rounded(total: jax.Array | None, like: jax.Array | None, axes: Axes) -> jax.Array | None:
        return None if total is None or like is None else psum(scale * total, axes).astype(like.dtype)

    return Gradients(
        rounded(sums.hidden, operands.batch.hidden, axes.hidden),
        None if (weight := rounded(sums.weight, head.weight, ())) is None else psum(weight, axes.weight),
        rounded(sums.bias, head.bias, axes.bias),
        None if sums.logit_scale is None else psum(upstream * sums.logit_scale, axes.logit_scale),
    )
