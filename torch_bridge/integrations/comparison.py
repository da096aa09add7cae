"""Models that are not known by name are run on four tokens, to compare their logits and losses with the patch's."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pallas_ce import LowRank
from torch_bridge.api.modules import scaled_and_capped
from torch_bridge.autograd import partitioned
from torch_bridge.integrations import causal_lm
from torch_bridge.integrations.causal_lm import IGNORED


def compare(model: Any, options: dict[str, Any]) -> None:
    """Raises ValueError unless the head, with the options' soft cap and scale, gives the model's logits and loss."""
    kind = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    if any(map(partitioned.is_partitioned, model.parameters())):
        raise ValueError(
            f"{kind} must be run to see what its head does, but its weights are partitioned by ZeRO-3. "
            "Patch it before DeepSpeed partitions them, which for Trainer means to load it before "
            "TrainingArguments(deepspeed=...), or use LinearCrossEntropyLoss in its forward"
        )
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            weight = causal_lm.head(model).weight
            tokens = torch.arange(4, device=weight.device)[None] % weight.shape[0]
            logits = model(input_ids=tokens).logits.float()
            difference = _of_logits(model, tokens, logits, options) or _of_losses(model, tokens, logits)
            model.training = True  # what it adds to its loss in training; the modules within stay without dropout
            difference = difference or _of_losses(model, tokens, logits)
    except Exception as error:
        raise ValueError(
            f"{kind} is not known, and could not be run to see what its head does: {error}. Patch it after its weights "
            "are loaded, or use LinearCrossEntropyLoss in its forward"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    if difference is not None:
        raise ValueError(f"{kind} is not known, and {difference}. Use LinearCrossEntropyLoss in its forward")


def _of_logits(model: Any, tokens: Tensor, want: Tensor, options: dict[str, Any]) -> str | None:
    """How the model's own logits of the tokens differ from the patch's; None where they do not."""
    hidden = causal_lm.backbone(model)(input_ids=tokens).last_hidden_state
    weight, bias = causal_lm.parameters(causal_lm.head(model))
    if isinstance(weight, LowRank):
        weight = weight.weight + weight.scale * (weight.up @ weight.down).to(weight.weight.dtype)
    got = scaled_and_capped(nn.functional.linear(hidden.to(weight.dtype), weight, bias).float(), options)
    difference = float((got - want).abs().max())
    if difference <= 1e-2 * float(want.abs().max()):
        return None
    return (
        f"its logits differ by {difference:.2g} from its head applied to the backbone's last hidden states: it does "
        "something between or after them"
    )


def _of_losses(model: Any, tokens: Tensor, logits: Tensor) -> str | None:
    """How the model's own loss of its logits differs from the patch's; None where it does not."""
    # Likely after the token before and unlikely after the token, and one ignored. So that even an untrained model, to
    # which all tokens are about as likely, has another loss without the shift.
    log_probs = logits.log_softmax(-1)
    before = nn.functional.pad(log_probs, (0, 0, 1, 0))[:, :-1]
    labels = (before - log_probs).argmax(-1)
    labels[:, 2] = IGNORED
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    # As `transformers.Trainer` decides.
    takes_items = getattr(model, "accepts_loss_kwargs", inspect.Parameter.VAR_KEYWORD in kinds)
    for items in (None, 7) if takes_items else (None,):
        further = {} if items is None else {"num_items_in_batch": torch.tensor(items, device=tokens.device)}
        out = model(input_ids=tokens, labels=labels, **further)
        total = nn.functional.cross_entropy(out.logits[0, :-1].float(), labels[0, 1:], reduction="sum")
        got, want = float(total) / (items or 2), float(out.loss)
        asked = causal_lm.with_routers(model, None)
        if asked and (routers := causal_lm.router_loss(model, out.get("router_logits"), None)):
            got += float(routers[0]) * routers[1]
        tolerance = 1e-4 if out.loss.dtype.itemsize > 2 else 1e-2
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            return (
                f"its own loss of four labels is {want:.4g} with num_items_in_batch={items}, where theirs shifted by "
                f"one, {IGNORED} ignored, is {got:.4g}: it does not shift them, or computes another loss"
            )
    return None
