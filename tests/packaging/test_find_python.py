"""`tools/find-python` on machines of every kind: each test makes a PATH and a home with interpreters of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FIND_PYTHON = Path(__file__).parents[2] / "tools" / "find-python"


@pytest.fixture
def machine(tmp_path):
    """A machine with an empty home, on whose PATH there is only what the test puts there; returns how to search it.

    The places that every search includes, whatever PATH and HOME are, lie below `system`.
    """
    script = tmp_path / "find-python"
    script.write_text(re.sub(r"(?<= )/(usr/local|opt)/", rf"{tmp_path}/system/\1/", FIND_PYTHON.read_text()))
    folders = {name: tmp_path / name for name in ("path", "home", "system")}
    for folder in folders.values():
        folder.mkdir()

    def find(**variables):
        environment = {"PATH": str(folders["path"]), "HOME": str(folders["home"]), **variables}
        command = [shutil.which("sh"), script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return SimpleNamespace(find=find, **folders)


def add(interpreter: Path, script: str) -> Path:
    interpreter.parent.mkdir(parents=True, exist_ok=True)
    interpreter.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    interpreter.chmod(0o755)
    return interpreter


GOOD = f'exec "{sys.executable}" "$@"'
BROKEN_SHIM = 'echo "pyenv: python3.12: command not found" >&2; exit 127'
TOO_OLD = "exit 1"


UV = "home/.local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3"


@pytest.mark.parametrize(
    ("passed_over", "found"),
    [
        ({"path/python3": TOO_OLD}, "path/python3.13"),
        ({"path/python3.12": BROKEN_SHIM}, "path/python3"),
        # What pyenv holds but did not select, and what uv holds.
        ({"path/python3": TOO_OLD, "home/.pyenv/versions/3.11.7/bin/python": TOO_OLD},
         "home/.pyenv/versions/3.12.1/bin/python"),
        ({}, UV),
        # What is installed for every user.
        ({}, "system/usr/local/bin/python3.13"),
        ({}, "system/opt/homebrew/bin/python3.12"),
        ({}, "system/opt/python/3.12/bin/python3"),
    ],
)  # fmt: skip
def test_the_first_interpreter_that_runs_and_is_new_enough_is_found(machine, tmp_path, passed_over, found):
    for place, script in passed_over.items():
        add(tmp_path / place, script)
    newer = add(tmp_path / found, GOOD)
    assert machine.find().stdout.strip() == str(newer)


def test_pyenv_root_may_be_elsewhere_and_contain_a_space(machine, tmp_path):
    newer = add(tmp_path / "my pyenv/versions/3.12.1/bin/python", GOOD)
    assert machine.find(PYENV_ROOT=str(tmp_path / "my pyenv")).stdout.strip() == str(newer)


def test_an_interpreter_asked_for_is_the_one_used(machine):
    add(machine.path / "python3.12", GOOD)
    chosen = add(machine.home / "mine", GOOD)
    assert machine.find(PYTHON=str(chosen)).stdout.strip() == str(chosen)


@pytest.mark.parametrize("chosen", ["python3", "no-such-python"])
def test_an_unsuitable_interpreter_asked_for_is_refused_in_one_sentence(machine, chosen):
    add(machine.path / "python3", TOO_OLD)
    add(machine.path / "python3.12", GOOD)
    result = machine.find(PYTHON=chosen)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert f"PYTHON={chosen} is not a CPython 3.12 or newer" in result.stderr


def test_without_a_python_one_sentence_says_what_is_needed(machine):
    add(machine.path / "python3", TOO_OLD)
    result = machine.find()
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("No Python 3.12 or newer")


def test_the_script_runs_in_a_plain_posix_shell():
    assert os.access(FIND_PYTHON, os.X_OK)
    assert FIND_PYTHON.read_text().startswith("#!/bin/sh\n")
