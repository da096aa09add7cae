"""What a backend imports beside JAX: whether it is installed, in a version that works with JAX's own parts."""

import functools
import importlib.util
import re
from importlib import metadata
from typing import NamedTuple


class _Range(NamedTuple):
    """Versions of a package that work, from the first on and before the last."""

    package: str
    first: tuple[int, int]
    last: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.package}>={_words(self.first)},<{_words(self.last)}"


# By backend. Kernels by Triton 3.6 were run on GPUs; 3.7 to 3.9 have compiled them for every architecture.
_NEEDED = {"triton": _Range("triton", (3, 6), (3, 10))}


def refusal(backend: str) -> str | None:
    """Why a backend cannot work with the installed packages, as the end of a sentence; None where it can."""
    needed = _NEEDED.get(backend)
    if needed is None:
        return None
    if importlib.util.find_spec(needed.package) is None:
        return f"it needs the package {needed.package}: pip install '{needed}'"
    found = _version(needed.package)
    version = re.match(r"(\d+)\.(\d+)", found)
    if version is None or needed.first <= (int(version[1]), int(version[2])) < needed.last:
        return None
    return f"it does not work with {needed.package} {found}: pip install '{needed}'"


@functools.cache
def _version(package: str) -> str:
    """As installed; "" for a build that does not tell."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _words(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
