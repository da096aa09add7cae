"""The loss of all rows and its gradients by one program of JAX's, where the kernels serve all rows at once.

It saves what PyTorch would take for the statistics of each chunk, the loss of them, and the derivatives of that.
"""

from typing import Any

import jax
import torch
from torch import Tensor

import pallas_ce
from torch_bridge.autograd import first_order
from torch_bridge.dlpack import exchange
from torch_bridge.materialized.kernels import Arrays, Kernels
from torch_bridge.programs.calls import scale_

# The reduction, `ignore_index`, and names of the tensors that are differentiated, "rows" first.
type _What = tuple[str, int | None, tuple[str, ...]]


def cross_entropy(
    kernels: Kernels, reduction: str, ignore_index: int | None, logits: Tensor, given: dict[str, Tensor], inplace: bool
) -> Tensor:
    """`pallas_ce.cross_entropy` of logits `[..., V']`, reduced; `given` are its further tensors, `target` first."""
    tensors = {"rows": logits, **given}
    names: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        names = tuple(name for name, x in tensors.items() if x.requires_grad and name != "class_weights")
    # A graph of the gradients depends on these. Of the logits no entry is kept, so that their memory is free.
    depends = [logits[..., :0].clone(), *given.values()]
    function: Any = _LossAndGradients
    return function.apply(
        kernels, (reduction, ignore_index, names), inplace, tuple(tensors), depends, *tensors.values()
    )


def _loss(kernels: Kernels, what: _What, arrays: Arrays) -> tuple[jax.Array, ...]:
    """The gradients, and the loss of "target" `[n]` with options of its own."""
    (reduction, ignore_index, differentiated), spec, target = what, kernels.spec, arrays["target"]
    if target.size != arrays["rows"].shape[0]:
        target = exchange.words_to_int32(target)

    def of(varied: Arrays) -> jax.Array:
        given: dict[str, Any] = arrays | varied | {"target": target}
        return pallas_ce.cross_entropy(
            given.pop("rows"),
            given.pop("target"),
            reduction=reduction,  # type: ignore[arg-type]
            ignore_index=ignore_index,
            vocab_size=spec.vocab_size,
            logit_softcap=spec.softcap,
            implementation=kernels.implementation,  # type: ignore[arg-type]
            **given,
        )

    value, gradients = jax.value_and_grad(of)({name: arrays[name] for name in differentiated})
    return *[gradients[name] for name in differentiated], value


class _LossAndGradients(torch.autograd.Function):
    """`(…, logits [..., V'], *tensors) -> loss`; the forward makes all gradients, without the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, what: _What, inplace: bool, names: Any, depends: Any, *tensors: Tensor
    ) -> Tensor:
        logits, *others = tensors
        # With a count of changes of its own: one of a view's would make PyTorch forget where the view comes from.
        rows = logits.data.view(-1, logits.shape[-1])
        replaces = "rows" in what[2]
        if replaces and not inplace:
            rows = rows.clone()
        *found, value = kernels.run(_loss, what, dict(zip(names, (rows, *others), strict=True)), replaces)
        ctx.save_for_backward(*[rows] * replaces, *found)
        ctx.static = what[2], names, logits.shape, depends
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        differentiated, names, shape, depends = ctx.static
        made = dict(zip(differentiated, ctx.saved_tensors, strict=True))
        with torch.no_grad():
            if (rows := made.pop("rows", None)) is not None:
                rows = rows.clone() if torch._C._autograd._get_current_graph_task_keep_graph() else rows.detach()
                scale_([rows], upstream)
            made = {name: (upstream * gradient).to(gradient.dtype) for name, gradient in made.items()}
            made |= {} if rows is None else {"rows": rows.view(shape)}
        found = dict(zip(made, first_order.final(list(made.values()), (upstream, *depends)), strict=True))
        return *[None] * 5, *[found.get(name) for name in names]
