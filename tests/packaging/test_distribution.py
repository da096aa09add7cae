"""The distribution's metadata, as installed, says what the project promises."""

import os
import subprocess
import sys
from importlib import metadata, resources

import pytest

import pallas_ce

PACKAGES = ("pallas_ce", "flax_modules", "torch_bridge")
EXTRAS = {"cuda12", "cuda13", "triton", "torch", "huggingface", "experiments", "dev"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_declares_its_types(package):
    assert resources.files(package).joinpath("py.typed").is_file()


def test_version_extras_and_the_oldest_supported_versions_are_declared():
    declared, requirements = metadata.metadata("pallas-ce"), metadata.requires("pallas-ce")
    assert pallas_ce.__version__ == declared["Version"]
    assert set(declared.get_all("Provides-Extra")) >= EXTRAS
    assert declared["Requires-Python"] == ">=3.12"
    assert "jax>=0.11.1" in requirements
    assert any(line.startswith("jax-triton>=0.3.1") for line in requirements)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_needs_no_optional_dependency_and_starts_no_device(package):
    """An entry of None in sys.modules makes the import of that module fail, as if it were not installed.

    Starting a device takes a GPU's memory and breaks `jax.distributed.initialize`. Here it fails: none has that name.
    """
    program = f"import sys; sys.modules.update(dict.fromkeys(['torch', 'triton', 'jax_triton'])); import {package}"
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    subprocess.run([sys.executable, "-W", "error", "-c", program], env=environment, check=True)
