"""The scripts in `examples` run, each in a process of its own as its users start it, and its page names each."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def test_the_page_names_every_script():
    page = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", page, re.MULTILINE) == [path.name for path in SCRIPTS]


@pytest.mark.nightly
@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_runs_and_what_it_asserts_holds(path):
    imported = set(re.findall(r"^(?:import|from(?= [\w.]+ import)) (\w+)", path.read_text(), re.MULTILINE))
    if missing := sorted(name for name in imported if importlib.util.find_spec(name) is None):
        pytest.skip(f"needs {', '.join(missing)}")
    assert re.search(r"^ +(np\.testing\.assert_|torch\.testing\.assert_|assert )", path.read_text(), re.MULTILINE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("XLA_FLAGS", None)  # the tests' flags are for small programs that run once
    ended = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
