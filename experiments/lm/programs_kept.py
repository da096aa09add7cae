"""Compiled programs that outlive the process: JAX's persistent compilation cache, where the run's caches are."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def programs_kept(folder: Path, *, anyway: bool = False) -> Iterator[None]:
    """Within the block, programs are read from the folder instead of compiled, and those compiled are kept there.

    A folder that JAX was already told of, by `JAX_COMPILATION_CACHE_DIR`, is used instead, but not `anyway`.
    """
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    if not before[0] or anyway:
        _set(str(folder), 0.0)  # also those that compile in less than a second: a training has dozens of them
    try:
        yield
    finally:
        _set(*before)


def _set(folder: str | None, seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()  # JAX looks at the options once.
