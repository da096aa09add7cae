"""Patched Hugging Face models: the same losses and gradients without logits. All are tiny and randomly initialised."""

from unittest import mock

import pytest
import torch
import transformers as hf
from transformers.trainer_pt_utils import LabelSmoother

from tests.torch_bridge.models import MODELS, ROUTED, SIZES, VOCABULARY, batch, check_step, make, relative, step
from tests.torch_bridge.problems import Products
from torch_bridge import patch_causal_lm
from torch_bridge.integrations import patched

pytestmark = [
    # transformers says that GPT-2 names no loss; its default is the one meant.
    pytest.mark.filterwarnings("ignore:.*loss_type.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


IMAGE = 98  # the token in whose place an image's hidden states come
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"image_size": 16, "patch_size": 8}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
SEVERAL_MODALITIES = {
    "gemma3": lambda: hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(
        text_config=SIZES | {"head_dim": 8, "final_logit_softcapping": 2.0}, vision_config=_VISION | _PATCHES,
        mm_tokens_per_image=4, image_token_id=IMAGE,
    )),
    "llava": lambda: hf.LlavaForConditionalGeneration(hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SIZES), vision_config=hf.CLIPVisionConfig(**_VISION, **_PATCHES),
        image_token_id=IMAGE,
    )),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(
        text_config=SIZES | _SECTIONS, image_token_id=IMAGE,
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16},
    )),
}  # fmt: skip


def with_image(name):
    """Inputs of one text with an image of four tokens, and one without."""
    tokens = batch()["input_ids"][:2]
    tokens[0, 1:5] = IMAGE
    given = {"input_ids": tokens, "labels": tokens.where(tokens != IMAGE, -100), "attention_mask": tokens > 0}
    of_image = {"mm_token_type_ids" if "qwen" in name else "token_type_ids": (tokens == IMAGE).long()}
    if "qwen" in name:
        return given | of_image | {"pixel_values": torch.randn(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return given | {"pixel_values": torch.randn(1, 3, 16, 16)} | (of_image if name == "gemma3" else {})


def check_steps(model, *further):
    """Of the model as it is, and when it is patched."""
    want = [step(model, **options) for options in further]
    patch_causal_lm(model)
    return [check_step(model, exact, **options) for options, exact in zip(further, want, strict=True)][-1]


@pytest.mark.nightly(keep=7)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_has_the_same_loss_and_gradients_without_logits(name):
    check_steps(make(name), {}, {"num_items_in_batch": torch.tensor(17)})


@pytest.mark.parametrize("unused", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
def test_what_a_configuration_states_and_its_model_does_not_use_is_not_applied(unused):
    check_steps(make(**{unused: 0.5}), {})


@pytest.mark.parametrize("name", SEVERAL_MODALITIES)
def test_a_model_of_several_modalities_trains_alike_with_an_image(name):
    torch.manual_seed(0)
    model, given = SEVERAL_MODALITIES[name]().train(), with_image(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # Gemma's projection of images starts as 0
            parameter.requires_grad_("k_proj.bias" not in key)  # whose gradient is rounding, since softmax is invariant
    gradients = check_steps(model, given)
    assert any("vis" in x and gradient.any() for x, gradient in gradients.items())


class Subclass(hf.LlamaForCausalLM):
    """A user's own, for which transformers names no loss."""


@pytest.mark.parametrize("tied", [False, True])
def test_a_subclass_and_tied_embeddings_train_alike(tied):
    model = make(tie_word_embeddings=tied)
    model.__class__ = hf.LlamaForCausalLM if tied else Subclass
    assert ("lm_head.weight" in check_steps(model, {})) is not tied


def test_a_patched_model_compiles_without_graph_breaks():
    model = patch_causal_lm(make())
    want = step(model, num_items_in_batch=torch.tensor(17))
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    check_step(model, want, num_items_in_batch=torch.tensor(17))


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_in_bfloat16_a_step_is_as_accurate_as_torchs_own(backward):
    exact_model = make().double()
    _, exact = step(exact_model.to(torch.bfloat16).double())
    model = make().to(torch.bfloat16)
    plain_out, plain = step(model)
    out, got = step(patch_causal_lm(model, backward=backward))
    assert abs(out.loss.item() - plain_out.loss.item()) < 2e-2
    for key in ("lm_head.weight", "model.norm.weight"):  # what the head makes; the layers' own rounding hides the rest
        error, allowed = relative(got[key].double(), exact[key]), relative(plain[key].double(), exact[key])
        assert error <= 1.5 * allowed, key
    everything = [torch.cat([g.double().flatten() for g in x.values()]) for x in (got, plain, exact)]
    assert relative(everything[0], everything[2]) <= 1.5 * relative(everything[1], everything[2])


def test_evaluation_generation_and_calls_without_labels_are_untouched():
    model = make()
    tokens = batch()["input_ids"]
    plain = {"training": model(input_ids=tokens).logits, "loss": model.eval()(**batch())}
    words = model.generate(tokens, max_new_tokens=4, do_sample=False)
    patch_causal_lm(model)
    assert torch.equal(model.train()(input_ids=tokens).logits, plain["training"])
    out = model.eval()(**batch())
    assert torch.equal(out.logits, plain["loss"].logits)
    assert torch.equal(out.loss, plain["loss"].loss)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), words)


def test_labels_that_are_shifted_already_and_tuples_are_understood():
    model = patch_causal_lm(make())
    given = batch()
    want = model(**given).loss
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[..., 1:]
    got = model(**given, shift_labels=shifted, return_dict=False)
    assert isinstance(got, tuple)
    assert torch.equal(got[0], want)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["llama", *ROUTED])
def test_without_a_reduction_every_token_has_its_loss_and_none_of_it_is_the_routers(name, training):
    model, given = make(name).train(training), batch()
    given |= {"output_router_logits": True} if name in ROUTED else {}
    plain = model(**given)
    labels = given["labels"][:, 1:]
    want = -plain.logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    patch_causal_lm(model)
    for reduction, of_tokens in (("none", torch.nn.functional.pad(want, (0, 1))), ("sum", want.sum())):
        out = model(**given, reduction=reduction)
        assert out.logits is None
        torch.testing.assert_close(out.loss, of_tokens)
        if name in ROUTED:
            assert out.aux_loss > 0
            torch.testing.assert_close(out.aux_loss, plain.aux_loss)
    torch.testing.assert_close(model(**given, reduction="mean").loss, plain.loss)
    for wrong in ({"labels": None}, {"skip_logits": False}, {"logits_to_keep": 2}):
        with pytest.raises(ValueError, match="pass labels, and neither"):
            model(**given | wrong, reduction="none")


def test_evaluation_computes_no_logits_where_it_is_told_and_has_the_models_own_loss():
    model = make().eval()
    want = model(**batch(), num_items_in_batch=torch.tensor(17))
    patch_causal_lm(model, skip_logits=True, label_smoothing=0.1, z_loss=0.1)
    got = model(**batch(), num_items_in_batch=torch.tensor(17))
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss)
    with_logits = model(**batch(), num_items_in_batch=torch.tensor(17), skip_logits=False)
    assert torch.equal(with_logits.logits, want.logits)
    assert torch.equal(with_logits.loss, want.loss)
    assert torch.equal(model(batch()["input_ids"]).logits, want.logits)
    assert model.train()(**batch()).loss > got.loss


@pytest.mark.parametrize("name", ROUTED)
def test_losses_of_routers_are_added(name):
    model, asked = make(name), {} if name == "mixtral" else {"output_router_logits": True}
    want = model(**batch(), **asked)
    check_steps(model, asked, asked | {"num_items_in_batch": torch.tensor(17)})
    got = model(**batch(), **asked)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    assert len(got.router_logits) == len(want.router_logits)
    without = model(**batch(), output_router_logits=False)
    assert without.loss < want.loss
    assert without.aux_loss is without.router_logits is None


def test_hidden_states_are_not_copied_for_the_shift(monkeypatch):
    head = mock.Mock(wraps=patched.linear_cross_entropy)
    monkeypatch.setattr(patched, "linear_cross_entropy", head)
    model = patch_causal_lm(make())
    pointers = []
    model.model.register_forward_hook(lambda m, a, out: pointers.append(out.last_hidden_state.data_ptr()))
    model(**batch())
    head.assert_called_once()
    hidden, _, labels = head.call_args.args
    assert (hidden.data_ptr(), hidden.shape, labels.shape) == (pointers[0], (3, 9, 16), (3, 9))


def test_label_smoothing_is_that_of_trainers_label_smoother_and_another_ignore_index_is_heeded():
    model, given = make(), batch()
    given["labels"] = given["labels"].where(given["labels"] != -100, 7)
    out = model(input_ids=given["input_ids"])
    want = LabelSmoother(epsilon=0.1, ignore_index=7)(out, given["labels"], shift_labels=True)
    torch.testing.assert_close(patch_causal_lm(model, label_smoothing=0.1)(**given, ignore_index=7).loss, want)


def arguments(folder, **options):
    return hf.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0, **options
    )


@pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own
def test_steps_of_trainer_agree(tmp_path):
    torch.manual_seed(2)
    texts = [{"input_ids": tokens, "labels": tokens.clone()} for tokens in torch.randint(3, VOCABULARY, (64, 12))]
    for i, text in enumerate(texts):
        text["labels"][: i % 5] = -100
    losses = []
    for model in (make(), patch_causal_lm(make())):
        how = arguments(
            tmp_path / str(len(losses)), max_steps=5, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, learning_rate=3e-3, logging_steps=1,
        )  # fmt: skip
        trainer = hf.Trainer(model, how, train_dataset=texts, eval_dataset=texts)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    want, got = losses
    assert len(got) == 6
    assert got[-1] < got[0]
    # Both are float32 runs: they part by rounding, which many steps of Adam may enlarge.
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("skip_logits", [False, True])
def test_trainer_evaluates_without_products_of_the_vocabulary_where_it_is_told(tmp_path, skip_logits):
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(3, VOCABULARY, (4, 12))]
    how = arguments(tmp_path, per_device_eval_batch_size=2, prediction_loss_only=True)
    plain = hf.Trainer(make(), how, eval_dataset=texts).evaluate()["eval_loss"]
    trainer = hf.Trainer(patch_causal_lm(make(), skip_logits=skip_logits), how, eval_dataset=texts)
    with Products(VOCABULARY) as products:
        losses = [trainer.evaluate()["eval_loss"], trainer.predict(texts).metrics["test_loss"]]
    assert losses == pytest.approx([plain, plain], rel=1e-5)
    bridged = {"linear_cross_entropy"} if skip_logits else set()
    assert (set(products.bridged), not products.wide) == (bridged, skip_logits)
