"""Adapters of PEFT around a patched model, and a patch inside a `PeftModel`: the same steps without logits."""

import pytest
import torch
import transformers as hf

from tests.torch_bridge.products import Products
from torch_bridge import patch_causal_lm, unpatch_causal_lm

peft = pytest.importorskip("peft")

VOCABULARY = 99
ELSEWHERE = {"target_modules": ["q_proj", "v_proj"]}

pytestmark = [
    # PEFT reads a name that transformers is giving up.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def make(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | options))


def adapted(model, **options):
    torch.manual_seed(1)
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    return found.train()


def batch():
    torch.manual_seed(2)
    tokens = torch.randint(3, VOCABULARY, (3, 9))
    return {"input_ids": tokens, "labels": tokens.where(tokens % 5 > 0, -100)}


def step(model):
    model.zero_grad()
    out = model(**batch())
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def patched_before(options, **config):
    return adapted(patch_causal_lm(make(**config)), **options)


def patched_after(options, **config):
    return patch_causal_lm(adapted(make(**config), **options))


@pytest.mark.parametrize("patched", [patched_before, patched_after])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("whole", [[], ["lm_head"]])
def test_a_step_with_adapters_is_the_same_whichever_comes_first(patched, tied, whole):
    options = ELSEWHERE | ({"modules_to_save": whole, "ensure_weight_tying": tied} if whole else {})
    want, want_gradients = step(adapted(make(tie_word_embeddings=tied), **options))
    model = patched(options, tie_word_embeddings=tied)
    with Products(VOCABULARY) as products:
        got, gradients = step(model)
    assert isinstance(model, peft.PeftModel)
    assert got.logits is None
    assert (products.bridged, products.wide) == (["linear_cross_entropy", "linear_cross_entropy_backward"], [])
    torch.testing.assert_close(got.loss, want.loss)
    assert gradients.keys() == want_gradients.keys()
    assert any("lm_head" in name or "embed" in name for name in gradients) is bool(whole)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_head_that_is_saved_counts_where_its_adapter_is_active():
    model = patched_after(ELSEWHERE | {"modules_to_save": ["lm_head"]})
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.zero_()
    got = model(**batch()).loss
    torch.testing.assert_close(got, torch.tensor(float(VOCABULARY)).log())
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch()).loss, make().train()(**batch()).loss)


@pytest.mark.parametrize("patched", [patched_before, patched_after])
def test_an_adapter_of_the_head_is_refused_with_what_to_do(patched):
    with pytest.raises(ValueError, match=r"has an adapter \(Linear\).* target_modules.* modules_to_save=\['lm_head'\]"):
        patched({"target_modules": ["q_proj", "lm_head"]})(**batch())


def quantised(tmp_path, prepared):
    """A model on four bits with adapters on all layers and its head as it was, or as PEFT prepares it: in float32."""
    make(hidden_size=64).save_pretrained(tmp_path)
    four_bits = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = hf.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits, dtype=torch.bfloat16)
    if prepared:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return adapted(model, target_modules="all-linear")


@pytest.mark.filterwarnings("ignore")  # bitsandbytes'
@pytest.mark.parametrize("prepared", [False, True])
def test_a_quantised_base_trains_its_adapters_without_logits(tmp_path, prepared):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = quantised(tmp_path, prepared)
    assert isinstance(model.get_base_model().model.layers[0].mlp.up_proj.base_layer, bitsandbytes.nn.Linear4bit)
    assert model.get_base_model().lm_head.weight.dtype == (torch.float32 if prepared else torch.bfloat16)
    want, want_gradients = step(model)
    with Products(VOCABULARY) as products:
        got, gradients = step(patch_causal_lm(model))
    assert (products.bridged, products.wide) == (["linear_cross_entropy", "linear_cross_entropy_backward"], [])
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-2, atol=0)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        # Hidden states and what goes back into the layers are bfloat16, whatever the head.
        assert (gradients[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_head_is_refused_with_what_to_do():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make()
    model.lm_head = bitsandbytes.nn.Linear4bit(16, VOCABULARY, bias=False)
    with pytest.raises(ValueError, match=r"is a Linear4bit.* llm_int8_skip_modules=\['lm_head'\]"):
        patch_causal_lm(model)


def test_prompts_that_are_learned_have_no_labels():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    losses = []
    for patch in (lambda model: model, patch_causal_lm):
        torch.manual_seed(3)
        losses.append(patch(peft.get_peft_model(make(), config).train())(**batch()).loss)
    torch.testing.assert_close(*losses)


def test_a_peft_model_is_unpatched_and_patched_once():
    model = patched_before(ELSEWHERE)
    with pytest.raises(ValueError, match="patched or wrapped already"):
        patch_causal_lm(model)
    assert unpatch_causal_lm(model)(**batch()).logits is not None
