"""A call is one program in every process: the same bits, and found in a compilation cache that they share."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Prints a line for each call: its name and a digest of its program.
PROGRAM = """
import functools, hashlib, importlib.util, re
import jax, jax.numpy as jnp
from pallas_ce import cross_entropy, linear_cross_entropy, linear_loss, linear_row_statistics
from pallas_ce.backends import device

n, v, h = 64, 96, 16
hidden, weight, logits = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, h), (v, h), (n, v)))
labels, class_weights = jax.ShapeDtypeStruct((n,), jnp.int32), jnp.ones(v)

def show(name, loss, *arrays, has_aux=False):
    lowered = jax.jit(jax.value_and_grad(loss, has_aux=has_aux)).lower(*arrays)
    print(name, hashlib.sha256(lowered.as_text().encode()).hexdigest())

def row_loss(row):
    return row.varentropy * row.entropy - row.log_prob * row.mean_logit + row.max_logit * row.sum_sq_probs

def of_statistics(hidden, weight, labels, **options):
    names = ("varentropy", "entropy", "log_prob", "mean_logit", "max_logit", "sum_sq_probs", "argmax")
    found = linear_row_statistics(hidden, weight, labels, statistics=names, **options)
    return jnp.sum(row_loss(found))

for how in ({"backward": "in_forward"}, {"backward": "recompute"}, {"implementation": "reference"}):
    for options in ({"label_smoothing": 0.1, "class_weights": class_weights}, {"return_metrics": True}):
        loss = functools.partial(linear_cross_entropy, **how, **options)
        show((how, tuple(options)), loss, hidden, weight, labels, has_aux="return_metrics" in options)
    show((how, "linear_loss"), functools.partial(linear_loss, row_loss, **how), hidden, weight, labels)
for implementation in ("xla", "reference"):
    loss = functools.partial(of_statistics, implementation=implementation)
    show((implementation, "linear_row_statistics"), loss, hidden, weight, labels)
for reduction in ("mean", "none"):
    def stored(logits, labels):
        return jnp.sum(cross_entropy(logits, labels, label_smoothing=0.1, z_loss=1e-4, reduction=reduction))
    show((reduction, "cross_entropy"), stored, logits, labels)

# A kernel that is compiled where it is lowered: as it is traced, without the addresses of functions.
device.local_cuda = lambda: "NVIDIA H200"
for backward in ("in_forward", "recompute") if importlib.util.find_spec("triton") else ():
    loss = functools.partial(linear_loss, row_loss, implementation="triton", backward=backward)
    traced = re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(jax.grad(loss))(hidden, weight, labels)))
    print("triton", backward, traced.count("pallas_ce_triton["), hashlib.sha256(traced.encode()).hexdigest())
"""


@pytest.mark.nightly
def test_pythons_hash_seed_changes_no_program():
    """Names of statistics stand in sets, whose order it decides."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, text=True,
        )
        for seed in ("0", "1")
    ]  # fmt: skip
    programs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(programs[0]) == 13 + 2 * (importlib.util.find_spec("triton") is not None)
    assert programs[0] == programs[1]
