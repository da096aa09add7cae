"""Settings and fixtures for all tests."""

import os

# Before JAX starts. The tests compile thousands of small programs and run each once: LLVM's optimisation costs more
# than it gains. Fusion and memory assignment, which some tests read, do not depend on it. And a test process of several
# is faster on processors of its own, without threads that wait for each other's turn.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
        processors, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, processors[int(worker.removeprefix("gw")) % len(processors) :: workers])
    # XLA's threads, of which every warpgroup that the GPU interpreter has waiting keeps one.
    os.environ.setdefault("NPROC", "16")

import hypothesis
import jax
import pytest

# Drawn examples compile, so they have no deadline; they are the same on every machine and in every run.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=20, print_blob=True)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"), max_examples=300)
hypothesis.settings.register_profile("quick", parent=hypothesis.settings.get_profile("default"), max_examples=5)
hypothesis.settings.load_profile("default")


@pytest.fixture
def key() -> jax.Array:
    """A random key."""
    return jax.random.key(0)
