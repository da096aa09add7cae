"""Figures in the documentation are those of the result files."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import command_line, site
from experiments.bench import drawings, paper, report, training_report
from experiments.bench.results import FOLDER, read


def test_the_performance_page_has_the_tables_of_the_result_files() -> None:
    assert (site.DOCS / "generated" / "performance.md").read_text() == site.page(FOLDER)


@pytest.mark.parametrize(
    ("name", "markdown"), [("paper_table", paper.markdown), (training_report.NAME, training_report.markdown)]
)
def test_the_evidence_page_includes_the_reports_of_the_result_files(name: str, markdown: Any) -> None:
    assert (FOLDER / f"{name}.md").read_text() == markdown(read(FOLDER / f"{name}.json"))
    assert f"{{include}} ../experiments/results/{name}.md" in (site.DOCS / "evidence.md").read_text()


def test_every_figure_is_written_for_light_and_dark_pages_and_is_on_a_page(tmp_path: Path) -> None:
    written = [path.relative_to(tmp_path) for path in site.write(FOLDER, tmp_path) if path.suffix == ".svg"]
    assert len(written) == 3 * len(drawings.THEMES)
    pages = "".join(page.read_text() for page in site.DOCS.glob("*.md"))
    for figure in written:
        assert figure.as_posix() in pages
        assert (site.DOCS / figure).is_file()


def test_what_lines_show_is_what_the_files_hold() -> None:
    documents = report.load(FOLDER)
    time, memory = site.lines(documents)
    point = documents["grid"]["points"]["8192x131072"]
    assert time["pallas-ce, recompute"][131072] == point["results"]["recompute"]["ratio"]
    gradients = (8192 + 131072) * 4096 * 2 / 2**20
    assert memory["pallas-ce, recompute"][131072] == point["results"]["recompute"]["temporary_mib"] + gradients
    assert memory["Liger"][131072] == documents["peers"]["points"]["8192x131072"]["results"]["Liger"]["peak_mib"]


def test_result_files_are_as_the_writer_writes_them() -> None:
    """A program's samples on one line, so that a file has a line a program. Another package writes `check_device`'s."""
    files = [path for path in FOLDER.glob("*.json") if not path.name.startswith("check_device")]
    for path in files:
        assert path.read_text() == command_line.as_json(json.loads(path.read_text())) + "\n", path.name
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.json")) <= 8000
