"""Adapters of PEFT around a patched model, and a patch inside a `PeftModel`: the same steps without logits."""

import pytest
import torch
import transformers as hf

from tests.torch_bridge.models import VOCABULARY, batch, check_step, make, step
from torch_bridge import patch_causal_lm, unpatch_causal_lm

peft = pytest.importorskip("peft")

ELSEWHERE = {"target_modules": ["q_proj", "v_proj"]}
ON_HEAD = {"target_modules": ["q_proj", "lm_head"]}

pytestmark = [
    # PEFT reads a name that transformers is giving up, and warns of options that these tests ask for.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True.*", "ignore:.*tie_word_embeddings=True.*"),
]


def adapted(model, **options):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config).train()


def patched_before(options, **config):
    return adapted(patch_causal_lm(make(**config)), **options)


def patched_after(options, **config):
    return patch_causal_lm(adapted(make(**config), **options))


# Options of the adapter, and how many gradients name the head.
ADAPTED = {
    "elsewhere": (ELSEWHERE, 0),
    "saved head": (ELSEWHERE | {"modules_to_save": ["lm_head"]}, 1),
    "on the head": (ON_HEAD, 2),
    "rank-stabilised": (ON_HEAD | {"lora_alpha": 3, "use_rslora": True}, 2),
    "with a bias": (ON_HEAD | {"lora_bias": True}, 3),
}


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("patched", [patched_before, patched_after])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_as_by_peft_without_logits_whichever_comes_first(patched, tied, name):
    options, of_head = ADAPTED[name]
    options = options | {"ensure_weight_tying": tied} if "modules_to_save" in options else options
    models = adapted(make(tie_word_embeddings=tied), **options), patched(options, tie_word_embeddings=tied)
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in models]
    assert isinstance(models[1], peft.PeftModel)
    before = {}
    for _ in range(2):
        want = step(models[0])
        gradients = check_step(models[1], want, watched=True, gradients=1e-4)
        assert sum("lm_head" in x or "embed" in x for x in gradients) == of_head
        assert not any(torch.equal(x, before[key]) for key, x in gradients.items() if key in before)
        before = gradients
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("saved", [False, True])
def test_a_head_that_is_saved_or_its_adapter_counts_where_it_is_active(saved):
    options = ELSEWHERE | {"modules_to_save": ["lm_head"]} if saved else ON_HEAD
    model, plain = patched_after(options), make()(**batch()).loss
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch()).loss, plain)
    loss = model(**batch()).loss
    if saved:
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.zero_()
        torch.testing.assert_close(model(**batch()).loss, torch.tensor(float(VOCABULARY)).log())
    else:
        assert abs(loss - plain) > 1e-3
        model.merge_adapter()
        torch.testing.assert_close(model(**batch()).loss, loss)
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch()).loss, plain)


def test_a_model_that_is_not_known_is_compared_with_its_adapter():
    class OwnForCausalLM(hf.LlamaForCausalLM):
        pass

    model = make()
    model.__class__ = OwnForCausalLM
    OwnForCausalLM.__module__ = "elsewhere"
    model = patch_causal_lm(adapted(model, **ON_HEAD))
    torch.testing.assert_close(model(**batch()).loss, adapted(make(), **ON_HEAD)(**batch()).loss)


def several(model):
    model = adapted(model, **ON_HEAD)
    model.add_adapter("other", peft.LoraConfig(r=2, task_type="CAUSAL_LM", **ON_HEAD))
    model.base_model.set_adapter(["default", "other"])
    return model


def changed(change):
    """A model whose adapted head a function changes."""

    def give(model):
        model = adapted(model, **ON_HEAD)
        change(model.get_base_model().lm_head)
        return model

    return give


def renamed(layer, module):
    """As a layer of four bits is called by bitsandbytes, or by PEFT."""
    layer.__class__ = type("Linear4bit", (type(layer),), {"__module__": module})


def of_another_kind(model):
    return peft.get_peft_model(model, peft.LoHaConfig(r=2, target_modules=["lm_head"])).train()


def hooked(head):
    head.lora_A["default"].register_forward_hook(lambda *given: None)


# What gives a model such a head, and essential words of the error.
REFUSED = {
    "dropout": (lambda model: adapted(model, lora_dropout=0.25, **ON_HEAD), "set lora_dropout=0.0, or leave lm_head"),
    "DoRA": (lambda model: adapted(model, use_dora=True, **ON_HEAD), "set use_dora=False, or leave lm_head out"),
    "variant": (lambda model: adapted(model, alora_invocation_tokens=[1], **ON_HEAD), "variant ALoraLinearVariant"),
    "several": (several, r"\['default', 'other'\], .* set_adapter, .* add_weighted_adapter"),
    "four bits": (
        changed(lambda head: renamed(head.base_layer, "bitsandbytes")),
        r"is a Linear4bit, .*llm_int8_skip_modules=\['lm_head'\]",
    ),
    "quantised": (
        changed(lambda head: renamed(head, "peft.tuners.lora.bnb")),
        r"\(Linear4bit\) of a layer that is quantised.* llm_int8_skip_modules",
    ),
    "hooks": (changed(hooked), r"has forward hooks, .* remove them"),
    "another kind": (of_another_kind, r"no LoRA \(peft.tuners.loha.*: take a LoraConfig for lm_head, or leave"),
}


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("case", REFUSED)
def test_other_adapters_of_the_head_are_refused_with_what_to_do(case, first):
    give, words = REFUSED[case]
    model = give(patch_causal_lm(make())) if first == "patch" else give(make())
    with pytest.raises(ValueError, match=f"the head of this LlamaForCausalLM .*{words}"):
        model(**batch()) if first == "patch" else patch_causal_lm(model)


def test_in_evaluation_the_loss_with_an_adapter_is_the_models_with_or_without_logits_and_dropout_is_nothing():
    model = patch_causal_lm(adapted(make(), lora_dropout=0.25, **ON_HEAD).eval())
    want = model(**batch())
    assert want.logits is not None
    torch.testing.assert_close(model(**batch(), skip_logits=True).loss, want.loss)
    with pytest.raises(ValueError, match=r"lora_dropout=0.25"):
        model.train()(**batch())


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
    # Hidden states and what goes back into the layers are bfloat16, whatever the head.
    want = step(model)
    check_step(patch_causal_lm(model), want, watched=True, loss=1e-2, gradients=2e-2)


def test_prompts_that_are_learned_have_no_labels():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    losses = []
    for patch in (lambda model: model, patch_causal_lm):
        torch.manual_seed(3)
        losses.append(patch(peft.get_peft_model(make(), config).train())(**batch()).loss)
    torch.testing.assert_close(*losses)


def test_a_peft_model_is_unpatched_and_patched_once():
    model = patched_before(ELSEWHERE)
    with pytest.raises(ValueError, match="is patched already"):
        patch_causal_lm(model)
    assert unpatch_causal_lm(model)(**batch()).logits is not None


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_head_is_refused_with_what_to_do():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make()
    model.lm_head = bitsandbytes.nn.Linear4bit(16, VOCABULARY, bias=False)
    with pytest.raises(ValueError, match=r"is a Linear4bit.* llm_int8_skip_modules=\['lm_head'\]"):
        patch_causal_lm(model)
