"""Tables, charts and targets: figures in the documentation match the result files."""

from pathlib import Path

import pytest

from experiments.bench import paper_table, report, targets, training_evidence
from experiments.bench.__main__ import main
from experiments.bench.results import FOLDER, load

DOCUMENTS = load(FOLDER)


def test_the_pages_are_made_from_the_result_files() -> None:
    assert (report.DOCS / "generated" / "performance.md").read_text() == report.site_page(DOCUMENTS) + "\n"
    assert (FOLDER / "gpu_report.md").read_text() == report.markdown(DOCUMENTS) + "\n"
    for module in (paper_table, training_evidence):
        assert (FOLDER / f"{module.NAME}.md").read_text() == module.markdown(DOCUMENTS[module.NAME]) + "\n"
        assert f"{{include}} ../experiments/results/{module.NAME}.md" in (report.DOCS / "evidence.md").read_text()


def test_a_page_of_no_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu_report", "--folder", str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_every_target_is_of_a_file_and_of_numbers_that_are_there() -> None:
    documents = {**DOCUMENTS, "fastest": targets.fastest(DOCUMENTS)}
    assert [row["what"] for t in targets.TARGETS if "value" not in (row := targets.judged(t, documents))] == []


def test_the_figure_shows_what_the_files_hold() -> None:
    time, memory = report.lines(DOCUMENTS)
    point = DOCUMENTS["gpu_head_grid"]["points"]["8192x131072"]["results"]["recompute"]
    assert time["pallas-ce, recompute"][131072] == point["ratio"]
    assert memory["pallas-ce, recompute"][131072] == point["temporary_mib"] + (8192 + 131072) * 4096 * 2 / 2**20
    liger = DOCUMENTS["peers"]["points"]["8192x131072"]["results"]["Liger"]
    assert memory["Liger"][131072] == liger["peak_mib"]
    pages = "".join(page.read_text() for page in report.DOCS.glob("*.md"))
    assert all(f"_static/rivals-{theme}.svg" in pages for theme in ("light", "dark"))


def test_the_papers_megabytes_are_mebibytes_that_count_the_operands() -> None:
    """What the report says of them: a mistyped figure would break it."""
    for (n, v), (_, canonical, _, proposed) in paper_table.TABLE.items():
        operands, logits = 2 * (n + v) * paper_table.H / 2**20, 4 * n * v / 2**20
        assert canonical - 3 * operands - 2 * logits == 16
        assert 16 <= proposed - operands <= 38
    assert "| the paper, forward, float32 logits | 20 | 1.92 | 10.00 |" in (FOLDER / "paper_table.md").read_text()
