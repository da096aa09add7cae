"""Measurements in a process of their own: pools of memory only grow, and what has started once stays."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def apart[*Arguments, Result](
    function: Callable[[*Arguments], Result], *arguments: *Arguments, **environment: str
) -> Result:
    """What the function returns in a fresh process with that environment."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning, initializer=_set_environment, initargs=(environment,)) as pool:
        return pool.submit(function, *arguments).result()


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.update(environment)
