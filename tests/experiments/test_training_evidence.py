"""The command that trains with our losses and without: a dry run, its report, and the search for the largest batch."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import training_evidence
from experiments.bench import largest_batch, lm_training, training_report
from experiments.bench.results import ResultError
from experiments.lm.config import TrainConfig

LARGEST = training_report.LARGEST


def training(losses: list[float], validation: float, ms: float, **more: Any) -> dict[str, Any]:
    sizes = {"batch": 16, "sequence": 1024, "vocabulary": 65536, "tokenizer_entries": 42000, "parameters": 185000000}
    return sizes | {"losses": losses, "validation_loss": validation, "ms": ms, "peak_mib": 10 * ms} | more


def write(folder: Path, points: dict[str, Any]) -> None:
    machine = {"device": "NVIDIA H200", "jax": "0.11.2"}
    document = {"command": "python -m experiments.training_evidence", "machine": machine, "points": points}
    (folder / "training_evidence.json").write_text(json.dumps(document))


def test_the_report_is_made_from_the_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = {
        "train_lm, fused": training([11.0, 9.0, 7.0], 6.5, 90.0, step_temporary_mib=2000.4),
        "train_lm, canonical": training([11.0, 9.25, 7.125], 6.25, 100.0, step_temporary_mib=8000.0),
        "Hugging Face, plain": training([11.0, 10.0, 9.0], 8.0, 50.0, jax_peak_mib=0.0, driver_mib=700.0),
        f"train_lm, fused{LARGEST}": {
            "batch": 100,
            "sequence": 1024,
            "vocabulary": 65536,
            "ms": 1000.0,
            "peak_mib": 900.0,
            "failed": {},
            "limit_mib": 1000.0,
            "planned_mib": {"64": 600.0, "100": 980.0, "104": 1010.0},
        },
        f"Hugging Face, plain{LARGEST}": {
            "batch": 16,
            "sequence": 1024,
            "vocabulary": 65536,
            "ms": 100.0,
            "limit_mib": 1000.0,
            "used_mib": {"16": 900.0, "32": None},
        },
    }
    write(tmp_path, points)
    assert training_evidence.main(["--report", "--out", str(tmp_path)]) == 0
    assert "training_evidence.md" in capsys.readouterr().out
    text = (tmp_path / "training_evidence.md").read_text()
    sizes = "185,000,000 | 16 × 1024 | 3 |"
    assert f"| train_lm, fused | {sizes} 11.0000 | 7.0000 | 6.5000 | 90.0 | 900 | – | – | 2000 |" in text
    assert f"| Hugging Face, plain | {sizes} 11.0000 | 9.0000 | 8.0000 | 50.0 | 500 | 0 | 700 | – |" in text
    assert "| train_lm, fused and canonical | 2.50e-01 | 2 | 2.50e-01 | 0.900 | 0.900 |" in text
    assert "| train_lm, fused | 100 × 1024 | 102,400 | 102,400 | 1000 | 64: 600, 100: 980, 104: 1010 |" in text
    assert "| Hugging Face, plain | 16 × 1024 | 16,384 | 163,840 | 1000 | 16: 900, 32: – |" in text
    assert "supports 42,000 entries" in text
    lacking = f"Hugging Face, fused; TRL, fused; TRL, plain; train_lm, canonical{LARGEST}; Hugging Face, fused{LARGEST}"
    assert f"Not measured: {lacking}." in text
    assert "DRY RUN" not in text
    assert (tmp_path / "training_evidence.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_result_file_there_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert training_evidence.main(["--report", "--out", str(tmp_path)]) == 2
    assert "training_evidence.json is not a result file" in capsys.readouterr().err
    with pytest.raises(ResultError):
        training_report.write(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fixed", [0, 700])
@pytest.mark.parametrize("each", [1, 7, 40])
@pytest.mark.parametrize("fails", [False, True])
def test_the_search_finds_the_largest_batch_in_few_trials(fixed: int, each: int, fails: bool) -> None:
    """Along a line, in ascending order, and where those that are too large fail instead of telling what they need."""
    limit = 10_000

    def needs(batches: Sequence[int]) -> dict[int, float]:
        assert list(batches) == sorted(batches)
        found = {batch: float(fixed + each * batch) for batch in batches}
        return {batch: math.inf if fails and need > limit else need for batch, need in found.items()}

    found = largest_batch.search(needs, limit, 32)
    assert len(found) <= largest_batch.MOST_TRIALS
    fits, over = largest_batch.bracket(found, limit)
    exact = (limit - fixed) // each
    assert fits <= exact < over
    if exact < 32 * largest_batch.FINE:
        assert over - fits <= max(1, fits // largest_batch.FINE)


def test_the_search_follows_needs_that_are_no_line() -> None:
    """As of a program that takes another way from some size on."""

    def needs(batches: Sequence[int]) -> dict[int, float]:
        return {batch: 10.0 * batch if batch < 100 else 500.0 + 20.0 * batch for batch in batches}

    found = largest_batch.search(needs, 10_000.0, 32)
    fits, over = largest_batch.bracket(found, 10_000.0)
    assert 475 * 3 / 4 < fits <= 475 < over < 475 * 5 / 4


def test_a_search_ends_where_nothing_fits() -> None:
    found = largest_batch.search(lambda batches: dict.fromkeys(batches, math.inf), 1.0, 8)
    assert largest_batch.bracket(found, 1.0)[0] == 0
    assert len(found) <= largest_batch.MOST_TRIALS


def test_a_text_that_supports_fewer_entries_is_trained_on_with_what_it_supports(text: Path, cache: Path) -> None:
    config = TrainConfig(vocab_size=60000, data=str(text), cache_dir=str(cache), sequence_length=16)
    dataset, entries = lm_training.load_text(config)
    assert 257 < entries < 60000
    assert dataset.training.max() < entries


def test_a_batch_that_only_the_plan_fits_makes_way_for_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def stands_in(function: Any, _: Any, head: str, given: Any) -> Any:
        if function is lm_training.planned_bytes:
            return {batch: 10.0 * batch for batch in given}
        return {"ms": 5.0, "peak_mib": 1.0} if given <= 95 else {"failed": "RESOURCE_EXHAUSTED"}

    monkeypatch.setattr(lm_training, "apart", stands_in)
    record = lm_training.largest(TrainConfig(batch_size=4), "fused", 1000.0)
    assert record["batch"] == 94
    assert record["failed"] == {"100": "RESOURCE_EXHAUSTED"}
    with pytest.raises(RuntimeError, match="no batch of fused could be run"):
        lm_training.largest(TrainConfig(batch_size=4), "fused", 9.0)


def test_what_is_missing_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = object()
    monkeypatch.setattr(training_evidence.importlib.util, "find_spec", lambda name: None if name == "trl" else spec)
    assert training_evidence.missing() == {"TRL": "trl is not installed (pip install 'pallas-ce[trl]')"}


def test_sizes_are_those_of_the_evidence() -> None:
    configs = training_evidence.configs("", dry_run=False)
    assert list(configs) == list(training_report.FAMILIES)
    assert {(config.steps, config.vocab_size, config.dtype) for config in configs.values()} == {
        (500, 65536, "bfloat16")
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_measures_every_point_and_can_be_gone_on_with(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    root = Path(training_evidence.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    words = ["--dry-run", "--data", str(text), "--out", str(out)]
    assert training_evidence.main(words) == 0
    document = json.loads((out / "training_evidence.json").read_text())
    points = document["points"]
    assert len(points) == 10
    for family, variants in training_report.FAMILIES.items():
        ours, theirs = (points[f"{family}, {variant}"] for variant in variants)
        assert len(ours["losses"]) == 8
        largest, _, validation = training_report.differences(ours, theirs)
        assert largest < (1e-5 if family == "train_lm" else 5e-3)
        assert validation < 1e-3
    for name, point in points.items():
        if name.endswith(LARGEST):
            tried = point.get("planned_mib") or point["used_mib"]
            assert tried[str(point["batch"])] <= point["limit_mib"]
            assert point["ms"] > 0
    assert "DRY RUN" in (out / "training_evidence.md").read_text()
    capsys.readouterr()
    assert training_evidence.main(words) == 0
    assert "training_evidence train_lm" not in capsys.readouterr().out
