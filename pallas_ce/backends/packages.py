"""Packages that this library needs: whether they are installed, in a version that works.

pip sees to it, unless it is told not to; without this, a name would be missing.
"""

import functools
import importlib.util
import re
from importlib import metadata

import jax

# What a backend imports beside JAX. Kernels by Triton 3.6 were run on GPUs; 3.7 to 3.9 have compiled them for every
# architecture.
_NEEDED = {"triton": "triton>=3.6,<3.10"}


def refuse_older(user: str, package: str, found: str, least: tuple[int, ...]) -> None:
    """Refuses a version below the least that `user` works with.

    Raises:
        ImportError: it is older.
    """
    if _numbers(found)[: len(least)] < least:
        needed = f"{package}>={'.'.join(map(str, least))}"
        raise ImportError(f"{user} needs {needed}, and {found} is installed: pip install --upgrade '{needed}'")


def refusal(backend: str) -> str | None:
    """Why a backend cannot work with the installed packages, as the end of a sentence; None where it can."""
    if backend not in _NEEDED:
        return None
    needed = _NEEDED[backend]
    package, first, last = re.split(">=|,<", needed)
    if importlib.util.find_spec(package) is None:
        return f"it needs the package {package}: pip install '{needed}'"
    found = _version(package)
    if not (numbers := _numbers(found)) or _numbers(first) <= numbers[:2] < _numbers(last):
        return None
    return f"it does not work with {package} {found}: pip install '{needed}'"


@functools.cache
def _version(package: str) -> str:
    """As installed; "" for a build that does not tell."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


refuse_older("pallas_ce", "jax", jax.__version__, (0, 11, 2))
