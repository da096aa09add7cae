"""The README's example for PyTorch runs as a reader would type it."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "torch_bridge" in b)
    namespace: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), namespace)
    assert namespace["head"].weight.grad.shape == (1000, 64)
