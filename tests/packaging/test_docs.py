"""Pages: the API reference has every public name and no other, and what a page names is there."""

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTED = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^\.\. auto(?:class|function):: (\S+)$", page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("module", ["pallas_ce", "flax_modules.nnx", "flax_modules.linen", "torch_bridge"])
def test_the_reference_has_every_public_name_once(module):
    public = importlib.import_module(module).__all__
    assert sorted(n for n in DOCUMENTED if n.rpartition(".")[0] == module) == sorted(f"{module}.{n}" for n in public)


def test_the_reference_has_the_names_that_other_projects_import():
    source = (DOCS.parent / "torch_bridge" / "selective.py").read_text()
    names = re.findall(r"^def ([a-z]\w+)", source, re.MULTILINE)
    assert sorted(n for n in DOCUMENTED if ".selective." in n) == sorted(f"torch_bridge.selective.{n}" for n in names)


def test_the_page_of_faults_names_tests_that_exist_and_every_test_of_a_fault():
    root = DOCS.parent
    named = set(re.findall(r"`(tests/\S+\.py)::(\w+)`", (DOCS / "robustness.md").read_text()))
    files = {file for file, _ in named} | {str(x.relative_to(root)) for x in root.glob("tests/*/test_faults.py")}
    tests = {(file, name) for file in files for name in re.findall(r"^def (test_\w+)", (root / file).read_text(), re.M)}
    assert named - tests == set()
    assert {(file, name) for file, name in tests if file.endswith("/test_faults.py")} - named == set()
