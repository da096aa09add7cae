"""What `patch_causal_lm` refuses, before patching and after, with the reason."""

import pytest
import torch
import transformers as hf

from tests.torch_bridge.models import SIZES, VOCABULARY, batch, make
from torch_bridge import patch_causal_lm, unpatch_causal_lm

pytestmark = [
    # transformers says that GPT-2 names no loss; its default is the one meant.
    pytest.mark.filterwarnings("ignore:.*loss_type.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Adapted(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "lm_head", Adapted(32, VOCABULARY)), "the head of this .* is a Adapted"),
        (lambda model: model.lm_head.register_forward_hook(print), "the head of this .* has forward hooks"),
        (lambda model: setattr(model.lm_head, "forward", print), "the head of this .* was given a forward of its own"),
        (lambda model: setattr(model, "loss_function", print), "was given a loss_function of its own"),
    ],
)
def test_what_changes_the_logits_or_the_loss_is_refused_before_patching_and_after(change, message):
    model = patch_causal_lm(make())
    change(model)
    with pytest.raises(ValueError, match=f"{message}.*unpatch_causal_lm"):
        model(**batch())
    with pytest.raises((TypeError, ValueError), match=r"the head of|loss_function of its own"):
        patch_causal_lm(unpatch_causal_lm(model))


def doing(forward):
    """A Llama of a user's own class, in training, whose forward does something else."""
    kind = type("OwnForCausalLM", (hf.LlamaForCausalLM,), {"forward": forward})
    return kind(hf.LlamaConfig(**SIZES)).train()


def scales(self, *args, **kwargs):
    """Does something to its logits that no configuration states."""
    out = hf.LlamaForCausalLM.forward(self, *args, **kwargs)
    out.logits = out.logits * 1.5
    return out


def takes_the_mean(self, *args, num_items_in_batch=None, **kwargs):
    """Whatever `num_items_in_batch` says."""
    return hf.LlamaForCausalLM.forward(self, *args, **kwargs)


def adds_in_training(self, input_ids=None, labels=None, **kwargs):
    """To its loss, in training alone."""
    out = hf.LlamaForCausalLM.forward(self, input_ids=input_ids, labels=labels, **kwargs)
    if self.training and labels is not None:
        out.loss = out.loss + 1
    return out


def takes_prompts(self, input_ids=None, labels=None, prompt=None, output_attentions=None, **kwargs):
    return hf.LlamaForCausalLM.forward(self, input_ids=input_ids, labels=labels, **kwargs)


def with_other_head():
    model = make()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return model


def without_shift():
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in [("layers", 1), ("ffn_dim", 32)]}
    config = hf.BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_attention_heads=2, decoder_attention_heads=2,
                           is_decoder=True, max_position_embeddings=64, **sizes)  # fmt: skip
    return hf.BartForCausalLM(config)


def encoder_and_decoder():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


def of_text_alone():
    vision = hf.CLIPVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16)
    model = hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=hf.LlamaConfig(**SIZES), vision_config=vision))
    model.model = model.model.language_model
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward": "fwd"}, "backward='fwd' is unknown"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 must be between 0 and 1"),
        ({"skip_logits": "no"}, "skip_logits='no' must be True or False"),
        ({"reduction": "sum"}, "reduction"),
    ],
)
def test_options_that_no_call_could_take_are_refused_at_once(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        patch_causal_lm(model := make(), **options)
    assert model(**batch()).logits is not None


def test_an_argument_that_the_backbone_does_not_take_is_refused():
    model = patch_causal_lm(doing(takes_prompts))
    assert model(**batch(), prompt=None, output_attentions=False).logits is None
    with pytest.raises(ValueError, match="prompt is an argument of OwnForCausalLM's own forward"):
        model(**batch(), prompt=torch.ones(2))


def on_meta():
    with torch.device("meta"):
        return make("olmo2")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "model is a Linear"),
        (lambda: hf.LlamaModel(hf.LlamaConfig(**SIZES)), "model is a LlamaModel"),
        (lambda: doing(scales), "logits differ"),
        (lambda: doing(adds_in_training), "its own loss of four labels is"),
        (lambda: torch.nn.DataParallel(make()), "like the `module` that it wraps"),
        (lambda: torch.compile(make(), backend="eager"), "like the `_orig_mod` that it wraps"),
        (encoder_and_decoder, "T5ForConditionalGeneration has an encoder and a decoder"),
        (of_text_alone, "backbone of LlavaForConditionalGeneration is its LlamaModel, which sees text alone"),
        (with_other_head, "Sequential"),
        (without_shift, "own loss of four labels"),
        (lambda: doing(takes_the_mean), "own loss of four labels .* num_items_in_batch=7"),
        (on_meta, "after its weights are loaded"),
    ],
)
def test_models_that_cannot_be_patched_are_refused_with_the_reason(model, message):
    with pytest.raises((TypeError, ValueError), match=message):
        patch_causal_lm(model())


@pytest.mark.parametrize("training", [True, False])
def test_labels_outside_the_vocabulary_are_named_where_they_are_validated(training):
    model, given = patch_causal_lm(make(), skip_logits=True, validate_labels=True).train(training), batch()
    assert model(**given).loss > 0
    given["labels"][1, 5] = VOCABULARY
    with pytest.raises(ValueError, match=r"target\[1, 5\]=99 is neither"):
        model(**given)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_labels_outside_the_vocabulary_are_errors_as_in_the_models_own_loss_unless_they_are_to_be_ignored(wrong):
    own, given = make(), batch()
    given["labels"][:, 0] = wrong  # predicted by no token
    want = own(**given).loss
    torch.testing.assert_close(patch_causal_lm(make())(**given).loss, want)
    given["labels"][1, 5] = wrong
    with pytest.raises(IndexError):
        own(**given)
    with pytest.raises(RuntimeError, match="outside the vocabulary and is not ignore_index=-100"):
        patch_causal_lm(make())(**given)
    ignoring = patch_causal_lm(make(), validate_labels=False)(**given).loss
    given["labels"][1, 5] = -100
    torch.testing.assert_close(ignoring, own(**given).loss)
