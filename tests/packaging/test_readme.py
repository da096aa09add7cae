"""The README's Python examples run, in order, as a reader would type them."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(blocks):
    """What the examples have defined."""
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    return namespace


def test_the_examples_run(capsys):
    blocks = [block for block in BLOCKS if "torch_bridge" not in block]
    assert len(blocks) == 7
    namespace = run(blocks)
    assert namespace["d_weight"].shape == (50_257, 256)
    assert "in_forward" in capsys.readouterr().out
    loss = namespace["train_step"](namespace["model"], namespace["optimizer"], namespace["labels"][:2, :9])
    assert float(loss) > 0


def test_the_example_for_pytorch_runs():
    pytest.importorskip("torch")
    (block,) = (block for block in BLOCKS if "torch_bridge" in block)
    assert run([block])["head"].weight.grad.shape == (1000, 64)
