"""The loss of all rows and its gradients by one program of JAX's, where the kernels serve all rows at once.

It saves what PyTorch would take for the statistics of each chunk, the loss of them, and the derivatives of that.
"""

from typing import Any

import torch
from torch import Tensor

from torch_bridge.autograd import first_order
from torch_bridge.materialized.kernels import Kernels, Loss, loss
from torch_bridge.programs.calls import scale_


def cross_entropy(
    kernels: Kernels, reduction: str, ignore_index: int | None, logits: Tensor, given: dict[str, Tensor], inplace: bool
) -> Tensor:
    """`pallas_ce.cross_entropy` of logits `[..., V']`, reduced; `given` are its further tensors, `target` first."""
    tensors = {"rows": logits, **given}
    names: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        names = tuple(name for name, x in tensors.items() if x.requires_grad and name != "class_weights")
    what = Loss(reduction, ignore_index, names)
    # A graph of the gradients depends on these. Of the logits no entry is kept, so that their memory is free.
    depends = [logits[..., :0].clone(), *given.values()]
    function: Any = _LossAndGradients
    return function.apply(kernels, what, inplace, tuple(tensors), depends, *tensors.values())


class _LossAndGradients(torch.autograd.Function):
    """`(…, logits [..., V'], *tensors) -> loss`; the forward makes all gradients, without the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        what: Loss,
        inplace: bool,
        names: tuple[str, ...],
        depends: list[Tensor],
        logits: Tensor,
        *others: Tensor,
    ) -> Tensor:
        # With a count of changes of its own: one of a view's would make PyTorch forget where the view comes from.
        rows = logits.data.view(-1, logits.shape[-1])
        if "rows" in what.differentiated and not inplace:
            rows = rows.clone()
        *found, value = kernels.run(loss, what, dict(zip(names, (rows, *others), strict=True)))
        ctx.save_for_backward(*([rows] if "rows" in what.differentiated else []), *found)
        ctx.static = what.differentiated, names, logits.shape, depends
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        differentiated, names, shape, depends = ctx.static
        made = dict(zip(differentiated, ctx.saved_tensors, strict=True))
        with torch.no_grad():
            for name, gradient in made.items():
                if name != "rows":
                    made[name] = (upstream * gradient).to(gradient.dtype)
                    continue
                if torch._C._autograd._get_current_graph_task_keep_graph():
                    gradient = gradient.clone()
                scale_([gradient], upstream)
                made[name] = gradient.detach().view(shape)
        found = dict(zip(made, first_order.final(list(made.values()), (upstream, *depends)), strict=True))
        return *[None] * 5, *[found.get(name) for name in names]
