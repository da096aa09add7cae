"""Memory maps of this process: each kernel of a program compiled for the CPU keeps three, and Linux allows 65,530."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# A quarter leaves one test room for two hundred programs, and keeps counting below 20 ms.
MOST = int(_LIMIT.read_text()) // 4 if _LIMIT.exists() else 0


def count() -> int:
    """How many this process has; 0 where the system does not tell."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def give_back() -> None:
    """Drops compiled programs when this process has more than `MOST`. XLA crashes where Linux refuses another map."""
    if count() > MOST:
        jax.clear_caches()


def giving_back(test: Callable[..., Any]) -> Callable[..., Any]:
    """`test`, and `give_back` after each run."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return test(*args, **kwargs)
        finally:
            give_back()

    return run
