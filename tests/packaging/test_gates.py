"""Whatever names a make target names one that exists, and `make` lists each."""

import re
import subprocess
import tomllib
from pathlib import Path

import check_words
import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
FILES = [".pre-commit-config.yaml", "CONTRIBUTING.md", "README.md", ".ci/run", *sorted(ROOT.glob(".github/**/*.yml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).name)
def test_every_make_target_named_in_a_file_exists(file):
    assert set(re.findall(r"\bmake ([a-z-]+)", (ROOT / file).read_text())) <= TARGETS


def test_every_target_has_a_line_of_help_and_a_gpu_an_environment_of_its_own():
    """One environment with the plugins of both CUDA versions could not start either."""
    assert set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)) == TARGETS
    shown = ["make", "--dry-run", "--always-make", "train", "EXTRA=cuda12", "MAKEFLAGS="]
    assert ".venv-cuda12/" in subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_fault_to_be_planted_has_one_place():
    for file, faults in tomllib.loads((ROOT / "tools/mutants.toml").read_text()).items():
        text = (ROOT / file).read_text()
        assert [name for name, fault in faults.items() if text.count(fault["old"]) != 1] == [], file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# Its width is that\n# of the head.", [(1, "that of")]),
        ("x = 1\n# So\n# many rows,\ny = 2  # of\nwider = 3  # which `that of` is quoted", [(2, "So many")]),
        ('"""A page, and that\n    of another."""', [(1, "that of")]),
        ('def f():\n    """Their rows."""', [(2, "a docstring that begins with 'Their'")]),
        ('raise ValueError(f"n={1} has so "\n    "many rows")', [(1, "so many")]),
        ('raise ValueError(\n    "rows"\n    if n\n    else "what is\\n not"\n)', [(4, "what is")]),
        ('refused = "what is said"', []),
    ],
)
def test_phrases_are_found_over_line_breaks_and_in_errors(text: str, found: list[tuple[int, str]]) -> None:
    assert list(check_words.in_module(text)) == found
    assert list(check_words.in_text("Rows,\n    of\n  which two")) == [(2, "of which")]
