"""`patch_causal_lm`: a Hugging Face causal language model trains without logits, by transformers' Trainer and by TRL.

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

from torch import Tensor, nn

from torch_bridge.api.linear import linear_cross_entropy
from torch_bridge.integrations import adapters, causal_lm, comparison, trl

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

# What makes the loss of training another than the model's own, which is that of evaluation.
_IN_TRAINING = {"label_smoothing", "z_loss"}
_OF_A_LOSS = _IN_TRAINING | {"validate_labels"}
_OF_A_HEAD = {"precision", "implementation", "scratch_bytes"}
_OPTIONS = _OF_A_LOSS | _OF_A_HEAD | {"backward"}

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

_BY_HAND = "use LinearCrossEntropyLoss in its forward"


@dataclasses.dataclass(frozen=True)
class _Patch:
    original: Callable[..., Any]
    signature: inspect.Signature
    options: dict[str, Any]
    skip_logits: bool


def patch_causal_lm(model: Any, *, skip_logits: bool = False, **options: Any) -> Any:
    """Makes `model` compute its training loss without logits.

    With labels and in training mode, `model(...)` returns the loss and no logits; without labels, or after
    `model.eval()`, it does what it did before, so that evaluation and `generate` are unchanged. Works under
    `transformers.Trainer`, which passes `num_items_in_batch`. Its option `label_smoothing_factor` makes it ask for
    logits: give `label_smoothing` here instead, which has the same value.

    A call with labels takes two more arguments, in evaluation too. `skip_logits` says whether it goes without logits.
    `reduction`, "mean", "sum" or "none", implies that; with "none" the loss is `[..., T]`, at t of the label at t + 1
    and 0 at the end, and `loss.sum(-1) / count` is the logarithm of a text's perplexity. Losses of a mixture's routers
    are added to the mean only, and returned as `aux_loss`.

    TRL's trainers put a head of their own in the place of a model's forward. Where TRL is installed, all such heads in
    the process, those of reference models included, are computed by `linear_row_statistics` once a model is patched,
    with the `precision`, `implementation` and `scratch_bytes` of the latest.

    Args:
        model: a `…ForCausalLM` or `…LMHeadModel` of transformers whose head is an `nn.Linear` after the backbone:
            Llama, Qwen 2 and 3, Gemma 1 to 3 (with their soft cap; Gemma 3 for text only, which is
            Gemma3ForCausalLM), Mistral, Phi, GPT-2 and others. Models that are not known are run on four tokens, to
            compare; so are those whose configuration states a soft cap or scale that they do not use. Or a `PeftModel`
            of one; a model may be given adapters after it is patched, too. The head itself may be in `modules_to_save`,
            or have one active LoRA, which then is trained without an array of the weight's size.
        skip_logits: with labels, compute no logits in evaluation either: for `Trainer` without `compute_metrics`. That
            loss is the model's own, without `label_smoothing` and `z_loss`.
        options: `label_smoothing`, `z_loss`, `backward`, `precision`, `implementation`, `scratch_bytes`,
            `validate_labels` of `linear_cross_entropy`.

    Returns:
        The model itself, patched.

    Raises:
        TypeError: no such model, or an unknown option.
        ValueError: a model that is patched already, whose head is no `nn.Linear`, has forward hooks, several active
            adapters, or one that is no plain LoRA (DoRA and other variants, dropout in training, a quantised layer), or
            with a loss_function of its own (a call raises it where these come later), whose logits are not what its
            head makes of the backbone's hidden states, or whose own loss of labels is another, as where it does not
            shift them (BART, XLNet).

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
        >>> model.eval()(tokens, labels=tokens, reduction="none").loss.shape
        torch.Size([2, 7])
        >>> model = unpatch_causal_lm(model)
    """
    if unknown := sorted(set(options) - _OPTIONS):
        raise TypeError(
            f"unknown options {unknown}; choose from skip_logits, {', '.join(sorted(_OPTIONS))}. A reduction is an "
            "argument of the patched model's calls"
        )
    inner = causal_lm.base(model)
    _check_model(inner)
    original = type(inner).forward
    stated = causal_lm.logit_transform(inner.config)
    known = _KNOWN.get(inner.config.model_type) if type(inner).__module__.startswith("transformers.") else None
    used = stated if known is None else {name: x for name, x in stated.items() if name in known}
    patch = _Patch(original, inspect.signature(original), options | used, skip_logits)
    if known is None or used != stated:
        comparison.compare(inner, patch.signature, patch.options)

    @functools.wraps(original)  # Trainer reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(patch, self, *args, **kwargs)

    forward.patched = forward  # type: ignore[attr-defined]
    # A bound method, because a deep copy of the model must call itself.
    inner.forward = types.MethodType(forward, inner)
    of_a_head = {name: x for name, x in options.items() if name in _OF_A_HEAD}
    trl.serve(inner, of_a_head, [name for name, x in options.items() if name in _OF_A_LOSS and x])
    return model


def unpatch_causal_lm(model: Any) -> Any:
    """Undoes `patch_causal_lm`; returns the model. The last one gives TRL's heads back, too.

    Raises:
        ValueError: the model is not patched, or its forward was wrapped again since.
    """
    inner = causal_lm.base(model)
    function = getattr(inner.__dict__.get("forward"), "__func__", None)
    if function is None or getattr(function, "patched", None) is not function:  # whoever wraps it copies the attribute
        raise ValueError(
            f"this {type(inner).__name__} is not patched, or its forward was wrapped after patching: unwrap it first, "
            "for example with accelerator.unwrap_model(model, keep_fp32_wrapper=False). What a trainer of TRL put in "
            "its place stays"
        )
    del inner.forward
    trl.release(inner)
    return model


def _check_model(model: Any) -> None:
    name = type(model).__name__
    is_module: bool = isinstance(model, nn.Module)
    if not is_module or not name.endswith(("ForCausalLM", "LMHeadModel")):
        inside = ", like the `module` that it wraps" if hasattr(model, "module") else ""
        raise TypeError(f"model is a {name}; it must be a …ForCausalLM or …LMHeadModel of transformers{inside}")
    if "forward" in model.__dict__:
        raise ValueError(f"the forward of this {name} is patched or wrapped already; patch a model before wrapping it")
    if why := causal_lm.passed_over(model, causal_lm.head(model)):
        raise ValueError(why)
    if causal_lm.backbone(model) is model:
        raise TypeError(f"{name} has no backbone under base_model_prefix={model.base_model_prefix!r}; {_BY_HAND}")
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise ValueError(f"{name} has loss_type={model.loss_type!r}; the patch computes 'ForCausalLM'; {_BY_HAND}")


def _forward(
    patch: _Patch, model: Any, *args: Any, skip_logits: bool | None = None, reduction: Any = None, **kwargs: Any
) -> Any:
    given = dict(patch.signature.bind(model, *args, **kwargs).arguments)
    del given["self"]
    for parameter in patch.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    kept = given.get("logits_to_keep", 0)
    has_labels = given.get("labels") is not None or given.get("shift_labels") is not None
    if skip_logits is None:
        skip_logits = model.training or patch.skip_logits or reduction is not None
    if not skip_logits or not has_labels or not (isinstance(kept, int) and kept == 0):
        if reduction is not None:
            raise ValueError(
                f"reduction={reduction!r} is that of a loss without logits: pass labels, and neither logits_to_keep "
                "nor skip_logits=False"
            )
        return patch.original(model, *args, **kwargs)

    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    for_backbone = {name: value for name, value in given.items() if name not in _FOR_THE_HEAD and value is not None}
    if with_routers := causal_lm.with_routers(model, given.get("output_router_logits")):
        for_backbone["output_router_logits"] = True
    head = causal_lm.head(model)
    if why := causal_lm.passed_over(model, head):  # changed since it was patched
        raise ValueError(f"{why}, or use unpatch_causal_lm(model)")
    out = causal_lm.backbone(model)(**for_backbone, return_dict=True)
    shifted = given.get("shift_labels")
    labels, shift = (given["labels"], 1) if shifted is None else (shifted, 0)
    options = {name: x for name, x in patch.options.items() if model.training or name not in _IN_TRAINING}

    def loss_of(hidden: Tensor) -> Tensor:
        weight, bias = adapters.parameters(head)
        device = head.weight.device
        return linear_cross_entropy(
            hidden.to(device),  # elsewhere where the model is split over devices
            weight,
            labels.to(device),
            linear_bias=bias,
            shift=shift,
            ignore_index=given.get("ignore_index", causal_lm.IGNORED),
            reduction=reduction or "mean",
            normalizer=given.get("num_items_in_batch"),
            **options,
        )

    loss = causal_lm.in_place_of_logits(model, loss_of, out.last_hidden_state)
    further: dict[str, Any] = {}
    kind: Any = CausalLMOutputWithPast
    if with_routers:
        kind = MoeCausalLMOutputWithPast
        if routers := causal_lm.router_loss(model, out.get("router_logits"), given.get("attention_mask")):
            further["aux_loss"] = routers[0].to(loss.device)
            loss = loss + routers[1] * further["aux_loss"] if reduction in (None, "mean") else loss
    # Taken over by name: the cache is `past_key_values` up to transformers 5.23, and `cache` after.
    shared = {field.name for field in dataclasses.fields(kind)} & out.keys()
    found = kind(loss=loss, **further, **{name: out[name] for name in shared})
    return found if given.get("return_dict", True) is not False else found.to_tuple()
