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

from pallas_ce import linear_cross_entropy, versions
from tests.pallas_ce.checks import assert_near_oracle, library_results
from tests.pallas_ce.problems import STREAMED, WAYS, make

N, H, V = 12, 5, 31
PLACES: dict[str, tuple[int, ...]] = {
    "hidden": (3, 2), "weight": (4, 1), "bias": (4,), "logit_scale": (), "token_weights": (3,)
}  # fmt: skip


@pytest.mark.parametrize(("implementation", "backward"), WAYS)
def test_what_is_not_finite_shows_in_its_rows_and_in_no_other(implementation: Any, backward: Any) -> None:
    """NaN and infinities, in each operand: the losses that NumPy's logits have, and gradients of untouched rows."""
    p = make(0, N, H, V)
    labels = np.arange(N) % V
    clean = p.arrays | {"bias": np.ones(V, np.float32), "logit_scale": np.float32(0.7), "token_weights": np.ones(N)}
    clean = {name: np.float32(x) for name, x in clean.items()}
    by_row = implementation == "reference" or backward == "recompute"

    def loss(arrays: Any) -> Any:
        options = {"implementation": implementation, "backward": backward, "reduction": "none" if by_row else "mean"}
        return linear_cross_entropy(**arrays, labels=labels, **options)

    run = jax.jit(jax.value_and_grad(lambda arrays: (lambda x: (jnp.sum(x), x))(loss(arrays)), has_aux=True))
    (_, want), right = run(clean)
    for name, place in PLACES.items():
        for bad in (np.nan, np.inf, -np.inf):
            arrays = clean | {name: np.array(clean[name])}
            arrays[name][place] = bad
            with np.errstate(all="ignore"):
                z = arrays["logit_scale"] * (arrays["hidden"] @ arrays["weight"].T + arrays["bias"])
                lse = np.log(np.sum(np.exp(z - z.max(1, keepdims=True)), 1)) + z.max(1)
                each = arrays["token_weights"] * (lse - z[np.arange(N), labels])
            (_, found), gradients = run(arrays)
            good = np.isfinite(each)
            if name in ("hidden", "token_weights"):
                assert good.sum() == N - 1
            np.testing.assert_array_equal(np.isfinite(found), good if by_row else good.all(), err_msg=f"{name} {bad}")
            if name == "hidden":
                assert not np.isfinite(gradients["weight"]).all()
                others = np.arange(N) != place[0]
                np.testing.assert_allclose(gradients["hidden"][others], right["hidden"][others], rtol=1e-5, atol=1e-7)
                if by_row:
                    np.testing.assert_allclose(found[others], want[others], rtol=1e-6)


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
        importlib.reload(versions)
