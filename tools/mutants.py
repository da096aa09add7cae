"""Plants faults in a copy of the project, one at a time, and shows which test finds each.

usage: python tools/mutants.py [WORD ...]       (the faults with one of these words in name or file; all by default)

`mutants.toml` lists them: a file, the text that goes, the text that takes its place, and the tests of its layer. Those
run until the first failure. A fault that no test finds, or whose old text is not exactly once in the file, fails the
command.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
LONGEST_SECONDS = 1800


class Mutant(NamedTuple):
    """One fault: `old` in `file` becomes `new`, which one of `tests` is to find, `only` in cases that -k chooses."""

    file: str
    name: str
    old: str
    new: str
    tests: str
    only: str = ""

    def planted(self, text: str) -> str:
        """The text of its file with the fault.

        Raises:
            ValueError: the old text is not there, or more than once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"the fault {self.name!r} has no place: {self.file} holds its old text {count} times, and must hold it "
                f"once; give {LIST.name} the lines as they are now, or take the fault out:\n{self.old}"
            )
        return text.replace(self.old, self.new)


def read(path: Path) -> list[Mutant]:
    """The faults of a list."""
    by_file = tomllib.loads(path.read_text())
    return [Mutant(file, name, **row) for file, rows in by_file.items() for name, row in rows.items()]


def copy_project(to: Path) -> None:
    """Copies the files that git knows or would add."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(folder: Path, mutant: Mutant) -> tuple[int, str]:
    """Exit status of pytest, and what it said, in the copy; a run that does not end counts as a failure."""
    tests = [f"tests/{name}" for name in mutant.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--hypothesis-profile=mutants", *tests, "-k", mutant.only]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED (no end after {LONGEST_SECONDS} s)"
    return done.returncode, done.stdout + done.stderr


def found_by(status: int, said: str) -> str | None:
    """The first test that failed, or None where all passed.

    Raises:
        RuntimeError: pytest ran no test.
    """
    if status == 0:
        return None
    named = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", said, re.MULTILINE)
    if named is None:
        raise RuntimeError(f"pytest ended with status {status} and names no failure:\n{said}")
    return named[1]


def main(words: list[str]) -> int:
    """Plants the chosen faults, prints a table and returns how many no test found."""
    chosen = [x for x in read(LIST) if not words or any(word in x.name + x.file for word in words)]
    for mutant in chosen:
        mutant.planted((ROOT / mutant.file).read_text())  # before any test runs
    table = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_project(folder)
        for mutant in chosen:
            place, start = folder / mutant.file, time.monotonic()
            sound = place.read_text()
            place.write_text(mutant.planted(sound))
            finder = found_by(*run_tests(folder, mutant))
            place.write_text(sound)
            table.append((mutant, finder, time.monotonic() - start))
            print(f"{mutant.name}: {f'found by {finder}' if finder else 'NOT FOUND'}", flush=True)
    print("\n| fault | file | found by | s |\n| --- | --- | --- | --- |")
    for mutant, finder, seconds in table:
        print(f"| {mutant.name} | {mutant.file} | {finder or '**none**'} | {seconds:.0f} |")
    survivors = sum(finder is None for _, finder, _ in table)
    print(f"\n{len(table) - survivors} of {len(table)} faults were found.")
    return survivors


if __name__ == "__main__":
    try:
        sys.exit(bool(main(sys.argv[1:])))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"mutants: {error}")
