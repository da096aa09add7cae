"""The command that compares the training loop with its compiled step, at small sizes."""

import json
from pathlib import Path

import pytest

from experiments import train_speed
from experiments.bench import lm_training, report, summary
from experiments.bench.lm_training import HEADS


def test_a_dry_run_compares_each_loop_with_its_step(
    text: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cache)
    monkeypatch.setattr(lm_training, "apart", lambda function, *given, **_: function(*given))
    words = ["--dry-run", "--data", str(text), "--steps", "5", "--rounds", "2", "--out", str(tmp_path)]
    assert train_speed.main(words) == 0
    assert "fused / canonical" in capsys.readouterr().out
    document = json.loads((tmp_path / "train_speed.json").read_text())
    found = document["points"]["defaults"]
    milliseconds = {head: {kind: found["results"][head][kind]["ms"] for kind in ("loop", "step")} for head in HEADS}
    for head, result in found["results"].items():
        assert result["ratio"] == milliseconds[head]["step"] / milliseconds[head]["loop"]
        assert result["tokens_per_second"] == pytest.approx(8 * 16 / (1e-3 * milliseconds[head]["loop"]))
        assert len(result["loop"]["samples"]) == 2
        before, after = (result["start"][when] for when in ("before", "after"))
        assert 0 < after["backend_seconds"] < before["backend_seconds"] / 2  # what is kept is only loaded
        assert min(before["compile_seconds"], before["first_step_seconds"]) > 0
    assert found["fused_to_canonical"] == milliseconds["canonical"]["loop"] / milliseconds["fused"]["loop"]

    figures = {target.what: target.value for target in summary.targets({"train_speed": document["points"]})}
    worst = min(result["ratio"] for result in found["results"].values())
    assert figures["train_lm, its rate / its compiled step's, worst head"] == worst
    assert figures["train_lm, its rate with the fused head / with stored logits"] == found["fused_to_canonical"]
    starts = {head: found["results"][head]["start"] for head in HEADS}
    first = {head: start["before"]["compile_seconds"] for head, start in starts.items()}
    more = figures["train_lm, seconds to compile with the fused head beyond stored logits"]
    assert more == first["fused"] - first["canonical"]
    kept = figures["train_lm, seconds in the compiler at a second start, worst head"]
    assert kept == max(start["after"]["backend_seconds"] for start in starts.values())
    (answers,) = document["points"]["grpo"]["results"].values()
    assert answers["ratio"] == answers["step"]["ms"] / answers["loop"]["ms"]
    assert figures["grpo, its rate / its compiled step's, worst head"] == answers["ratio"]
    report.write(tmp_path)
    written = (tmp_path / "gpu_report.md").read_text()
    assert f"| train_lm | fused | {found['results']['fused']['ratio']:.3f} |" in written
    assert f"| grpo | fused | {answers['ratio']:.3f} |" in written
