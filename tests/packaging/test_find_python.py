"""`tools/find-python` on machines of every kind: each test makes a PATH and a home with interpreters of its own."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).parents[2] / "tools" / "find-python"
GOOD = f'exec "{sys.executable}" "$@"'
TOO_OLD, BROKEN_SHIM = {"path/python3": "exit 1"}, {"path/python3.12": "exit 127"}
OF_UV = "home/.local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3"


@pytest.mark.parametrize(
    ("others", "found", "asked"),
    [
        (TOO_OLD, "path/python3.13", None),
        (BROKEN_SHIM, "path/python3", None),
        (TOO_OLD, "home/.pyenv/versions/3.12.1/bin/python", None),
        ({}, OF_UV, None),
        ({}, "system/usr/local/bin/python3.13", None),
        ({}, "system/opt/homebrew/bin/python3.12", None),
        ({"path/python3.12": GOOD}, "home/mine", "home/mine"),
        ({"path/python3.12": GOOD}, None, "no-such"),
        (TOO_OLD, None, None),
    ],
)
def test_the_first_that_runs_and_is_new_enough_is_found_or_a_sentence_says_there_is_none(
    tmp_path, others, found, asked
):
    for place, lines in {**others, **({found: GOOD} if found else {})}.items():
        interpreter = tmp_path / place
        interpreter.parent.mkdir(parents=True, exist_ok=True)
        interpreter.write_text(f"#!{shutil.which('sh')}\n{lines}\n")
        interpreter.chmod(0o755)
    script = tmp_path / "find-python"
    # What a search includes whatever PATH and HOME are lies below `system`.
    script.write_text(re.sub(r"(?<= )/(usr/local|opt)/", rf"{tmp_path}/system/\1/", FIND_PYTHON.read_text()))
    environment = {"PATH": str(tmp_path / "path"), "HOME": str(tmp_path / "home")}
    environment |= {"PYTHON": str(tmp_path / asked)} if asked else {}
    said = subprocess.run([shutil.which("sh"), script], env=environment, capture_output=True, text=True, check=False)
    if found:
        assert said.stdout.strip() == str(tmp_path / found)
    else:
        assert (said.returncode, said.stdout) == (1, "")
        assert ("is not a CPython 3.12 or newer" if asked else "No Python 3.12 or newer") in said.stderr
