"""A loss and its gradients at once, the weight's added to a sum over micro-batches.

Differentiation makes an array of the weight's size for each micro-batch, and another pass adds it to the sum. Here the
sum itself is what either mode adds to, tile by tile. So the total's cotangent has to be given: both directions are one
call.
"""

import jax

from pallas_ce.modes import evaluate, in_forward, recompute
from pallas_ce.modes.call import Call, Operands
from pallas_ce.modes.sums import added
from pallas_ce.statistics.logits import present
from pallas_ce.streaming.gradient_products import Arrays, PerInput


def loss_and_gradients(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> tuple[jax.Array, Arrays]:
    """`Σ row_total` over the rows that count, and its gradients in `needs_grad`, times `operands.cotangent`.

    Among them are the hidden states and the weight: in place of the weight's gradient there is `weight_sum` with the
    gradient added. The others are in the dtypes of what they are gradients of.
    """
    head, cotangent = operands.head, present(operands.cotangent)
    if call.settings.mode is None or operands.batch.hidden.size == 0:
        return _differentiated(call, operands, needs_grad)
    if call.settings.mode == "in_forward":
        # The scale of the logits is made part of the cotangent, so that the sums are gradients.
        scaled = cotangent if head.logit_scale is None else cotangent * head.logit_scale
        known = in_forward.keep(call, operands._replace(cotangent=scaled), needs_grad)
        hidden, bias = present(known.sums.hidden).astype(operands.batch.hidden.dtype), known.sums.bias
        if bias is not None and head.bias is not None:
            bias = bias.astype(head.bias.dtype)
        return evaluate.total(call, operands, known.statistics), known.sums._replace(hidden=hidden, bias=bias)
    found, kept = recompute.forward(call, operands, needs_grad)
    loss, back = jax.vjp(lambda found: evaluate.total(call, operands, found), found)
    assert kept is not None
    return loss, recompute.backward(call, operands, needs_grad, kept, evaluate.given(*back(cotangent)))


def _differentiated(call: Call, operands: Operands, needs_grad: PerInput[bool]) -> tuple[jax.Array, Arrays]:
    """By the reference, and of no rows."""
    constants = operands._replace(cotangent=None, weight_sum=None)
    inputs = operands.differentiable

    def loss_of(varied: Arrays) -> jax.Array:
        all_inputs = PerInput(*(old if new is None else new for old, new in zip(inputs, varied, strict=True)))
        return evaluate.loss(call, constants.replaced(all_inputs), False)[0]

    loss, back = jax.vjp(loss_of, inputs.where(needs_grad))
    (gradients,) = back(present(operands.cotangent))
    weight = gradients.weight.astype(operands.head.spec.accumulator)
    return loss, gradients._replace(weight=added(present(operands.weight_sum), weight))
