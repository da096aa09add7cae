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


def test_the_promised_extras_exist():
    assert set(metadata.metadata("pallas-ce").get_all("Provides-Extra")) >= EXTRAS


def test_the_oldest_supported_versions_are_declared():
    assert metadata.metadata("pallas-ce")["Requires-Python"] == ">=3.12"
    requirements = metadata.requires("pallas-ce")
    assert "jax>=0.11.1" in requirements
    assert any(line.startswith("jax-triton>=0.3.1") for line in requirements)


def test_the_package_knows_its_version():
    assert pallas_ce.__version__ == metadata.version("pallas-ce")


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_needs_no_optional_dependency(package):
    """An entry of None in sys.modules makes the import of that module fail, as if it were not installed."""
    program = f"import sys; sys.modules.update(dict.fromkeys(['torch', 'triton', 'jax_triton'])); import {package}"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_does_not_start_a_device(package):
    """Starting one takes a GPU's memory and breaks `jax.distributed.initialize`. Here it fails: none has that name."""
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    subprocess.run([sys.executable, "-c", f"import {package}"], env=environment, check=True)
