"""The Python examples of docs/huggingface.md run, in order, as a reader would type them, on a tiny model."""

import re
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

    assert len(BLOCKS) == 4
    found = run(BLOCKS[2:], namespace | {"dataset": Dataset.from_dict({"text": TEXTS}), "tokenizer": tokenizer()})
    assert any("train_loss" in entry for entry in found["trainer"].state.log_history)
    assert isinstance(found["model"].get_base_model(), hf.Gemma2ForCausalLM)
