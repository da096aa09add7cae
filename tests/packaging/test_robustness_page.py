"""The page of faults names tests that exist, and every test of a fault."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_names_tests_that_exist_and_every_test_of_a_fault():
    named = set(re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs/robustness.md").read_text()))
    files = {file for file, _ in named} | {str(x.relative_to(ROOT)) for x in ROOT.glob("tests/*/test_faults.py")}
    tests = {(file, name) for file in files for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)}
    assert named - tests == set()
    assert {(file, name) for file, name in tests if file.endswith("/test_faults.py")} - named == set()
