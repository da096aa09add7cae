"""Tables, charts and targets: figures in the documentation match the result files."""

from pathlib import Path
from typing import Any

import pytest

from experiments.bench import paper_table, report, targets, training_evidence
from experiments.bench.__main__ import main
from experiments.bench.results import FOLDER, load
from experiments.bench.tables import table
from experiments.charts import Panel, chart

DOCUMENTS = load(FOLDER)


def record(**ratios: float) -> dict[str, Any]:
    """A point whose bare product takes a millisecond and the three products three."""
    found = {name: {"ratio": ratio, "ms": ratio, "temporary_mib": 100.0} for name, ratio in ratios.items()}
    return {"n": 1024, "v": 32768, "h": 256, "results": found}


def judged(select: str, points: Any, **more: Any) -> Any:
    target = {"what": "", "file": "x", "select": select, "at_most": 2, **more}
    return targets.judged(target, {"x": {"points": points}})


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


def test_values_are_means_worst_points_quotients_and_differences() -> None:
    points = {"a": record(forward=1.0, in_forward=3.0), "b": record(forward=4.0, in_forward=2.0), "idle": {"mib": 60}}
    assert judged("*/forward/ratio", points, of="mean")["value"] == pytest.approx(2.0)
    assert judged("*/forward/ratio", points)["value"] == 4.0
    assert judged("*/forward/ratio", points)["reached"] == "no"
    assert judged("*/in_forward/ms", points, over="*/forward/ms")["value"] == 3.0
    assert judged("a/forward/temporary_mib", points, minus="idle/mib")["value"] == 40.0
    assert judged("*/in_forward/temporary_mib", points, plus="*/gradients_mib")["value"] == 100.0 + 16.5
    assert judged("*/forward/ratio", points, where={"v": [0, 10]}) == judged("none/forward/ratio", points) | {
        "select": "*/forward/ratio",
        "where": {"v": [0, 10]},
    }
    low = targets.judged({"file": "x", "select": "*/forward/ratio", "at_least": 1}, {"x": {"points": points}})
    assert (low["value"], low["bound"], low["reached"]) == (1.0, "≥ 1", "yes")


def test_a_win_is_over_stored_logits_and_every_peer_where_all_were_timed_beside_ours() -> None:
    ours = {"a": record(in_forward=1.0, canonical=1.03), "b": record(in_forward=1.1, canonical=1.03)}

    def peer(name: str, ratio: float, at: str = "ab") -> Any:
        return {point: record(**{name: ratio, "in_forward": 1.0}) for point in at}

    assert targets.wins("in_forward", ours) == (1, 2)
    assert targets.wins("in_forward", ours, peer("quack", 0.99)) == (0, 2)
    assert targets.wins("in_forward", ours, peer("forward quack", 0.5)) == (1, 2)
    assert targets.wins("in_forward", ours, peer("quack", 1.2), peer("Liger", 1.2, at="a")) == (1, 1)
    # Of one that was timed in two processes, their mean counts.
    assert targets.wins("in_forward", ours, peer("quack", 0.99), peer("quack", 1.02)) == (1, 2)


def test_the_figure_shows_what_the_files_hold() -> None:
    time, memory = report.lines(DOCUMENTS)
    point = DOCUMENTS["gpu_head_grid"]["points"]["8192x131072"]["results"]["recompute"]
    assert time["pallas-ce, recompute"][131072] == point["ratio"]
    assert memory["pallas-ce, recompute"][131072] == point["temporary_mib"] + (8192 + 131072) * 4096 * 2 / 2**20
    liger = DOCUMENTS["peers"]["points"]["8192x131072"]["results"]["Liger"]
    assert memory["Liger"][131072] == liger["peak_mib"]
    pages = "".join(page.read_text() for page in report.DOCS.glob("*.md"))
    assert all(f"_static/rivals-{theme}.svg" in pages for theme in ("light", "dark"))


def test_a_table_has_a_dash_where_a_row_lacks_an_entry() -> None:
    columns = {"name": "{name}", "ms": "{ms:.1f}", "twice": lambda row: f"{2 * row['ms']:.0f}"}
    made = table([{"name": "a", "ms": 1.25}, {"name": "b", "ms": None}, {"name": "c"}], columns)
    assert made.splitlines()[2:] == ["| a | 1.2 | 2 |", "| b | – | – |", "| c | – | – |"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_chart_is_the_same_from_the_same_numbers(tmp_path: Path, suffix: str) -> None:
    panels = [Panel({"pallas-ce": {1: 1.0, 2: 2.0}}, log="xy"), Panel({"a": {"x": 1.0}, "b": {"y": 2.0}})]
    one, two = (chart(tmp_path / f"{name}.{suffix}", panels, "title").read_bytes() for name in "ab")
    assert one == two


def test_the_papers_megabytes_are_mebibytes_that_count_the_operands() -> None:
    """What the report says of them: a mistyped figure would break it."""
    for (n, v), (_, canonical, _, proposed) in paper_table.TABLE.items():
        operands, logits = 2 * (n + v) * paper_table.H / 2**20, 4 * n * v / 2**20
        assert canonical - 3 * operands - 2 * logits == 16
        assert 16 <= proposed - operands <= 38
    assert "| the paper, forward, float32 logits | 20 | 1.92 | 10.00 |" in (FOLDER / "paper_table.md").read_text()
