"""Each section of docs/coming_from.md runs by itself, with its part's first block, and without the other frameworks."""

import re
import sys
from pathlib import Path

import pytest

_, *PARTS = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text().split("\n## ")
SECTIONS = [(part.split("\n### ")[0], section) for part in PARTS for section in part.split("\n### ")[1:]]
FRAMEWORKS = {"torch", "torch_bridge", "optax", "flax", "jax.numpy"}


@pytest.mark.parametrize(("start", "section"), [pytest.param(*x, id=x[1].split("\n")[0]) for x in SECTIONS])
def test_a_section_runs_with_its_own_framework_alone(monkeypatch, start, section):
    own = {"torch", "torch_bridge"} if start.startswith("In PyTorch") else {"jax.numpy"}
    for other in FRAMEWORKS - own - set(section.split()[:1]):
        monkeypatch.setitem(sys.modules, other, None)  # an import of it fails
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", start + section, re.DOTALL):
        exec(block, namespace)
