"""The parts of a causal language model of transformers: its backbone, its head, and what it makes of their logits.

The head may be a layer of PEFT's, which holds the model's own as `base_layer` and adapters by name in `lora_A` and
`lora_B`. The active one becomes the low-rank term of a `LowRank`, so that its gradients make no array of the weight's
size.
"""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pallas_ce import LowRank
from torch_bridge.autograd import partitioned

# The label that transformers' losses ignore.
IGNORED = -100

_ELSEWHERE = "or leave lm_head out of target_modules"
_WHOLE = "with llm_int8_skip_modules=['lm_head']"


def base(model: Any) -> Any:
    """The model of transformers inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """The module that makes hidden states; the model itself where it has none."""
    # Llama 4's base_model_prefix names none.
    return next((getattr(model, x) for x in (model.base_model_prefix, "model") if hasattr(model, x)), model)


def head(model: Any) -> Any:
    """The head whose weight counts: of one in PEFT's `modules_to_save`, the active adapter's copy."""
    found = model.get_output_embeddings()
    if not hasattr(found, "modules_to_save"):
        return found
    active = [] if found.disable_adapters else found.active_adapters
    return found.modules_to_save[active[0]] if active else found.original_module


def in_place_of_logits(model: Any, loss: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """`loss(hidden)`; where FSDP2 wraps the head by itself, in a call of it, around which the weight is whole."""
    outermost = model.get_output_embeddings()
    if not isinstance(outermost, FSDPModule):
        return loss(hidden)
    called = cast(nn.Module, outermost)
    called.forward = loss
    try:
        return cast(Tensor, called(hidden))
    finally:
        del called.forward


def forwards(model: Any) -> list[Any]:
    """The model's forward and the forwards that it says it wraps, as functions, up to its class's own.

    The first is its class's own where nobody gave the model another, or whoever did took it away again.
    """
    found, method = [], model.forward
    while True:
        found.append(getattr(method, "__func__", method))
        if found[-1] is type(model).forward or not hasattr(found[-1], "__wrapped__"):
            return found
        method = found[-1].__wrapped__


def passed_over(model: Any, head: Any) -> str | None:
    """What of the model's head or loss `patch_causal_lm` would pass over, and what to do; None for nothing."""
    name = type(model).__name__
    if why := _passed_over(head):
        return f"the head of this {name} {why}"
    if "_loss_function" in model.__dict__:
        return f"this {name} was given a loss_function of its own, which the patch would not call: remove it"
    return None


def parameters(head: Any) -> tuple[Tensor | LowRank, Tensor | None]:
    """Weight `[V, H]` and bias `[V]` of a head that `passed_over` finds nothing of, with its active adapter."""
    layer = getattr(head, "base_layer", head)
    if layer is not head and head.disable_adapters and head.merged:
        head.unmerge()  # as its own forward does
    active = _active(head)
    if not active:
        return layer.weight, layer.bias
    (name,) = active
    up, down, scale = head.lora_B[name], head.lora_A[name], float(head.scaling[name])
    bias = layer.bias
    if up.bias is not None:
        terms = (up.bias, bias)
        with partitioned.gathered(terms):
            bias = scale * up.bias if bias is None else bias + scale * up.bias
        partitioned.accept_with(bias, terms)
    return LowRank(layer.weight, up.weight, down.weight, scale), bias


def _passed_over(head: Any) -> str | None:
    """What the patch would pass over, and the cure, as the end of "the head of this model …"; None for nothing."""
    sharded, layer = isinstance(head, FSDPModule), getattr(head, "base_layer", head)
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
            f"({type(head.base_layer).__name__}): keep the layer whole, {_WHOLE}, {_ELSEWHERE}"
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


def _active(head: Any) -> list[str]:
    """Names of the adapters that are added to the layer's logits and not merged into its weight."""
    if not hasattr(head, "base_layer") or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def logit_transform(model: Any) -> dict[str, Any]:
    """Soft cap and scale that the configuration of the model's text states, as options of the loss."""
    config, found = model.config.get_text_config(), {}
    if getattr(config, "final_logit_softcapping", None) is not None:
        found["logit_softcap"] = float(config.final_logit_softcapping)
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides
        found["logit_scale"] = 1.0 / float(config.logits_scaling)
    elif getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
        found["logit_scale"] = float(config.logit_scale)
    return found


def with_routers(model: Any, asked: bool | None) -> bool:
    """Whether a call is to add the loss of the model's routers: as asked for, or as its configuration says."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked)


def router_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> tuple[Tensor, float] | None:
    """The load-balancing loss of a mixture of experts and its factor, as the model's own forward has them.

    None where the model's module has no such loss.
    """
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]  # FSDP2 makes a class of its own
    balance = next((x.load_balancing_loss_func for x in modules if hasattr(x, "load_balancing_loss_func")), None)
    if balance is None or router_logits is None:
        return None
    of = model if hasattr(model, "num_experts") else model.config.get_text_config()
    loss = balance(router_logits, of.num_experts, of.num_experts_per_tok, attention_mask)
    return torch.as_tensor(loss), of.router_aux_loss_coef
