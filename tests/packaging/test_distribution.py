"""What the metadata promises; and a release is published only where tag, version and changelog agree."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import check_release
import pytest
from check_release import disagreement

import pallas_ce
from flax_modules.integrations import maxtext, tunix
from pallas_ce.backends import packages

ROOT = Path(__file__).parents[2]
EXTRAS = {"cuda12", "cuda13", "flax", "triton", "torch", "huggingface", "trl", "qlora", "experiments", "docs", "dev"}


def test_version_extras_and_the_oldest_supported_versions_are_declared():
    declared, requirements = metadata.metadata("pallas-ce"), metadata.requires("pallas-ce")
    assert pallas_ce.__version__ == declared["Version"]
    assert set(declared.get_all("Provides-Extra")) >= EXTRAS
    assert declared["Requires-Python"] == ">=3.12"
    assert "jax>=0.11.2" in requirements
    required = {re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0] for line in requirements if "extra" not in line}
    assert required == {"jax", "numpy"}


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "triton"])
def test_an_extra_for_a_gpu_brings_the_triton_that_the_kernels_take(extra):
    lines = [line for line in metadata.requires("pallas-ce") if line.endswith(f"extra == '{extra}'")]
    (versions,) = (line.removeprefix("triton").partition(";")[0] for line in lines if line.startswith("triton"))
    assert set(versions.split(",")) == set(packages._NEEDED["triton"].removeprefix("triton").split(","))


def test_the_page_the_pins_and_the_extra_have_the_versions_that_tests_run():
    page = (ROOT / "docs" / "coming_from.md").read_text().split("\n### What installs beside what\n")[1]
    of_page = dict(re.findall(r"([a-z][\w-]+) (\d[\w.]*)", " ".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))))
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainers"]
    pins = (ROOT / "tools" / "constraints-jax-0.11.2.txt").read_text()
    tested = {"google-tunix": tunix.TESTED, "maxtext": maxtext.TESTED}
    declared = (tested, dict(x.split(">=") for x in extra if ">=" in x), dict(re.findall(r"^(.+)==(.+)$", pins, re.M)))
    assert of_page.keys() == {*tested, "keras", "keras-hub", "tokamax", "marin-levanter"}
    for name, version in of_page.items():
        assert {x[name] for x in declared if name in x} == {version}


@pytest.mark.parametrize("package", ["pallas_ce", "torch_bridge"])
def test_importing_a_package_needs_no_optional_dependency_and_starts_no_device(package):
    """An entry of None in sys.modules makes the import of that module fail, as if it were not installed.

    Starting a device takes a GPU's memory and breaks `jax.distributed.initialize`. Here it fails: none has that name.
    """
    program = f"import sys; sys.modules.update(dict.fromkeys(['flax', 'optax', 'torch', 'triton'])); import {package}"
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    subprocess.run([sys.executable, "-W", "error", "-c", program], env=environment, check=True)


@pytest.mark.parametrize("module", ["flax_modules", "flax_modules.nnx", "flax_modules.linen"])
def test_without_flax_its_modules_name_the_extra(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flax_modules"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install '.[flax]' in a clone")):
        importlib.import_module(module)


CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "words"),
    [
        ("v0.2.0", "0.2.0", CHANGELOG, "None"),  # it may be published
        ("v0.2.0", "0.2.0.dev0", CHANGELOG, "__version__"),
        ("v0.2.1", "0.2.0", CHANGELOG, "name the tag v0.2.0"),
        ("", "0.2.0", CHANGELOG, "name the tag"),
        ("v0.2.0", "0.2.0", "## [Unreleased]\n", "no heading"),
        ("v0.2.0", "0.2.0", "## [0.2.0]\n", "no heading"),
    ],
)
def test_what_disagrees_is_named(tag, version, changelog, words):
    assert words in str(disagreement(tag, version, changelog))


def test_a_release_is_refused_where_pages_quote_results_of_other_kernels(tmp_path, monkeypatch):
    (tmp_path / "pallas_ce-0.2.0-py3-none-any.whl").touch()
    monkeypatch.setattr(sys, "argv", ["check_release.py", str(tmp_path)])
    monkeypatch.setattr(check_release, "disagreement", lambda *_: None)
    monkeypatch.setattr(check_release, "outdated", lambda _: ["grid.json was measured with others"])
    with pytest.raises(SystemExit, match=r"(?s)grid.json was.*measure these files again"):
        check_release.main()


def test_the_changelog_has_the_version_of_this_release():
    """Between releases, as a version `.dev`, there is nothing to agree with."""
    version = pallas_ce.__version__
    assert ".dev" in version or disagreement(f"v{version}", version, (ROOT / "CHANGELOG.md").read_text()) is None


@pytest.mark.parametrize("file", ["pyproject.toml", "CITATION.cff", "docs/conf.py"])
def test_the_version_is_in_one_place(file):
    assert not re.search(r"^(version|release|__version__):? *=? *[\"'\d]", (ROOT / file).read_text(), re.MULTILINE)
