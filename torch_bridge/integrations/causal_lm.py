"""The parts of a causal language model of transformers: its backbone, its head, and what it makes of their logits."""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torch_bridge.integrations import adapters

# The label that transformers' losses ignore.
IGNORED = -100


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


def has_forward_of_its_class(model: Any) -> bool:
    """Whether nobody gave the model another forward than its class has, or whoever did took it away again."""
    return getattr(model.forward, "__func__", None) is type(model).forward


def forwards(model: Any) -> list[Any]:
    """The model's forward and the forwards that it says it wraps, as functions, up to its class's own."""
    found, method = [], model.forward
    while True:
        found.append(getattr(method, "__func__", method))
        if found[-1] is type(model).forward or not hasattr(found[-1], "__wrapped__"):
            return found
        method = found[-1].__wrapped__


def passed_over(model: Any, head: Any) -> str | None:
    """What of the model's head or loss `patch_causal_lm` would pass over, and what to do; None for nothing."""
    name = type(model).__name__
    if why := adapters.passed_over(head):
        return f"the head of this {name} {why}"
    if "_loss_function" in model.__dict__:
        return f"this {name} was given a loss_function of its own, which the patch would not call: remove it"
    return None


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
