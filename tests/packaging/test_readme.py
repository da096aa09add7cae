"""The README's Python examples run, in order, as a reader would type them."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    blocks = [block for block in blocks if "torch_bridge" not in block]  # tests/torch_bridge/test_readme.py runs those
    assert len(blocks) == 7
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["d_weight"].shape == (50_257, 256)
    assert "in_forward" in capsys.readouterr().out
    loss = namespace["train_step"](namespace["model"], namespace["optimizer"], namespace["labels"][:2, :9])
    assert float(loss) > 0
