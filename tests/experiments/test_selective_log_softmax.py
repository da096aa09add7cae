"""The benchmark of selective log-softmax, on a tiny problem."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from experiments import selective_log_softmax as benchmark  # noqa: E402

TINY = ["--tokens", "64", "--batch", "4", "--repeats", "1", "--no-compiled"]


def test_it_measures_every_method_and_writes_results_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    benchmark.main([*TINY, "--vocabularies", "512", "1024", "--out", str(out)])
    record = json.loads(out.read_text(encoding="utf-8"))
    rows = {(r["dtype"], r["vocabulary"], r["pass"], r["method"]): r for r in record["results"]}
    assert len(rows) == 2 * 2 * 2 * 5
    assert {"torch", "device", "tokens", "batch"} <= set(record)
    printed = capsys.readouterr().out
    for (dtype, vocabulary, _, method), row in rows.items():
        assert f"{method:17}" in printed
        assert row["seconds"] > 0
        assert row["logits_bytes"] == 4 * 64 * vocabulary * (4 if dtype == "float32" else 2)
        exact = dtype == "float32" or method == "ours"
        assert row["largest_error"] < 1e-5 if exact else row["largest_error"] > 1e-3
    picture = out.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    out.with_suffix(".png").unlink()
    benchmark.main(["--plot", str(out)])
    assert out.with_suffix(".png").read_bytes() == picture


def test_memory_is_counted_at_the_peak() -> None:
    def run() -> None:
        first = torch.ones(1000)
        second = first * 2
        del first
        third = second * 2
        del second, third

    scalars = 100  # the operators' own temporaries
    assert 8000 <= benchmark.peak_bytes(run, "cpu") <= 8000 + scalars


def test_naive_takes_the_logits_again_and_the_sequences_one_by_one_a_share() -> None:
    rows = benchmark.measure("float32", 1024, 64, 4, "cpu", 1, compiled=False)
    peak = {row["method"]: row["peak_bytes"] / row["logits_bytes"] for row in rows if row["pass"] == "forward"}
    assert peak["naive"] >= 1
    assert peak["take1"] >= 1
    assert peak["take2"] < 0.6
    assert peak["ablation1"] < 0.6
