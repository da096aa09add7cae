"""`tools/find-python` on machines of every kind: each test makes a PATH and a home with interpreters of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).parents[2] / "tools" / "find-python"


@pytest.fixture
def find(tmp_path):
    """Searches a machine with an empty home, on whose PATH there is only what the test puts there.

    The places that every search includes, whatever PATH and HOME are, lie below `system`.
    """
    script = tmp_path / "find-python"
    script.write_text(re.sub(r"(?<= )/(usr/local|opt)/", rf"{tmp_path}/system/\1/", FIND_PYTHON.read_text()))

    def find(variables):
        environment = {"PATH": str(tmp_path / "path"), "HOME": str(tmp_path / "home"), **variables}
        command = [shutil.which("sh"), script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return find


def add(interpreter, script):
    interpreter.parent.mkdir(parents=True, exist_ok=True)
    interpreter.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    interpreter.chmod(0o755)


GOOD = f'exec "{sys.executable}" "$@"'
BROKEN_SHIM = 'echo "pyenv: python3.12: command not found" >&2; exit 127'
TOO_OLD = "exit 1"
UV = "home/.local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3"


@pytest.mark.parametrize(
    ("others", "found", "variables"),
    [
        ({"path/python3": TOO_OLD}, "path/python3.13", {}),
        ({"path/python3.12": BROKEN_SHIM}, "path/python3", {}),
        # What pyenv holds but did not select, and what uv holds.
        ({"path/python3": TOO_OLD, "home/.pyenv/versions/3.11.7/bin/python": TOO_OLD},
         "home/.pyenv/versions/3.12.1/bin/python", {}),
        ({}, "my pyenv/versions/3.12.1/bin/python", {"PYENV_ROOT": "my pyenv"}),
        ({}, UV, {}),
        # Installed for every user.
        ({}, "system/usr/local/bin/python3.13", {}),
        ({}, "system/opt/homebrew/bin/python3.12", {}),
        ({}, "system/opt/python/3.12/bin/python3", {}),
        # Asked for.
        ({"path/python3.12": GOOD}, "home/mine", {"PYTHON": "home/mine"}),
    ],
)  # fmt: skip
def test_the_first_interpreter_that_runs_and_is_new_enough_is_found(find, tmp_path, others, found, variables):
    for place, script in {**others, found: GOOD}.items():
        add(tmp_path / place, script)
    said = find({name: str(tmp_path / place) for name, place in variables.items()})
    assert said.stdout.strip() == str(tmp_path / found)


@pytest.mark.parametrize(
    ("others", "variables", "sentence"),
    [
        ({"path/python3.12": GOOD}, {"PYTHON": "python3"}, "PYTHON=python3 is not a CPython 3.12 or newer"),
        ({"path/python3.12": GOOD}, {"PYTHON": "no-such"}, "PYTHON=no-such is not a CPython 3.12 or newer"),
        ({}, {}, "No Python 3.12 or newer"),
    ],
)
def test_where_there_is_none_or_not_the_one_asked_for_one_sentence_says_so(find, tmp_path, others, variables, sentence):
    for place, script in {"path/python3": TOO_OLD, **others}.items():
        add(tmp_path / place, script)
    result = find(variables)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


def test_the_script_runs_in_a_plain_posix_shell():
    assert os.access(FIND_PYTHON, os.X_OK)
    assert FIND_PYTHON.read_text().startswith("#!/bin/sh\n")
