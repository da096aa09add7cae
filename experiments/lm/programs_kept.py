"""Compiled programs that outlive the process: JAX's persistent compilation cache, where the run's caches are."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def programs_kept(folder: Path) -> Iterator[None]:
    """Within the block, programs are read from the folder instead of compiled, and those compiled are kept there.

    A folder that JAX was already told of, by `JAX_COMPILATION_CACHE_DIR`, is used instead.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    # Also those that compile in less than a second: a training has dozens of them.
    ours = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in ours}
    try:
        _set(ours)
        yield
    finally:
        _set(before)


def _set(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the options once.
