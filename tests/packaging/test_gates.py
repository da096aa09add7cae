"""The Makefile, continuous integration and the commit hooks name the same gates."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def make(*arguments):
    """Runs make without the options of the make that may be running this test."""
    ours = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "EXTRA", "VENV"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


WORKFLOWS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]


@pytest.mark.parametrize("file", [".pre-commit-config.yaml", "CONTRIBUTING.md", "README.md", ".ci/run", *WORKFLOWS])
def test_every_make_target_named_in_a_file_exists(file):
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / file).read_text()))
    assert named
    assert named <= TARGETS


def test_make_alone_lists_every_public_target():
    listed = {line.split()[1] for line in make().stdout.splitlines()}
    assert listed == TARGETS


@pytest.mark.parametrize(("extra", "environment"), [("", ".venv/"), ("EXTRA=cuda12", ".venv-cuda12/")])
def test_each_gpu_extra_has_an_environment_of_its_own(extra, environment):
    """One environment with the plugins of both CUDA versions could not start either."""
    assert environment in make("--dry-run", "--always-make", "train", extra or "WORKERS=1").stdout
