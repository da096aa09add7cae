"""Builds the wheel and tests it as a user gets it: installed in an environment of its own, run away from the sources.

usage: python tools/check_wheel.py DIRECTORY        (where to leave the wheel)

The new environment borrows the dependencies of the one that runs this script, so nothing is downloaded twice; the three
packages themselves can only come from the wheel.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_ce", "flax_modules", "torch_bridge")
DATA_SUFFIXES = {".py", ".toml"}

EXAMPLE = """
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch

sys.modules.update(flax=None, optax=None)  # as if they were not installed: extras bring them
import pallas_ce
import torch_bridge

assert importlib.metadata.version("pallas-ce") == sys.argv[1]

hidden, weight = jax.random.normal(jax.random.key(0), (5, 8)), jax.random.normal(jax.random.key(1), (11, 8))
labels = jnp.array([0, 10, -100, 3, 4])


def expected(hidden, weight):
    log_probs = jax.nn.log_softmax(hidden @ weight.T)[jnp.arange(5), labels]
    return -jnp.where(labels >= 0, log_probs, 0).sum() / 4


def fused(hidden, weight):
    return pallas_ce.linear_cross_entropy(hidden, weight, labels)


got, want = (jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(hidden, weight)) for loss in (fused, expected))
for ours, plain in zip(got, want, strict=True):
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)

tensors = [torch.tensor(np.array(x)) for x in (hidden, weight, labels)]
loss = torch_bridge.linear_cross_entropy(*tensors).item()
np.testing.assert_allclose(loss, fused(hidden, weight), rtol=1e-5)

del sys.modules["flax"], sys.modules["optax"]
import flax_modules.nnx

for package in (pallas_ce, flax_modules, torch_bridge):
    assert package.__file__.startswith(sys.prefix), f"{package.__file__} does not come from the wheel"
"""


def build(kind: str, directory: Path) -> Path:
    """Returns the path of the freshly built "wheel" or "sdist", the only one of this project in `directory`."""
    pattern = {"wheel": "pallas_ce-*.whl", "sdist": "pallas_ce-*.tar.gz"}[kind]
    for old in directory.glob(pattern):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--quiet", f"--{kind}", "--outdir", directory, ROOT], check=True)
    (built,) = directory.glob(pattern)
    return built


def check_contents(wheel: Path) -> None:
    """Raises AssertionError unless the wheel holds the three packages, their data and the licence, and nothing else."""
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    metadata = {name for name in names if name.parts[0].endswith(".dist-info")}
    assert any(name.name == "LICENSE" for name in metadata), f"no LICENSE in {wheel.name}"
    for name in set(names) - metadata:
        assert name.parts[0] in PACKAGES, f"{name} does not belong in {wheel.name}"
        assert name.name == "py.typed" or name.suffix in DATA_SUFFIXES, f"{name} does not belong in {wheel.name}"
    for package in PACKAGES:
        sources = {p.relative_to(ROOT) for p in (ROOT / package).rglob("*") if p.suffix in DATA_SUFFIXES}
        missing = (sources | {Path(package, "py.typed")}) - set(names)
        assert not missing, f"{wheel.name} lacks {sorted(map(str, missing))}"


def run_example(wheel: Path) -> None:
    """Installs the wheel in a temporary environment and runs `EXAMPLE` there."""
    with tempfile.TemporaryDirectory() as temporary:
        environment = Path(temporary, "environment")
        venv.create(environment, symlinks=True)
        python = str(environment / "bin/python")
        site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-qq", "--no-deps", "--no-index", str(wheel)], check=True)
        (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # -I: neither the current directory nor PYTHONPATH can supply the packages.
        example = [python, "-I", "-W", "error", "-c", EXAMPLE, wheel.name.split("-")[1]]
        subprocess.run(example, check=True, cwd=temporary)


def main() -> None:
    """Builds the wheel, checks its contents and runs an example from it."""
    wheel = build("wheel", Path(sys.argv[1]).resolve())
    check_contents(wheel)
    run_example(wheel)
    print(f"{wheel.name}: built, complete, and its example runs")


if __name__ == "__main__":
    main()
