"""`LinearCrossEntropyLoss`: a head and its loss as one module."""

import inspect
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from torch_bridge.api import checks
from torch_bridge.api.linear import linear_cross_entropy
from torch_bridge.autograd import partitioned

# One call in the graph of torch.fx.symbolic_trace, which cannot trace what reads shapes and dtypes.
torch.fx.wrap("linear_cross_entropy")

# What a module or its caller gives, and no option of its own does.
_GIVEN = {"input", "linear_weight", "target", "linear_bias", "class_weights", "token_weights"}


def scaled_and_capped(products: Tensor, options: dict[str, Any]) -> Tensor:
    """The logits of a head with these options, from its products and bias."""
    logits, cap = products * options.get("logit_scale", 1.0), options.get("logit_softcap")
    return logits if cap is None else cap * torch.tanh(logits / cap)


class LinearCrossEntropyLoss(nn.Module):
    """A language model's head with its loss: `linear_cross_entropy` with a weight, and maybe a bias, of its own.

    Parameters have the names, shapes and initial values of `torch.nn.Linear(in_features, num_classes)`, so that their
    state dicts fit each other. `shared_with` makes one on the parameters of an existing layer: a model's head, or the
    embedding it is tied to.

    Args:
        in_features: H, the hidden size.
        num_classes: V', the weight's rows.
        bias: whether there is one.
        class_weights: `[V]`, kept as a buffer outside the state dict.
        device: of the parameters.
        dtype: of the parameters.
        options: further keyword arguments of `linear_cross_entropy`, for each call.

    Raises:
        TypeError: an option that `linear_cross_entropy` does not know.
        ValueError: a name or number that it does not take.

    Example:
        >>> import torch
        >>> from torch_bridge import LinearCrossEntropyLoss
        >>> head = LinearCrossEntropyLoss(8, 100, label_smoothing=0.1)
        >>> loss = head(torch.randn(2, 5, 8), torch.randint(0, 100, (2, 5)))
        >>> loss.backward()
        >>> head.logits(torch.randn(3, 8)).shape
        torch.Size([3, 100])
        >>> linear = torch.nn.Linear(8, 100, bias=False)
        >>> LinearCrossEntropyLoss.shared_with(linear).weight is linear.weight
        True
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    class_weights: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        class_weights: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        initial = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self._take(cast(nn.Parameter, initial.weight), initial.bias, class_weights, options)

    def reset_parameters(self) -> None:
        """Draws the parameters anew as `torch.nn.Linear` does, in place: for models that began on the meta device.

        The class weights are again those that were given, which `to_empty` loses.
        """
        nn.Linear.reset_parameters(cast(nn.Linear, self))
        if self.class_weights is not None:
            self.class_weights.copy_(cast(Tensor, self._given_class_weights))

    @classmethod
    def shared_with(cls, layer: nn.Module, *, class_weights: Tensor | None = None, **options: Any) -> Self:
        """A loss on the very parameters of `layer`: anything with a `weight [V', H]` and maybe a `bias [V']`."""
        if hasattr(layer, "base_layer"):
            raise TypeError(
                f"{type(layer).__name__} is a layer with an adapter, which a loss on its weight would pass over: merge "
                "it, or call linear_cross_entropy with a pallas_ce.LowRank"
            )
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if not isinstance(weight, nn.Parameter) or len(partitioned.whole_shape(weight)) != 2:
            raise TypeError(f"{type(layer).__name__} has no parameter `weight` of two axes to share")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._take(weight, bias, class_weights, options)
        return self

    def _take(
        self, weight: nn.Parameter, bias: nn.Parameter | None, class_weights: Tensor | None, options: dict[str, Any]
    ) -> None:
        allowed = inspect.signature(linear_cross_entropy).parameters.keys() - _GIVEN
        checks.refuse_unknown(options, allowed, ("bias", "class_weights"))
        if own := [name for name, x in options.items() if isinstance(x, nn.Parameter)]:
            raise TypeError(f"{own[0]} is an nn.Parameter, which this module would not own: call linear_cross_entropy")
        checks.kept(options)
        size = checks.size(options.get("vocab_size"), partitioned.whole_shape(weight)[0], "the weight's rows")
        checks.shape("class_weights", class_weights, (size,))
        self.weight = weight
        self.register_parameter("bias", bias)
        self.register_buffer("class_weights", class_weights, persistent=False)
        self._given_class_weights = class_weights
        self.options = options

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weights: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Any:
        """The loss of `input [..., H]` and `target [...]`; a `normalizer` given here goes before the option."""
        options = self.options if normalizer is None else self.options | {"normalizer": normalizer}
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            class_weights=self.class_weights,
            token_weights=token_weights,
            **options,
        )

    def logits(self, input: Tensor) -> Tensor:
        """Logits `[..., V']` for generation: scaled and capped as in the loss, padding included.

        All processes must call it where ZeRO-3 has partitioned the head. The logits then have no backward.
        """
        with partitioned.gathered((self.weight, self.bias)):
            return scaled_and_capped(nn.functional.linear(input, self.weight, self.bias), self.options)

    def extra_repr(self) -> str:
        """Sizes and options, as `print` shows them."""
        rows, width = partitioned.whole_shape(self.weight)
        sizes = [f"in_features={width}", f"num_classes={rows}"]
        return ", ".join([*sizes, f"bias={self.bias is not None}", *(f"{k}={v!r}" for k, v in self.options.items())])
