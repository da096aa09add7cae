"""The page of faults names tests that exist, for every fault that was tried, and every test that tries one."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/robustness.md").read_text().splitlines()
    if line.startswith("| ")
][2:]


def names_in(file):
    found = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_fault_names_tests_that_exist_or_says_that_it_was_not_tried():
    assert len(LINES) > 20
    for fault, outcome, tests in LINES:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", tests)
        assert len(named) == tests.count("::"), fault
        assert bool(named) != outcome.startswith("Not tried"), fault
        for file, test in named:
            assert test in names_in(file), fault


def test_every_test_of_a_fault_is_on_the_page():
    page = (ROOT / "docs/robustness.md").read_text()
    files = sorted(ROOT.glob("tests/*/test_faults.py"))
    assert len(files) == 3
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        assert [test for test in names_in(name) if f"`{name}::{test}`" not in page] == []
