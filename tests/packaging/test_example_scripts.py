"""The scripts in `examples` run, and its page names each."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_page_names_every_script():
    named = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert named == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.nightly
def test_the_adapter_of_a_head_learns_and_is_merged():
    pytest.importorskip("optax")
    found = runpy.run_path(str(EXAMPLES / "lora_head.py"))["main"](steps=150)
    assert found["with the adapter"] < 0.95 * found["before"]
    assert found["merged"] == pytest.approx(found["with the adapter"], rel=1e-5)
