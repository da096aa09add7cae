"""From a row-wise loss to its sum and its gradients: the one place where a backward mode is entered.

Gradients are streamed, so they can be had once, in reverse mode.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_ce.backends import reference
from pallas_ce.head import NO_WEIGHT, Head
from pallas_ce.modes import in_forward, recompute
from pallas_ce.modes.call import Call, Known, Operands, Statistics, added, empty_statistics
from pallas_ce.modes.forward import forward_statistics
from pallas_ce.parallel.reverse_mode import reverse_mode_only
from pallas_ce.statistics.gradient import saved_statistics
from pallas_ce.statistics.row import only
from pallas_ce.streaming.gradient_products import INPUTS, NO_ARRAYS, Arrays, PerInput
from pallas_ce.streaming.loops import vary_like
from pallas_ce.streaming.rows import constant_unless_any, flat_rows, present, with_placeholder_rows, zeroed

_REFUSAL = (
    "pallas_ce computes first derivatives in reverse mode only: its gradients are streamed, not traced, and cannot be "
    "differentiated again (neither by grad of grad nor by jvp, jacfwd or hessian). "
)


def _instead_of(head: Head) -> str:
    """What can be differentiated twice, for an error; saved logits that nothing reads are None, as `NO_WEIGHT` is."""
    if head.weight is NO_WEIGHT:
        return "A loss written in plain JAX, on jax.nn.log_softmax, supports any order."
    return "implementation='reference' materialises the logits and supports any order."


class _Saved(NamedTuple):
    """What a forward leaves for the backward: the inputs themselves, and `kept`.

    JAX traces a forward once for each set of differentiated inputs but remembers only one structure of residuals, so
    the structure may not depend on that set; shapes may. So `flags` says by its shape, 2 for yes and 1 for no, which
    inputs are differentiated, and `kept` holds arrays in place of None. (No axis has 0 elements: XLA fails
    on empty residuals that cross a `shard_map` or `pmap` boundary.)

    The inputs are saved as they came: JAX then knows them to be inputs and stores no copy of the weight, not even one
    for each step of a scan.
    """

    operands: Operands
    kept: Any
    flags: jax.Array


def first_order_only(tree: Any, instead: str) -> Any:
    """The arrays of `tree`; differentiating anything computed from them raises NotImplementedError naming `instead`."""

    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(_REFUSAL + instead)

    barrier = jax.custom_jvp(lambda array: array)
    barrier.defjvp(_refuse)
    # Each array has a barrier of its own, so that unused arrays are neither kept nor asked for.
    return jax.tree.map(barrier, tree)


def _given(cotangents: Any) -> Any:
    """`cotangents`, None for integers and where JAX says that nothing depends on the output."""
    return jax.tree.map(
        lambda g: None if isinstance(g, SymbolicZero) or g.dtype == jax.dtypes.float0 else g, cotangents
    )


def differentiable[Static, Out](
    value: Callable[[Static, Operands], Out],
    forward: Callable[[Static, Operands, PerInput[bool]], tuple[Out, Any]],
    backward: Callable[[Static, Operands, PerInput[bool], Any, Any], Arrays],
    *,
    reads_operands: bool = True,
) -> Callable[[Static, Operands], Out]:
    """`value` with gradients in hidden states and head, once; its other operands are constants to it.

    It takes operands that are `reverse_mode_only`.

    Args:
        value: `(static, operands) -> out`, where nothing is differentiated.
        forward: `(static, operands, needs_grad) -> (out, kept)`.
        backward: `(static, operands, needs_grad, kept, cotangents) -> gradients`, a cotangent is None
            where nothing depends on the output.
        reads_operands: whether `backward` reads arrays of the operands; else their memory is free before.
    """

    def saving(static: Static, primals: Any) -> tuple[Out, _Saved]:
        flags = primals.differentiable.map(lambda x: x is not None and x.perturbed)
        operands: Operands = jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
        out, kept = forward(static, first_order_only(operands, _instead_of(operands.head)), flags)
        read = operands._replace(known=None) if reads_operands else jax.tree.map(lambda _: None, operands)
        return out, _Saved(read, kept, jnp.zeros([1 + flag for flag in flags], jnp.int8))

    def cotangents_of(static: Static, saved: _Saved, cotangents: Any) -> tuple[Any]:
        sizes, cotangents = dict(zip(INPUTS, saved.flags.shape, strict=True)), _given(cotangents)
        needs_grad = PerInput.by_name(lambda name: sizes[name] > 1)
        gradients = NO_ARRAYS
        if any(needs_grad) and jax.tree.leaves(cotangents):
            instead = _instead_of(saved.operands.head)
            used, kept, cotangents = first_order_only((saved.operands, saved.kept, cotangents), instead)
            gradients = backward(static, used, needs_grad, kept, cotangents)
        zero: Any = jax.tree.map(lambda _: None, saved.operands)
        return (zero.replaced(gradients),)

    function = jax.custom_vjp(value, nondiff_argnums=(0,))
    function.defvjp(saving, cotangents_of, symbolic_zeros=True)
    return function


def _value(call: Call, operands: Operands) -> Any:
    """Primitive statistics of the rows, and in mode in_forward the handle."""
    if operands.known is None:
        found = forward_statistics(call.how, call.names, operands.head)(operands.rows, operands.head, NO_ARRAYS)[0]
    else:
        found = only(operands.known.statistics, call.names)
    return call.with_handle(operands, found) if call.in_forward else found


# Primitive statistics of the rows, differentiable in `hidden` and the head's arrays but u.
_recomputed = differentiable(_value, recompute.forward, recompute.backward)

# Statistics, which carry no gradient, and a scalar 0 with the gradient of the summed row totals. Therefore
# `Σ row_total(stop_gradient(statistics), inputs) + handle` has the value and every gradient of the loss: JAX's own
# differentiation makes the gradient of `inputs`, and the handle the gradients of `hidden` and `head`.
_with_handle = differentiable(_value, in_forward.forward, in_forward.backward)
_of_logits_with_handle = differentiable(_value, in_forward.forward, in_forward.backward, reads_operands=False)


def statistics(call: Call, operands: Operands) -> Statistics:
    """Primitive statistics `[...]` of the rows, differentiable; 0 where the mask is False."""
    batch, head, mask = operands[:3]
    if batch.hidden.size == 0:
        return empty_statistics(call.names, batch, head)
    if call.how.mode is None:
        rows, counted = flat_rows(batch.leading, (batch, mask))
        found = reference.row_statistics(call.names, rows, head, counted)
        return {name: value.reshape(*batch.leading, *value.shape[1:]) for name, value in found.items()}
    return _recomputed(call, reverse_mode_only(operands))


def loss(call: Call, operands: Operands, by_row: bool) -> tuple[jax.Array, Statistics]:
    """`Σ row_total` over the rows that count or, `by_row`, each `[...]`, 0 where masked; and constant statistics."""
    handle = jnp.zeros((), operands.head.spec.accumulator)
    if call.in_forward and operands.batch.hidden.size > 0:
        way = _of_logits_with_handle if operands.head.weight is NO_WEIGHT else _with_handle
        found, handle = way(call, reverse_mode_only(operands))
        found = jax.tree.map(jax.lax.stop_gradient, found)
    else:
        found = statistics(call, operands)
    result = _values(call, operands, found) if by_row else total(call, operands, found) + handle
    return result, jax.tree.map(jax.lax.stop_gradient, found)


def total(call: Call, operands: Operands, found: Statistics) -> jax.Array:
    """`Σ row_total` over the rows that count, from their statistics `[...]`."""
    return call.how.total(jnp.sum(_values(call, operands, found)))


def _values(call: Call, operands: Operands, found: Statistics) -> jax.Array:
    """`row_total` of each row `[...]`, 0 in those that do not count, whose values never reach it."""
    row_total, leading, (by_row, shared) = present(call.row_total), operands.batch.leading, operands.inputs
    mask, read, by_row = flat_rows(leading, (operands.mask, only(found, row_total.names), by_row))
    read, by_row = (zeroed if row_total.defined_at_zero else with_placeholder_rows)(mask, (read, by_row))
    values = row_total(read, (by_row, constant_unless_any(mask, shared)))
    return zeroed(mask, values).reshape(leading)


def keep(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> Known | None:
    """What `Operands.known` may be, for gradients of `needs_grad` or fewer.

    None for the reference, which differentiates its logits anew.
    """
    if call.how.mode is None:
        return None
    if call.in_forward:
        return in_forward.keep(call, operands, needs_grad)
    find = forward_statistics(call.how, call.names | saved_statistics(call.names), operands.head)
    return Known(find(operands.rows, operands.head, NO_ARRAYS)[0])


def loss_and_gradients(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> tuple[jax.Array, Arrays]:
    """`Σ row_total` over the rows that count, and its gradients in `needs_grad`, times `operands.cotangent`.

    Differentiation makes an array of the weight's size for each micro-batch, and another pass adds it to their sum.
    Here `weight_sum` is what either mode adds to, tile by tile; it is returned in place of the weight's gradient. So
    the total's cotangent has to be given. `needs_grad` has the hidden states and the weight.
    """
    head, cotangent, total_of = operands.head, present(operands.cotangent), functools.partial(total, call, operands)
    if call.how.mode is None or operands.batch.hidden.size == 0:
        inputs, constants = operands.differentiable, operands._replace(cotangent=None, weight_sum=None)

        def loss_of(varied: Arrays) -> jax.Array:
            every = varied.map(lambda new, old: old if new is None else new, inputs)
            return loss(call, constants.replaced(every), False)[0]

        value, back = jax.vjp(loss_of, inputs.where(needs_grad))
        (gradients,) = back(vary_like(cotangent, value))
        weight = gradients.weight.astype(head.spec.accumulator)
        return value, gradients._replace(weight=added(present(operands.weight_sum), weight))
    if call.in_forward:
        # The scale of the logits is made part of the cotangent, so that the sums are gradients.
        scaled = cotangent if head.logit_scale is None else cotangent * head.logit_scale
        known = in_forward.keep(call, operands._replace(cotangent=scaled), needs_grad)
        hidden, bias = present(known.sums.hidden).astype(operands.batch.hidden.dtype), known.sums.bias
        if bias is not None and head.bias is not None:
            bias = bias.astype(head.bias.dtype)
        return total_of(known.statistics), known.sums._replace(hidden=hidden, bias=bias)
    found, kept = recompute.forward(call, operands, needs_grad)
    value, back = jax.vjp(total_of, found)
    return value, recompute.backward(call, operands, needs_grad, kept, _given(*back(vary_like(cotangent, value))))
