"""The head's loss in a pipeline-parallel model: `PipelineFusedLoss`.

A schedule keeps the last stage's output until the microbatch's backward. So the last stage returns hidden states in
training, and the loss function has the output layer, whose parameters stay where they were, under the same names.
`docs/pytorch.md` says what V-shaped schedules, DDP and FSDP2 need.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_bridge.api.modules import LinearCrossEntropyLoss
from torch_bridge.autograd import partitioned

Returns = Literal["hidden", "logits"]


class PipelineFusedLoss(LinearCrossEntropyLoss):
    """The `loss_fn` of a pipeline schedule: cross entropy of the last stage's hidden states, with the output layer.

    Args:
        layer: the output layer; its parameters are shared, also those that replace them later, as
            `load_state_dict(assign=True)` does. Let the last stage hold it too (see `take_head`), so that zero-bubble
            schedules find its parameters.
        class_weights: `[V]`.
        options: keyword arguments of `linear_cross_entropy`; `backward` is "recompute" by default.

    Example:
        >>> import torch
        >>> from torch_bridge import PipelineFusedLoss
        >>> loss_fn = PipelineFusedLoss(torch.nn.Linear(8, 100, bias=False))
        >>> loss_fn(torch.randn(2, 5, 8), torch.randint(0, 100, (2, 5))).shape
        torch.Size([])
    """

    def __init__(self, layer: nn.Module, *, class_weights: Tensor | None = None, **options: Any) -> None:
        nn.Module.__init__(self)
        shared = LinearCrossEntropyLoss.shared_with(layer)
        self._take(shared.weight, shared.bias, class_weights, {"backward": "recompute"} | options)
        self.__dict__["layer"] = layer  # not a submodule: its parameters would have a second name

    def forward(self, input: Tensor, target: Tensor, **further: Any) -> Any:
        """The loss of the last stage's output `[..., H]`.

        Raises:
            ValueError: the stage returned logits.
        """
        layer: Any = self.layer
        if self.weight is not layer.weight or self.bias is not getattr(layer, "bias", None):
            self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        rows, width = partitioned.whole_shape(self.weight)
        if input.shape[-1] == rows != width:
            raise ValueError(
                f"input has shape {tuple(input.shape)}: the last stage returned logits, as it does in evaluation. "
                'For a loss use `with returning("hidden", model): ...`'
            )
        loss = super().forward(input, target, **further)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return loss
        # Zero-bubble schedules detach the loss after the input's gradient and come back for the weight's with the
        # node alone; a node written in Python lives only as long as a tensor that it made. So the loss that they
        # detach is a copy, and holds the first.
        returned = loss.clone()
        returned.graph = loss  # type: ignore[attr-defined]
        return returned


class HeadInLoss(nn.Linear):
    """The class of a head that a loss took: hands hidden states on in training, and computes logits in evaluation.

    `returns` overrides what the mode says.
    """

    returns: Returns | None = None

    def forward(self, input: Tensor) -> Tensor:
        """`input` itself, or logits."""
        if (self.returns or ("hidden" if self.training else "logits")) == "logits":
            return super().forward(input)
        if torch.compiler.is_exporting():
            # The tracing front end of pipelining gives a stage the parameters that its part of the graph names.
            for parameter in self.parameters():
                torch.ops.aten._assert_tensor_metadata(parameter, dtype=parameter.dtype)
        return input


def take_head(model: nn.Module, name: str = "lm_head", **options: Any) -> PipelineFusedLoss:
    """Makes `model` return hidden states in training, and returns the loss function that has its head.

    Args:
        model: the module of the last stage. Its head must be the last thing it computes: a soft cap or scale of the
            logits belongs into `options`, not behind the head.
        name: where its head is, an `nn.Linear`; dots lead into submodules.
        options: of `PipelineFusedLoss`.

    Raises:
        AttributeError: nothing has that name.
        TypeError: no `nn.Linear` there.

    Example:
        >>> import torch
        >>> from torch_bridge import put_head_back, take_head
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 100))
        >>> loss_fn = take_head(model, "1")
        >>> model(torch.ones(2, 4)).shape, model.eval()(torch.ones(2, 4)).shape
        (torch.Size([2, 8]), torch.Size([2, 100]))
        >>> put_head_back(model, "1")
        >>> model[1]
        Linear(in_features=8, out_features=100, bias=True)
    """
    head: Any = model.get_submodule(name)
    if type(head) is not nn.Linear:
        raise TypeError(f"{name} is a {type(head).__name__}; take_head moves an nn.Linear")
    head.__class__ = HeadInLoss
    return PipelineFusedLoss(head, **options)


def put_head_back(model: nn.Module, name: str = "lm_head") -> None:
    """Undoes `take_head`: the head is an `nn.Linear` again, with the parameters as they are now.

    Args:
        model: what `take_head` was given.
        name: where its head is.
    """
    head: Any = model.get_submodule(name)
    if type(head) is not HeadInLoss:
        raise TypeError(f"{name} is a {type(head).__name__}, not a head that take_head took")
    head.__dict__.pop("returns", None)
    head.__class__ = nn.Linear  # type: ignore[assignment]


@contextlib.contextmanager
def returning(what: Returns, model: nn.Module) -> Iterator[None]:
    """Within the context every head that `take_head` took in `model` returns "hidden" states or "logits".

    For a loss on the evaluation set: `with returning("hidden", model.eval()): schedule.eval(x, target=y, losses=[])`.

    Args:
        what: "hidden" or "logits".
        model: what `take_head` was given, or a module around it.
    """
    if what not in ("hidden", "logits"):
        raise ValueError(f"what={what!r} must be 'hidden' or 'logits'")
    heads = [module for module in model.modules() if isinstance(module, HeadInLoss)]
    before = [head.returns for head in heads]
    try:
        for head in heads:
            head.returns = what
        yield
    finally:
        for head, returns in zip(heads, before, strict=True):
            head.returns = returns
