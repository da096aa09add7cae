"""Builds what a release publishes, after checking that tag, version and changelog agree, and pages with the kernels.

usage: TAG=v0.2.0 python tools/check_release.py DIRECTORY        (where the wheel is; the sdist goes there)
"""

import os
import re
import sys
from pathlib import Path

import jax
from check_wheel import build
from kernels_digest import outdated

from experiments.bench import results

ROOT = Path(__file__).resolve().parent.parent


def disagreement(tag: str, version: str, changelog: str) -> str | None:
    """What keeps `tag` from being published, in a sentence; None if nothing does."""
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        return f"the version is {version!r}: set `__version__` in pallas_ce/__init__.py to that of the release"
    if tag != f"v{version}":
        return f"the tag is {tag!r}, but the version is {version!r}: name the tag v{version}"
    if re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE) is None:
        return f"CHANGELOG.md has no heading `## [{version}] - YEAR-MONTH-DAY`"
    return None


def main() -> None:
    """Exits with the reason where tag, version and changelog disagree, or a page quotes results of other kernels.

    Else it builds the source distribution.
    """
    directory = Path(sys.argv[1]).resolve()
    (wheel,) = directory.glob("pallas_ce-*.whl")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if reason := disagreement(os.environ.get("TAG", ""), wheel.name.split("-")[1], changelog):
        sys.exit(reason)
    documents = results.load(results.FOLDER)  # all of them: the report quotes each
    if reasons := list(outdated(documents)):
        sys.exit("\n".join([*reasons, "measure these files again, since pages quote them"]))
    others = [name for name, document in documents.items() if document["machine"]["jax"] != jax.__version__]
    print("measured with another jax, whose kernels are not compared:", ", ".join(others) or "none")
    build("sdist", directory)
    print(*sorted(path.name for path in directory.glob("pallas_ce-*")), sep="\n")


if __name__ == "__main__":
    main()
