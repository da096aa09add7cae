"""`patch_causal_lm`: a Hugging Face causal language model trains without logits, by transformers' Trainer and by TRL.

The patched model's forward with labels, in training, calls the backbone and then `linear_cross_entropy`, with the
meaning of `transformers`' own loss. Any other call goes to the original forward.
"""

from typing import Any

from torch import nn

from torch_bridge.api import checks
from torch_bridge.integrations import causal_lm, comparison, patched, trl
from torch_bridge.integrations.patched import OF_A_HEAD, OF_A_LOSS

# Classes of transformers whose head is known to be an nn.Linear on the backbone's last hidden states, each with the
# options that its forward reads of its configuration. Others are compared with their own forward before they are
# patched, for which their weights must be loaded.
_PLAIN = ("Gemma", "Llama", "Mistral", "Phi", "Phi3", "Qwen2", "Qwen3")
_KNOWN: dict[str, set[str]] = {"GPT2LMHeadModel": set(), "Gemma3ForConditionalGeneration": set()}
_KNOWN |= {f"{name}ForCausalLM": set() for name in _PLAIN}
_KNOWN |= {f"{name}ForCausalLM": {"logit_softcap"} for name in ("Gemma2", "Gemma3")}
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")

_OPTIONS = OF_A_LOSS | OF_A_HEAD | {"backward"}

_BY_HAND = "use LinearCrossEntropyLoss in its forward"


def patch_causal_lm(model: Any, *, skip_logits: bool = False, **options: Any) -> Any:
    """Makes `model` compute its training loss without logits.

    With labels and in training mode, `model(...)` returns the loss and no logits; without labels, or after
    `model.eval()`, it does what it did before, so that evaluation and `generate` are unchanged. Works under
    `transformers.Trainer`, which passes `num_items_in_batch`. Its option `label_smoothing_factor` makes it ask for
    logits: give `label_smoothing` here instead, which has the same value.

    Where no label counts the loss is 0, and not NaN.

    A call with labels takes two more arguments, in evaluation too. `skip_logits` says whether it goes without logits.
    `reduction`, "mean", "sum" or "none", implies that; with "none" the loss is `[..., T]`, at t of the label at t + 1
    and 0 at the end, and `loss.sum(-1) / count` is the logarithm of a text's perplexity. Losses of a mixture's routers
    are added to the mean only, and returned as `aux_loss`.

    TRL's trainers replace a model's forward by a head of their own. Once a model is patched, `linear_row_statistics`
    computes every such head in the process, of reference models too, with the `precision`, `implementation` and
    `scratch_bytes` of the model patched last. `linear_distillation` has the same, but chooses in place of "mosaic_gpu".

    Args:
        model: a `…ForCausalLM`, `…LMHeadModel` or `…ForConditionalGeneration` of transformers, or of a subclass, whose
            head is an `nn.Linear` after the backbone: Llama, Qwen 2 and 3, Gemma 1 to 3 (with their soft cap), Mistral,
            Phi, GPT-2 and others; of several modalities Gemma 3, LLaVA, Qwen2.5-VL and others. Models that are not
            known are run on four tokens, to compare, before ZeRO-3 partitions them; so are those whose configuration
            states a soft cap or scale that they do not use. Or a `PeftModel` of one; a model may be given adapters
            after it is patched, too. The head itself may be in `modules_to_save`, or have one active LoRA, which then
            is trained without an array of the weight's size.
        skip_logits: with labels, compute no logits in evaluation either: for `Trainer` without `compute_metrics`. That
            loss is the model's own, without `label_smoothing` and `z_loss`.
        options: `label_smoothing`, `z_loss`, `backward`, `precision`, `implementation`, `scratch_bytes`,
            `validate_labels` of `linear_cross_entropy`. A label outside the vocabulary is an error, on a GPU one of the
            device's own, as in the model's own loss. With `validate_labels=True` the host waits for the labels, and the
            error names the first; with False such labels are ignored.

    Returns:
        The model itself, patched.

    Raises:
        TypeError: no such model, one with an encoder and a decoder, or an unknown option.
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
    if "reduction" in options:
        raise TypeError(f"reduction={options['reduction']!r} is an argument of the patched model's calls")
    checks.refuse_unknown(options, _OPTIONS, ["skip_logits"])
    if not isinstance(skip_logits, bool):
        raise TypeError(f"{skip_logits=} must be True or False")
    checks.kept(options)
    inner = causal_lm.base(model)
    _check_model(inner)
    stated = causal_lm.logit_transform(inner)
    of_transformers = type(inner).__module__.startswith("transformers.")
    read = _KNOWN.get(type(inner).__name__) if of_transformers else None
    used = stated if read is None else {name: x for name, x in stated.items() if name in read}
    if read is None or used != stated:
        comparison.compare(inner, options | used)
    patched.put(inner, patched.Patch(options | used, skip_logits))
    return model


def unpatch_causal_lm(model: Any) -> Any:
    """Undoes `patch_causal_lm`; returns the model. The last one gives TRL's heads back, too.

    Args:
        model: what `patch_causal_lm` was given, or a `PeftModel` around it.

    Raises:
        ValueError: the model is not patched, or its forward was wrapped or replaced since.
    """
    inner = causal_lm.base(model)
    if patched.of(inner) is None:
        raise ValueError(f"this {type(inner).__name__} is not patched")
    if causal_lm.forwards(inner)[0] is not type(inner).forward:
        raise ValueError(
            f"the forward of this {type(inner).__name__} was wrapped after patching: unwrap it first, for example with "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False). What a trainer of TRL put in its place stays"
        )
    patched.take_away(inner)
    trl.release(inner)
    return model


def _check_model(model: Any) -> None:
    name, kinds = type(model).__name__, type(model).__mro__
    if nn.Module not in kinds or not any(kind.__name__.endswith(_ENDINGS) for kind in kinds):
        wrapped = next((x for x in ("module", "_orig_mod") if hasattr(model, x)), None)
        inside = f", like the `{wrapped}` that it wraps: patch that before it is wrapped" if wrapped else ""
        raise TypeError(f"model is a {name}; it must be one of transformers' …{', …'.join(_ENDINGS)}{inside}")
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} has an encoder and a decoder, and the patch serves models of one stack; {_BY_HAND}")
    if patched.of(model) is not None:
        raise ValueError(f"this {name} is patched already: to change its options, unpatch_causal_lm(model) first")
    if causal_lm.forwards(model)[0] is not type(model).forward:
        raise ValueError(f"the forward of this {name} is wrapped already; patch a model before wrapping it")
    if why := causal_lm.passed_over(model, causal_lm.head(model)):
        raise ValueError(why)
    backbone, of_text = causal_lm.backbone(model), model.config.get_text_config()
    if backbone is model:
        raise TypeError(f"{name} has no backbone under base_model_prefix={model.base_model_prefix!r}; {_BY_HAND}")
    if of_text is not model.config and isinstance(getattr(backbone, "config", None), type(of_text)):
        raise TypeError(f"the backbone of {name} is its {type(backbone).__name__}, which sees text alone; {_BY_HAND}")
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM", "ForConditionalGeneration"):
        raise ValueError(f"{name} has loss_type={model.loss_type!r}; the patch computes 'ForCausalLM'; {_BY_HAND}")
