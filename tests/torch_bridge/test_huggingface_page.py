"""The Python examples of docs/huggingface.md run, in order, as a reader would type them, on a tiny model."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.torch_bridge.test_trl import TEXTS, make, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """What the page says is the reader's."""
    make().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return {"name": str(tmp_path / "model"), "texts": [{"input_ids": list(range(9)), "labels": list(range(9))}] * 4}


def run(blocks, namespace):
    for block in blocks:
        exec(compile(block.replace('"run"', '"run", use_cpu=True, report_to=[]'), str(PAGE), "exec"), namespace)
    return namespace


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_examples_for_trainer_run(namespace):
    found = run(BLOCKS[:2], namespace)
    assert found["perplexity"].shape == (4,)
    assert torch.all(found["perplexity"] > 1)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_examples_for_trl_and_peft_run(namespace, monkeypatch):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    from datasets import Dataset

    found = run(BLOCKS[2:4], namespace | {"dataset": Dataset.from_dict({"text": TEXTS}), "tokenizer": tokenizer()})
    assert any("train_loss" in entry for entry in found["trainer"].state.log_history)
    assert isinstance(found["model"].get_base_model(), hf.Gemma2ForCausalLM)


def test_the_recipe_for_verl_serves_its_function(monkeypatch):
    parts = ["verl", "utils", "kernel", "linear_cross_entropy"]
    for count in range(1, len(parts) + 1):
        verl = types.ModuleType(".".join(parts[:count]))
        monkeypatch.setitem(sys.modules, verl.__name__, verl)
        if count > 1:
            setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], verl)
    assert len(BLOCKS) == 5
    run(BLOCKS[4:], {})
    hidden, weight, labels = torch.randn(2, 5, 8), torch.randn(29, 8), torch.randint(29, (2, 5))
    want = (hidden @ weight.T / 0.7).log_softmax(-1)
    picked, entropy = want.gather(-1, labels[..., None])[..., 0], -(want.exp() * want).sum(-1)
    found = verl.linear_cross_entropy(hidden, weight, labels, 0.7, "none")
    torch.testing.assert_close(found, (picked, entropy), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError):
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "mean")
