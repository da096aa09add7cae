"""Packages that must be new enough. pip sees to it, unless it is told not to; without this, a name would be missing."""

import re

import jax


def refuse_older(user: str, package: str, found: str, least: tuple[int, ...]) -> None:
    """Refuses a version below the least that `user` works with.

    Raises:
        ImportError: it is older.
    """
    numbers = tuple(map(int, re.findall(r"\d+", found)))[: len(least)]
    if numbers < least:
        needed = f"{package}>={'.'.join(map(str, least))}"
        raise ImportError(f"{user} needs {needed}, and {found} is installed: pip install --upgrade '{needed}'")


refuse_older("pallas_ce", "jax", jax.__version__, (0, 11, 2))
