"""`patch_causal_lm`: a Hugging Face causal language model trains without logits.

The patched model's forward with labels, in training, calls the backbone and then `linear_cross_entropy` on its last
hidden states, with the meaning of `transformers`' own loss: labels shifted by one, -100 ignored, the mean over the
labels that count or their sum over `num_items_in_batch`. Any other call goes to the original forward.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.api.linear import linear_cross_entropy

# Heads that are known to be an nn.Linear on the backbone's last hidden states, with behind it what is named here of all
# that a configuration may state. Others are compared with their own forward before they are patched.
_CAPPED = {"logit_softcap"}
_KNOWN: dict[str, set[str]] = {
    "gemma": set(),
    "gemma2": _CAPPED,
    "gemma3_text": _CAPPED,
    "gpt2": set(),
    "llama": set(),
    "mistral": set(),
    "phi": set(),
    "phi3": set(),
    "qwen2": set(),
    "qwen3": set(),
}

_OPTIONS = {"label_smoothing", "z_loss", "backward", "precision", "implementation", "scratch_bytes"}

# Arguments of the model's forward that are for its head and loss, and not for its backbone.
_FOR_THE_HEAD = {
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "ignore_index",
    "logits_to_keep",
    "num_logits_to_keep",
    "return_dict",
}

_IGNORED = -100


@dataclasses.dataclass(frozen=True)
class _Patch:
    original: Callable[..., Any]
    signature: inspect.Signature
    options: dict[str, Any]


def patch_causal_lm(model: Any, **options: Any) -> Any:
    """Makes `model` compute its training loss without logits.

    With labels and in training mode, `model(...)` returns the loss and no logits; without labels, or after
    `model.eval()`, it does what it did before, so that evaluation and `generate` are unchanged. Works under
    `transformers.Trainer`, which passes `num_items_in_batch`. Its option `label_smoothing_factor` makes it ask for
    logits: give `label_smoothing` here instead, which has the same value.

    Args:
        model: a `…ForCausalLM` or `…LMHeadModel` of transformers whose head is an `nn.Linear` after the backbone:
            Llama, Qwen 2 and 3, Gemma 1 to 3 (with their soft cap; Gemma 3 for text only, which is
            Gemma3ForCausalLM), Mistral, Phi, GPT-2 and others. Models that are not known are run on four tokens, to
            compare; so are those whose configuration states a soft cap or scale that they do not use.
        options: `label_smoothing`, `z_loss`, `backward`, `precision`, `implementation`, `scratch_bytes` of
            `linear_cross_entropy`.

    Returns:
        The model itself, patched.

    Raises:
        TypeError: no such model, no such head, or an unknown option.
        ValueError: a model that is patched already, that adds other losses, has forward hooks on its head or a
            loss_function of its own (a call raises it where these come later), whose logits are not what its head
            makes of the backbone's hidden states, or whose own loss of labels is another, as where it does not shift
            them (BART, XLNet).

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from torch_bridge import patch_causal_lm, unpatch_causal_lm
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = patch_causal_lm(LlamaForCausalLM(config).train())
        >>> tokens = torch.randint(0, 99, (2, 7))
        >>> out = model(tokens, labels=tokens)
        >>> out.loss.shape, out.logits is None
        (torch.Size([]), True)
        >>> model = unpatch_causal_lm(model)
    """
    if unknown := sorted(set(options) - _OPTIONS):
        raise TypeError(f"unknown options {unknown}; choose from {sorted(_OPTIONS)}")
    _check_model(model)
    original = type(model).forward
    stated = _logit_transform(model.config)
    known = _KNOWN.get(model.config.model_type) if type(model).__module__.startswith("transformers.") else None
    used = stated if known is None else {name: x for name, x in stated.items() if name in known}
    patch = _Patch(original, inspect.signature(original), options | used)
    if known is None or used != stated:
        _compare(model, patch)

    @functools.wraps(original)  # Trainer reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(patch, self, *args, **kwargs)

    forward.patched = forward  # type: ignore[attr-defined]
    # A bound method, because a deep copy of the model must call itself.
    model.forward = types.MethodType(forward, model)
    return model


def unpatch_causal_lm(model: Any) -> Any:
    """Undoes `patch_causal_lm`; returns the model.

    Raises:
        ValueError: the model is not patched, or its forward was wrapped again since.
    """
    function = getattr(model.__dict__.get("forward"), "__func__", None)
    if function is None or getattr(function, "patched", None) is not function:  # whoever wraps it copies the attribute
        raise ValueError(
            f"this {type(model).__name__} is not patched, or its forward was wrapped after patching: unwrap it first, "
            "for example with accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    del model.forward
    return model


def _check_model(model: Any) -> None:
    name = type(model).__name__
    is_module: bool = isinstance(model, nn.Module)
    if not is_module or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise TypeError(f"model is a {name}; it must be a …ForCausalLM or …LMHeadModel of transformers")
    if "forward" in model.__dict__:
        raise ValueError(f"the forward of this {name} is patched or wrapped already; patch a model before wrapping it")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise TypeError(f"the head of {name} is a {type(head).__name__}; patch_causal_lm needs an nn.Linear")
    if why := _passed_over(model, head):
        raise ValueError(why)
    if _backbone(model) is model:
        raise TypeError(f"{name} has no backbone under base_model_prefix={model.base_model_prefix!r}")
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{name} adds a loss of its routers to that of its labels (output_router_logits=True), which the patch "
            "would leave out"
        )
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise ValueError(f"{name} has loss_type={model.loss_type!r}; the patch computes 'ForCausalLM'")


def _backbone(model: Any) -> Any:
    return getattr(model, model.base_model_prefix, model)


def _logit_transform(config: Any) -> dict[str, Any]:
    """Soft cap and scale that the configuration states, as options of the loss."""
    found: dict[str, Any] = {}
    if getattr(config, "final_logit_softcapping", None) is not None:
        found["logit_softcap"] = float(config.final_logit_softcapping)
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides
        found["logit_scale"] = 1.0 / float(config.logits_scaling)
    elif getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
        found["logit_scale"] = float(config.logit_scale)
    return found


def _compare(model: Any, patch: _Patch) -> None:
    """Raises ValueError unless the head, with the transform found, gives the model's own logits and loss."""
    kind = f"{type(model).__name__} (model_type {model.config.model_type!r})"
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            difference = _difference_of_logits(model, patch) or _difference_of_losses(model, patch)
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


def _difference_of_logits(model: Any, patch: _Patch) -> str | None:
    """How the model's own logits of four tokens differ from those of the patch's loss; None where they do not."""
    head, tokens = model.get_output_embeddings(), _four_tokens(model)
    want = model(input_ids=tokens).logits.float()
    got = nn.functional.linear(_backbone(model)(input_ids=tokens).last_hidden_state, head.weight, head.bias).float()
    got = got * patch.options.get("logit_scale", 1.0)
    if (cap := patch.options.get("logit_softcap")) is not None:
        got = cap * torch.tanh(got / cap)
    difference = float((got - want).abs().max())
    if difference <= 1e-2 * float(want.abs().max()):
        return None
    return (
        f"its logits differ by {difference:.2g} from its head applied to the backbone's last hidden states: it does "
        "something between or after them"
    )


def _difference_of_losses(model: Any, patch: _Patch) -> str | None:
    """How the model's own loss of its logits differs from the one that the patch computes; None where it does not."""
    tokens = _four_tokens(model)
    labels = _telling_labels(model(input_ids=tokens).logits.float())
    for items in (None, 7) if _takes_num_items(model, patch) else (None,):
        further = {} if items is None else {"num_items_in_batch": torch.tensor(items, device=tokens.device)}
        out = model(input_ids=tokens, labels=labels, **further)
        total = nn.functional.cross_entropy(out.logits[0, :-1].float(), labels[0, 1:], reduction="sum")
        got, want = float(total) / (items or 2), float(out.loss)
        tolerance = 1e-4 if out.loss.dtype.itemsize > 2 else 1e-2
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            return (
                f"its own loss of four labels is {want:.4g} with num_items_in_batch={items}, where theirs shifted by "
                f"one, {_IGNORED} ignored, is {got:.4g}: it does not shift them, or computes another loss"
            )
    return None


def _telling_labels(logits: Tensor) -> Tensor:
    """Labels `[1, 4]` of logits `[1, 4, V]`, one ignored: likely after the token before, unlikely after the token.

    So that even an untrained model, to which all tokens are about as likely, has another loss without the shift.
    """
    log_probs = logits.log_softmax(-1)
    before = nn.functional.pad(log_probs, (0, 0, 1, 0))[:, :-1]
    labels = (before - log_probs).argmax(-1)
    labels[:, 2] = _IGNORED
    return labels


def _takes_num_items(model: Any, patch: _Patch) -> bool:
    """Whether `transformers.Trainer` passes `num_items_in_batch` to the model."""
    kinds = [parameter.kind for parameter in patch.signature.parameters.values()]
    return bool(getattr(model, "accepts_loss_kwargs", inspect.Parameter.VAR_KEYWORD in kinds))


def _four_tokens(model: Any) -> Tensor:
    weight = model.get_output_embeddings().weight
    return torch.arange(4, device=weight.device)[None] % weight.shape[0]


def _forward(patch: _Patch, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(patch.signature.bind(model, *args, **kwargs).arguments)
    del given["self"]
    for parameter in patch.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    kept = given.get("logits_to_keep", 0)
    has_labels = given.get("labels") is not None or given.get("shift_labels") is not None
    if not model.training or not has_labels or not (isinstance(kept, int) and kept == 0):
        return patch.original(model, *args, **kwargs)

    from transformers.modeling_outputs import CausalLMOutputWithPast

    for_backbone = {name: value for name, value in given.items() if name not in _FOR_THE_HEAD and value is not None}
    head = model.get_output_embeddings()
    if why := _passed_over(model, head):  # changed since it was patched
        raise ValueError(f"{why}: undo that, or use unpatch_causal_lm(model)")
    out = _backbone(model)(**for_backbone, return_dict=True)
    labels, ignored = given.get("shift_labels"), given.get("ignore_index", _IGNORED)
    if labels is None:
        labels = nn.functional.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
    hidden: Tensor = out.last_hidden_state
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        labels.to(hidden.device),
        linear_bias=head.bias,
        ignore_index=ignored,
        normalizer=given.get("num_items_in_batch"),
        **patch.options,
    )
    # Taken over by name: the cache is `past_key_values` up to transformers 5.23, and `cache` after.
    shared = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)} & out.keys()
    found = CausalLMOutputWithPast(loss=loss, **{name: out[name] for name in shared})
    return found if given.get("return_dict", True) is not False else found.to_tuple()


def _passed_over(model: Any, head: Any) -> str | None:
    """What of the model's head or loss the patch would pass over; None for nothing."""
    name = type(model).__name__
    if type(head) is not nn.Linear:
        return f"the head of this {name} is a {type(head).__name__} now, of which the patch would read `weight` alone"
    if head._forward_hooks or head._forward_pre_hooks:
        return f"the head of this {name} has forward hooks, which the patch would not call"
    if "_loss_function" in model.__dict__:
        return f"this {name} was given a loss_function of its own, which the patch would not call"
    return None
