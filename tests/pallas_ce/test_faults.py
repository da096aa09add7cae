"""What may befall a process that uses the library, done to it: `docs/robustness.md` has the list."""

import concurrent.futures
import importlib
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_cross_entropy
from pallas_ce.backends import packages
from tests.pallas_ce.checks import assert_near_oracle, library_results
from tests.pallas_ce.problems import STREAMED, make


def test_a_call_without_room_is_an_error_and_the_next_one_works() -> None:
    """Stored logits of 2^50 bytes, more than a process can address."""
    hidden = weight = jnp.ones((2**24, 2), jnp.bfloat16)
    labels = jnp.zeros(2**24, int)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        jax.block_until_ready(jax.grad(linear_cross_entropy)(hidden, weight, labels, implementation="reference"))
    few = linear_cross_entropy(np.ones((8, 2)), np.ones((32, 2)), np.zeros(8, int))
    np.testing.assert_allclose(few, np.log(32), rtol=1e-6)


def test_eight_threads_at_once_get_what_one_alone_gets() -> None:
    """Of calls that none has made before, each by two threads: tracing and compiling at the same time."""
    together = threading.Barrier(8)
    given = [make(number, 30 + number, 7, 90) for number in range(4)]

    def work(number: int) -> Any:
        together.wait()
        return library_results(given[number // 2], *STREAMED[number // 2 % 2], scratch_bytes=4000)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(8)))
    for p, one, other in zip(given, found[::2], found[1::2], strict=True):
        assert_near_oracle(p, one)
        jax.tree.map(np.testing.assert_array_equal, one, other)


FORKED = """
import os, warnings
import jax, jax.numpy as jnp, numpy as np
from pallas_ce import linear_cross_entropy
warnings.simplefilter("ignore", RuntimeWarning)  # JAX's own, at the fork
run = jax.jit(jax.value_and_grad(linear_cross_entropy))
given = jnp.ones((64, 8)), jnp.ones((100, 8)), jnp.zeros(64, int)
before = run(*given)
if (child := os.fork()) == 0:
    os._exit(int(np.ones(3).sum()) - 3)  # as a worker that loads data does
assert os.waitpid(child, 0)[1] == 0
after = run(given[0] * 2, *given[1:]), run(*given), run(given[0][:7], given[1], given[2][:7])
assert np.array_equal(before[0], after[1][0])
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_that_forks_workers_goes_on() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", FORKED]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr


def test_a_jax_that_is_too_old_is_named_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    (least,) = re.findall(
        r'^    "jax(>=[0-9.]+)",$', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.MULTILINE
    )
    monkeypatch.setattr(jax, "__version__", "0.10.2.dev20260101")
    words = f"pallas_ce needs jax{least}, and 0.10.2.dev20260101 is installed: pip install --upgrade 'jax{least}'"
    with pytest.raises(ImportError, match=re.escape(words)):
        importlib.reload(packages)
