"""A release is published only where tag, version and changelog agree, and its files say the version nowhere else."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
disagreement = runpy.run_path(str(ROOT / "tools" / "check_release.py"))["disagreement"]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n"


def test_a_tag_of_the_version_in_the_changelog_may_be_published():
    assert disagreement("v0.2.0", "0.2.0", CHANGELOG) is None


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "words"),
    [
        ("v0.2.0", "0.2.0.dev0", CHANGELOG, "__version__"),
        ("v0.2.1", "0.2.0", CHANGELOG, "name the tag v0.2.0"),
        ("", "0.2.0", CHANGELOG, "name the tag"),
        ("v0.2.0", "0.2.0", "## [Unreleased]\n", "no heading"),
        ("v0.2.0", "0.2.0", "## [0.2.0]\n", "no heading"),
    ],
)
def test_what_disagrees_is_named(tag, version, changelog, words):
    assert words in disagreement(tag, version, changelog)


@pytest.mark.parametrize("file", ["pyproject.toml", "CITATION.cff", "docs/conf.py"])
def test_the_version_is_in_one_place(file):
    assert not re.search(r"^(version|release|__version__):? *=? *[\"'\d]", (ROOT / file).read_text(), re.MULTILINE)
