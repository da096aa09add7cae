"""A head with an adapter of PEFT's (LoRA): its weight and bias, and which adapters are refused.

A layer of PEFT's holds the model's own layer as `base_layer`, and adapters by name in `lora_A` and `lora_B`. The active
one becomes the low-rank term of a `LowRank`, so that its gradients make no array of the weight's size.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pallas_ce import LowRank

_ELSEWHERE = "or leave lm_head out of target_modules"
_WHOLE = "with llm_int8_skip_modules=['lm_head']"


def parameters(head: Any) -> tuple[Tensor | LowRank, Tensor | None]:
    """Weight `[V, H]` and bias `[V]` of a head for which `passed_over` finds nothing, with its active adapter."""
    layer = base(head)
    if layer is not head and head.disable_adapters and head.merged:
        head.unmerge()  # as its own forward does
    active = _active(head)
    if not active:
        return layer.weight, layer.bias
    (name,) = active
    up, down, scale = head.lora_B[name], head.lora_A[name], float(head.scaling[name])
    bias = layer.bias
    if up.bias is not None:
        bias = scale * up.bias if bias is None else bias + scale * up.bias
    return LowRank(layer.weight, up.weight, down.weight, scale), bias


def passed_over(head: Any) -> str | None:
    """What the patch would pass over, and the cure, as the end of "the head of this model …"; None for nothing."""
    sharded, layer = isinstance(head, FSDPModule), base(head)
    kind = type(head).__bases__[1] if sharded else type(head)
    if layer is not head:
        if why := _of_adapter(head, kind):
            return why
        kind = type(layer)
    if kind is not nn.Linear:
        quantised = "bit" in kind.__name__
        cure = f"keep it whole, {_WHOLE}" if quantised else "make it an nn.Linear"
        return f"is a {kind.__name__}, and the patch would read its weight alone: {cure}"
    for module in head.modules():
        # FSDP2 has one of each.
        if max(len(module._forward_hooks), len(module._forward_pre_hooks)) > (sharded and module is head):
            return "has forward hooks, which the patch would not call: remove them"
        # Accelerate's moves arrays between devices.
        if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
            return "was given a forward of its own, which the patch would not call: remove it"
    return None


def _of_adapter(head: Any, kind: type) -> str | None:
    """Why a layer of PEFT's, of that kind, cannot be served as a low-rank term."""
    if not (kind.__module__.startswith("peft.tuners.lora.") and hasattr(head, "lora_A")):
        return (
            f"has an adapter that is no LoRA ({kind.__module__}.{kind.__name__}), which the patch would not train: "
            f"take a LoraConfig for lm_head, {_ELSEWHERE}"
        )
    if kind.__name__ != "Linear":
        return (
            f"has an adapter ({kind.__name__}) of a layer that is quantised, or no nn.Linear "
            f"({type(base(head)).__name__}): keep the layer whole, {_WHOLE}, {_ELSEWHERE}"
        )
    active = _active(head)
    if len(active) > 1:
        return (
            f"has several active adapters, {active}, and a head takes one: choose it with set_adapter, or merge them "
            "with add_weighted_adapter"
        )
    for name in active:
        if head.use_dora.get(name):
            return (
                f"has the adapter {name!r} with use_dora=True, which is no term beside the weight: set use_dora=False, "
                f"{_ELSEWHERE}"
            )
        if name in head.lora_variant:
            variant = type(head.lora_variant[name]).__name__
            return f"has the adapter {name!r} of the variant {variant}: take plain LoRA for lm_head, {_ELSEWHERE}"
        dropout = head.lora_dropout[name]
        if getattr(dropout, "p", 0.0) > 0 and dropout.training:
            return (
                f"has the adapter {name!r} with lora_dropout={dropout.p}, which the patch would not apply: set "
                f"lora_dropout=0.0, {_ELSEWHERE}"
            )
    return None


def base(head: Any) -> Any:
    """The model's own layer."""
    return getattr(head, "base_layer", head)


def _active(head: Any) -> list[str]:
    """Names of the adapters that are added to the layer's logits and not merged into its weight."""
    if base(head) is head or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]
