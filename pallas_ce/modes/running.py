"""A loss and its gradients at once, the weight's added to a sum over micro-batches.

Differentiation makes an array of the weight's size for each micro-batch, and another pass adds it to the sum. Here the
sum itself is what either mode adds to, tile by tile. So the total's cotangent has to be given: both directions are one
call.
"""

import dataclasses
from typing import Any

import jax

from pallas_ce.dispatch.settings import Settings
from pallas_ce.gradient_products import NeedsGrad
from pallas_ce.modes import evaluate, in_forward, recompute
from pallas_ce.modes.call import Call, Gradients, Operands, added
from pallas_ce.statistics.logits import present


def loss_and_gradients(call: Call[Settings], operands: Operands, needs_grad: NeedsGrad) -> tuple[jax.Array, Gradients]:
    """`Σ row_total` over the rows that count, and its gradients in `needs_grad`, times `operands.cotangent`.

    Among them are the hidden states and the weight: in place of the weight's gradient there is `head.running` with the
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


def _differentiated(call: Call[Settings], operands: Operands, needs_grad: NeedsGrad) -> tuple[jax.Array, Gradients]:
    """By the reference, and of no rows."""
    names = [field.name for field in dataclasses.fields(needs_grad) if getattr(needs_grad, field.name)]
    head = dataclasses.replace(operands.head, running=None)

    def loss_of(arrays: dict[str, jax.Array]) -> jax.Array:
        of_head: dict[str, Any] = {name: x for name, x in arrays.items() if name != "hidden"}
        batch = operands.batch._replace(hidden=arrays["hidden"])
        return evaluate.loss(
            call, operands._replace(batch=batch, head=dataclasses.replace(head, **of_head), cotangent=None), False
        )[0]

    arrays = {"hidden": operands.batch.hidden, **{name: getattr(head, name) for name in names if name != "hidden"}}
    loss, back = jax.vjp(loss_of, arrays)
    (gradients,) = back(present(operands.cotangent))
    gradients["weight"] = added(present(operands.head.running), gradients["weight"].astype(head.spec.accumulator))
    return loss, Gradients(**gradients)
