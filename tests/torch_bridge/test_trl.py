"""TRL's trainers on patched models: the same training, by the bridge's calls and without products of the vocabulary."""

import importlib
import importlib.metadata
import re
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers as hf

from tests.torch_bridge.models import SIZES, VOCABULARY
from tests.torch_bridge.problems import Products
from torch_bridge import patch_causal_lm, unpatch_causal_lm
from torch_bridge.integrations import trl as adapter

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def exact(hidden, weight, bias, targets, temperature, cap, scale):
    """What TRL's function returns, in float64."""
    z = scale * (hidden.double() @ weight.double().T + bias.double())
    z = (z if cap is None else cap * torch.tanh(z / cap)) / temperature
    log_p = z.log_softmax(-1)
    target = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return target, entropy, (2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("temperature", "cap", "scale"), [(1.0, None, 1.0), (0.7, 3.0, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_function_returns_what_trls_does(dtype, temperature, cap, scale):
    torch.manual_seed(0)
    weight, bias = (torch.randn(*shape).to(dtype).requires_grad_() for shape in [(50, 16), (50,)])
    hidden = torch.randn(40, 16, requires_grad=True)  # in float32 with a bfloat16 weight: a float32 head
    targets = torch.randint(0, 50, (40,))
    with torch.no_grad():
        targets[:9] = (hidden[:9] @ weight.float().T + bias).argmax(-1)
    want = exact(hidden, weight, bias, targets, temperature, cap, scale)
    got = adapter.FusedHead(None).apply(hidden, weight, bias, targets, temperature, 32768, cap, scale, ALL)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-5, atol=1e-5)
    assert 9 <= got[4].sum() < 40
    assert [x.requires_grad for x in got] == [True, True, False, False, False]
    gradients = [
        torch.autograd.grad(log_probs.sum() - 0.3 * entropy.sum(), (hidden, weight, bias))
        for log_probs, entropy, *_ in (got, want)
    ]
    for x, y in zip(*gradients, strict=True):
        assert float((x.double() - y.double()).norm()) <= (1e-5 if x.dtype == torch.float32 else 1e-2) * float(y.norm())
    alone = adapter.FusedHead(None).apply(hidden, weight, bias, targets, temperature, 32768, cap, scale, ("log_probs",))
    torch.testing.assert_close(alone[0], got[0])
    assert alone[1:] == (None,) * 4


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_function_of_two_heads_returns_what_trls_own_does(beta):
    theirs = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    torch.manual_seed(0)
    student, teacher = ((torch.randn(40, n, requires_grad=True), torch.randn(50, n), torch.randn(50)) for n in (16, 9))
    options = beta, 0.7, 0.5, 3.0, 1.3, None
    results = []
    for function in (theirs, adapter.FusedHead(None)):
        apply = super(theirs, theirs).apply if function is theirs else function.divergence
        divergence, entropy = apply(*student, *teacher, *options)
        (gradient,) = torch.autograd.grad((divergence * torch.linspace(-1, 2, 40)).sum(), student[0])
        results.append((divergence, entropy, gradient))
        assert not entropy.requires_grad
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("asked", "served"), [("mosaic_gpu", None), ("triton", "triton"), (None, None)])
def test_two_heads_are_served_as_the_model_was_patched_where_there_are_such_kernels(asked, served, monkeypatch):
    found = mock.Mock(), mock.Mock()
    for name, function in zip(("linear_row_statistics", "linear_distillation"), found, strict=True):
        monkeypatch.setattr(adapter, name, function)
    head = adapter.FusedHead(None)
    head.options = {"implementation": asked}
    head.divergence(*[None] * 6, 0.0, *[None] * 5)
    assert [function.call_args.kwargs["implementation"] for function in found] == [asked, served]


@pytest.fixture
def trl(monkeypatch):
    """TRL, and its own functions back in their places."""
    trl = pytest.importorskip("trl")
    pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils = importlib.import_module("trl.trainer.utils")
        for name in TRAINERS:
            getattr(trl, f"{name.split()[0]}Trainer")
    function = utils._ChunkedLogProbFunction  # other tests may have left ours there
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", getattr(function, "original", function))
    if "apply" in vars(of_two := adapter._of_two_heads()):
        del of_two.apply
    return trl


def make(seed=0):
    torch.manual_seed(seed)
    sizes = SIZES | {"num_hidden_layers": 1, "eos_token_id": 1, "head_dim": 8}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, final_logit_softcapping=2.0, attn_implementation="eager"))


def other():
    return make(1)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


TEXTS = [" ".join(f"w{3 + (7 * i + 3 * j) % (VOCABULARY - 3)}" for j in range(5 + i % 3)) for i in range(8)]
PAIRS = {"prompt": TEXTS, "chosen": [" w5 w6"] * 8, "rejected": [" w9 w10 w11"] * 8}
COMPLETIONS = {"prompt": TEXTS, "completion": [" w5 w6", " w9"] * 4, "label": [True, False] * 4}
SAMPLED = {"num_generations": 2, "max_completion_length": 4, "temperature": 0.7, "beta": 0.1}


def letters(completions, **_):
    """A reward that two answers hardly share, whatever a release of PyTorch draws: among equals there is no loss."""
    return [float(sum(map(ord, words)) % 97) for words in completions]


def adapters():
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")


# Data, options of the configuration, and of the trainer.
TRAINERS = {
    "SFT": ({"text": TEXTS}, {"max_length": 16}, {}),
    "DPO": (PAIRS, {}, {"ref_model": make}),
    "SFT with adapters": ({"text": TEXTS}, {"max_length": 16}, {"peft_config": adapters}),
    "DPO with adapters": (PAIRS, {}, {"peft_config": adapters}),  # the reference: without them
    "KTO": (COMPLETIONS, {}, {"ref_model": make}),
    "GRPO": ({"prompt": TEXTS}, SAMPLED | {"cast_lm_head_to_fp32": True}, {"reward_funcs": letters}),
    "RLOO": ({"prompt": TEXTS}, SAMPLED, {"reward_funcs": letters}),
    "Distillation": ({"prompt": TEXTS}, {"max_completion_length": 4, "beta": 0.3}, {"teacher_model": other}),
}
# RLOO asks for what GRPO does, KTO for what DPO does, and SFT with adapters for what DPO with adapters does.
REPEATED = dict.fromkeys(("RLOO", "KTO", "SFT with adapters"), pytest.mark.nightly)


def trainer(trl, name, model, directory, **given):
    from datasets import Dataset

    data, options, further = TRAINERS[name]
    model.config._name_or_path = str(directory / "model")  # GRPO and RLOO make a reference model of it
    make().save_pretrained(directory / "model")
    kind = name.split()[0]
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(directory), max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    further = {key: x() if x in (make, other, adapters) else x for key, x in further.items()} | given
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=Dataset.from_dict(data), processing_class=tokenizer(), **further
    )


def trained(trl, name, model, directory):
    """The operations of two steps, how far they moved the weights, and what was logged."""
    made, products = trainer(trl, name, model, directory), Products(VOCABULARY)
    generate = model.generate

    def without_counting(*args, **kwargs):
        with products.paused():
            return generate(*args, **kwargs)

    model.generate = without_counting
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(3)
    with products:
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return products, {name: p.detach() - before[name] for name, p in model.named_parameters() if name in before}, losses


@pytest.mark.filterwarnings("ignore")  # TRL's, transformers' and accelerate's own
@pytest.mark.parametrize("name", [pytest.param(x, marks=REPEATED.get(x, ())) for x in TRAINERS])
def test_a_trainer_of_trl_trains_alike_by_the_bridges_calls_and_without_products_of_the_vocabulary(trl, name, tmp_path):
    plain, want, want_losses = trained(trl, name, make(), tmp_path)
    assert plain.wide
    assert not plain.bridged
    products, got, losses = trained(trl, name, patch_causal_lm(make()), tmp_path)
    assert products.wide == []
    function = "linear_distillation" if name == "Distillation" else "linear_row_statistics"
    assert {"linear_row_statistics", function, f"{function}_backward"} == set(products.bridged)
    torch.testing.assert_close(losses, want_losses, rtol=1e-4, atol=1e-6)
    assert got.keys() == want.keys()
    for key, moved in want.items():
        # Adam's first steps are of the learning rate's size whatever the gradient's: rounding turns only tiny ones.
        assert (got[key] - moved).norm() <= 1e-2 * moved.norm(), key


@pytest.mark.filterwarnings("ignore")
def test_evaluation_by_trl_is_by_the_bridge_too(trl, tmp_path):
    losses = []
    for model in (make(), patch_causal_lm(make())):
        made = trainer(trl, "SFT", model, tmp_path)
        with Products(VOCABULARY) as products:
            losses.append(made.evaluate(made.train_dataset)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (set(products.bridged), products.wide) == ({"linear_row_statistics"}, [])


@pytest.mark.filterwarnings("ignore")
def test_options_of_a_loss_that_trl_computes_are_refused_by_the_trained_model_alone(trl, tmp_path):
    other = patch_causal_lm(make(), z_loss=1e-4)
    with pytest.raises(ValueError, match=r"patched with \['z_loss'\], but TRL"):
        trainer(trl, "SFT", other, tmp_path)
    tokens = torch.arange(6)[None]
    assert other(input_ids=tokens, labels=tokens).logits is None
    products, _, losses = trained(trl, "SFT", patch_causal_lm(make()), tmp_path)
    assert len(losses) == 2
    assert products.bridged


@pytest.mark.filterwarnings("ignore")
def test_trainers_of_trl_refuse_an_adapter_of_the_head(trl, tmp_path):
    """As docs/huggingface.md says; where they no longer do, `FusedHead` needs the adapter, too."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    for name in ("SFT", "DPO with adapters", "KTO", "GRPO", "RLOO"):
        with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
            trainer(trl, name, patch_causal_lm(make()), tmp_path, peft_config=config)


def test_the_last_model_that_is_unpatched_gives_trl_its_function_back(trl):
    utils = importlib.import_module("trl.trainer.utils")
    own, of_two = utils._ChunkedLogProbFunction, adapter._of_two_heads()
    first, second = patch_causal_lm(make()), patch_causal_lm(make(), implementation="xla", backward="recompute")
    assert utils._ChunkedLogProbFunction.options == {"implementation": "xla"}
    unpatch_causal_lm(first)
    assert utils._ChunkedLogProbFunction is not own
    assert "apply" in vars(of_two)
    unpatch_causal_lm(second)
    assert utils._ChunkedLogProbFunction is own
    assert "apply" not in vars(of_two)


def test_the_default_environment_has_a_version_that_counts_as_tested():
    constraints = (Path(__file__).parents[2] / "tools" / "constraints-jax-0.11.2.txt").read_text()
    assert re.search(r"^trl==(.*)$", constraints, re.MULTILINE)[1] in adapter.TESTED


@pytest.mark.parametrize(
    ("found", "served", "message"),
    [
        (adapter.TESTED[0], True, None),
        ("9.9", True, r"TRL 9\.9 was not tested with patch_causal_lm; tested: 1\.16\.0"),
        ("1.2", False, r"TRL 1\.2 has trainers that will not use patch_causal_lm \(.*no attribute"),
    ],
)
def test_versions_of_trl_that_were_not_tested_are_warned_about(monkeypatch, found, served, message):
    function = types.SimpleNamespace(forward=adapter.FusedHead.apply)
    utils = types.SimpleNamespace(**{"_ChunkedLogProbFunction": function} if served else {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    monkeypatch.setattr(importlib, "import_module", lambda name: utils)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert adapter._utils.__wrapped__() is (utils if served else None)
    assert (len(warned) == 0) if message is None else re.search(message, str(warned[0].message))
