"""A release is published only where tag, version and changelog agree, and its files say the version nowhere else."""

import re
import sys
from pathlib import Path

import check_release
import pytest
from check_release import disagreement

import pallas_ce

ROOT = Path(__file__).parents[2]
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
    monkeypatch.setattr(
        check_release, "outdated", lambda _: ["grid.json was measured with kernels a; the code's are b"]
    )
    with pytest.raises(SystemExit, match=r"(?s)grid.json was.*measure these files again"):
        check_release.main()


def test_the_changelog_has_the_version_of_this_release():
    """Between releases, as a version `.dev`, there is nothing to agree with."""
    version = pallas_ce.__version__
    assert ".dev" in version or disagreement(f"v{version}", version, (ROOT / "CHANGELOG.md").read_text()) is None


@pytest.mark.parametrize("file", ["pyproject.toml", "CITATION.cff", "docs/conf.py"])
def test_the_version_is_in_one_place(file):
    assert not re.search(r"^(version|release|__version__):? *=? *[\"'\d]", (ROOT / file).read_text(), re.MULTILINE)
