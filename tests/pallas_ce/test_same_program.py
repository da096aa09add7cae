"""A call is one program in every process: the same bits, and found in a compilation cache that they share."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pallas_ce.cases import CASES

ROOT = Path(__file__).parents[2]

# Prints a line for each call of the examples: its name and a digest of its program with gradients.
PROGRAM = """
import hashlib, importlib.util, re
import jax
from pallas_ce import linear_loss
from pallas_ce.backends import device
from tests.pallas_ce.cases import CASES, Sizes, total

def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()

s = Sizes()
for name, case in CASES.items():
    arrays = {x: s.array(x) for x in case.inputs}
    for way in case.ways:
        step = jax.jit(jax.grad(lambda a: total(case.ours(s, a, *way))))
        print(name, *way, digest(step.lower(arrays).as_text()))

def row_loss(row):
    return row.varentropy * row.entropy - row.log_prob * row.mean_logit + row.max_logit * row.sum_sq_probs

# A kernel that is compiled where it is lowered: as it is traced, without the addresses of functions.
device.local_cuda = lambda: "NVIDIA H200"
given = s.array("hidden"), s.array("weight"), s.labels
for backward in ("in_forward", "recompute") if importlib.util.find_spec("triton") else ():
    def loss(*given):
        return linear_loss(row_loss, *given, implementation="triton", backward=backward)
    traced = re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(jax.grad(loss))(*given)))
    print("triton", backward, traced.count("pallas_ce_triton["), digest(traced))
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
    many = sum(len(case.ways) for case in CASES.values())
    assert len(programs[0]) == many + 2 * (importlib.util.find_spec("triton") is not None)
    assert programs[0] == programs[1]
