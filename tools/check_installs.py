"""Follows the quick starts literally in fresh environments: installs what a page says and runs its blocks.

usage: python tools/check_installs.py DIRECTORY     (which holds the wheel; the sdist goes there)

The environments are temporary, and pip fills them from the network or its cache. A page's line for a GPU is followed
without the extra of its CUDA version: `pip install ".[cuda13,torch]"` as `pallas-ce[torch]`.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from check_wheel import build

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/quickstart.md", "README.md")
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
NEEDS = {"JAX": "", "Flax": "flax", "PyTorch": "torch", "Hugging Face": "huggingface"}  # the extra of each section

# Each environment: the file to install, which constraints choose versions, and the extras, one after another.
PLANS = (
    ("pallas_ce-*.tar.gz", "constraints-oldest.txt", ("", "flax")),
    ("pallas_ce-*.whl", None, ("", "flax")),  # the newest
    ("pallas_ce-*.whl", "constraints-jax-0.11.2.txt", ("torch", "huggingface")),
)

# Runs after a page's blocks, as importing anything before them would not be literal.
ORIGIN = """
import importlib.metadata, sys, pallas_ce
assert pallas_ce.__file__.startswith(sys.prefix), f"{pallas_ce.__file__} is not what was installed"
shown = ("jax", "numpy", "flax", "optax", "torch", "transformers")
print(*sorted(f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name in shown), sep=", ")
"""


def python_blocks(page: str) -> list[str]:
    """Returns the Python blocks of a page's text, in order."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def installs(page: str) -> set[str]:
    """Returns what a page installs: the extras of each request, without a GPU platform's, as in `torch,trl`.

    Raises:
        ValueError: the page installs something else, or names an extra that is not declared.
    """
    found = set()
    request = r'"(?:pallas-ce|\.)\[(.*?)\]"|extra `(.*?)`|pip install (?!"(?:pallas-ce|\.)\[)(\S+)'
    for bracketed, named, other in re.findall(request, page):
        if other.strip("`") not in ("", ".", '"pallas-ce"'):
            raise ValueError(f"`pip install {other}` is none of this project")
        extras = {extra for extra in (bracketed or named).split(",") if extra}
        if extras - EXTRAS:
            raise ValueError(f"there is no extra {sorted(extras - EXTRAS)}: pyproject.toml declares {sorted(EXTRAS)}")
        found.add(",".join(sorted(extras - {"cuda12", "cuda13"})))
    return found


def examples(page: str) -> list[tuple[str, str]]:
    """Returns the Python blocks of a quick start in order, each after the extra that its section's framework needs.

    Raises:
        ValueError: a block is of no framework in `NEEDS`, or the page does not install exactly what its blocks need.
    """
    before, *sections = re.split(r"^(?:## |\*\*)(.*)$", page, flags=re.MULTILINE)
    found = []
    for title, text in zip(("", *sections[::2]), (before, *sections[1::2]), strict=True):
        for block in python_blocks(text):
            need = [extra for framework, extra in NEEDS.items() if title.startswith(framework)]
            if not need:
                raise ValueError(f"a block below {title!r} is of no framework in {sorted(NEEDS)}")
            found.append((need[0], block))
    needed = {extra for extra, _ in found}
    if installs(page) != needed:
        raise ValueError(f"the page installs the extras {sorted(installs(page))}, its blocks need {sorted(needed)}")
    return found


def program(page: str, extras: Sequence[str]) -> str:
    """Returns the blocks of a quick start that an environment with `extras` can run, in order, as one program."""
    return "\n".join(block for extra, block in examples(page) if extra in ("", *extras))


def follow(source: Path, constraints: str | None, extras: Sequence[str]) -> None:
    """Makes a fresh environment; after each of its installations runs what the pages show for it."""
    options = ["--constraint", str(ROOT / "tools" / constraints)] if constraints else []
    with tempfile.TemporaryDirectory() as temporary:
        venv.create(Path(temporary, "environment"), with_pip=True, symlinks=True)
        python = f"{temporary}/environment/bin/python"
        pip = [python, "-I", "-m", "pip", "--disable-pip-version-check"]
        for number, extra in enumerate(extras, 1):
            request = f"{source}[{extra}]" if extra else str(source)
            subprocess.run([*pip, "install", "-qq", "--no-compile", *options, request], check=True)
            subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
            for page in PAGES:
                script = Path(temporary, "followed.py")
                script.write_text(program((ROOT / page).read_text(), extras[:number]) + ORIGIN)
                print(f"{Path(request).name}, {page}: ", end="", flush=True)
                # -I: neither the current directory nor PYTHONPATH can supply the packages.
                subprocess.run([python, "-I", "-W", "error", str(script)], check=True, cwd=temporary)


def check_sources(sdist: Path) -> None:
    """Runs, in the unpacked source distribution, the tests that read the project's files."""
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary, filter="data")
        tests = ["tests/packaging", "-k", "not example", "-p", "no:cacheprovider", "-q", "--no-header"]
        root = Path(temporary, sdist.name.removesuffix(".tar.gz"))
        subprocess.run([sys.executable, "-m", "pytest", *tests], check=True, cwd=root)


def main() -> None:
    """Builds the source distribution, runs its tests of files, and follows every plan."""
    directory = Path(sys.argv[1]).resolve()
    check_sources(build("sdist", directory))
    for pattern, constraints, extras in PLANS:
        (source,) = directory.glob(pattern)
        follow(source, constraints, extras)


if __name__ == "__main__":
    main()
