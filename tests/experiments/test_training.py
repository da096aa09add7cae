"""The whole command: what it prints and writes, and that resuming changes nothing."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.lm.model.program import build
from experiments.lm.run import session
from experiments.lm.run.loop import Trainer
from experiments.lm.run.metrics import MetricsLog, curve, differences, read_records
from experiments.train_lm import main

Train = Callable[..., Any]


def losses(run: Path, head: str = "fused", kind: str = "train") -> dict[int, float]:
    return curve(list(read_records(run / "metrics.jsonl")), kind, head)


def test_both_heads_agree_and_everything_is_reported_and_written(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = train(head="both", out=run)
    assert finished.code == 0, finished.err
    records = list(read_records(run / "metrics.jsonl"))

    by_step = differences(records)
    assert list(by_step) == list(range(1, 13))
    assert max(by_step.values()) <= 1e-4
    assert "largest |fused − canonical| training loss over 12 steps" in finished.out

    for head in ("fused", "canonical"):
        values = list(losses(run, head).values())
        assert np.mean(values[-3:]) < np.mean(values[:3]) - 0.5
        assert sorted(losses(run, head, "validation")) == [5, 10, 12]
        (summary,) = [record for record in records if record["kind"] == "summary" and record["head"] == head]
        assert f"{summary['validation_loss']:.4f}" in finished.out
    for words in (
        *("final validation loss", "tokens per second", "peak memory", "parameters: ", f"files: {run}"),
        f"unigram entropy of the training tokens: {summary['unigram_entropy']:.4f}",
    ):
        assert words in finished.out
    assert "tokens/s=" in finished.err  # The progress bar.

    for picture in ("loss.png", "difference.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    assert not list(run.rglob("*.tmp"))


def test_every_record_has_the_documented_fields(whole: Path) -> None:
    common = {"kind", "head", "step"}
    fields = {
        "train": common | {"loss", "gradient_norm", "learning_rate", "seconds"},
        "validation": common | {"loss"},
        "summary": common
        | {"validation_loss", "unigram_entropy", "parameters", "tokens_per_second", "peak_bytes"}
        | {"step_temporary_bytes", "compile_seconds"},
    }
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {record["kind"] for record in records} == set(fields)
    for record in records:
        assert set(record) == fields[record["kind"]]
    rates = [record["learning_rate"] for record in records if record["kind"] == "train"]
    assert rates[1] == max(rates) == pytest.approx(0.01)
    assert 0 < rates[0] < rates[1]
    assert rates[-1] == min(rates[1:])


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(train: Train, whole: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(out=tmp_path / f"{seed}", seed=seed)
    assert losses(tmp_path / "0") == losses(whole) != losses(tmp_path / "1")


@pytest.mark.parametrize("stops", [(3,), (5, 4), (11,)], ids=str)
def test_a_resumed_run_gives_exactly_the_losses_of_an_uninterrupted_one(
    train: Train, whole: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for number, stop in enumerate(stops):
        flags = ["--resume"] if number else []
        finished = train(*flags, "--stop-after", str(stop), out=tmp_path / "parts")
        assert finished.code == 0
        assert f"stopped after step {sum(stops[: number + 1])} of 12" in finished.err
    assert train("--resume", out=tmp_path / "parts").code == 0
    for kind in ("train", "validation"):
        assert losses(tmp_path / "parts", kind=kind) == losses(whole, kind=kind)


def test_resuming_needs_no_option_but_the_folder(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train("--stop-after", "2")
    assert main(["--resume"]) == 0
    assert len(losses(tmp_path / "runs" / "train_lm")) == 12


def test_steps_taken_after_the_last_checkpoint_are_recorded_once(train: Train, tmp_path: Path) -> None:
    train("--stop-after", "7", out=tmp_path)
    path = tmp_path / "metrics.jsonl"
    with path.open("a", encoding="utf-8") as file:  # As after a crash between two checkpoints.
        file.write('{"kind": "train", "head": "fused", "step": 8, "loss": 99.0}\n{"kind": "tra')
    assert train("--resume", out=tmp_path).code == 0
    steps = [record["step"] for record in read_records(path) if record["kind"] == "train"]
    assert steps == list(range(1, 13))
    assert 99.0 not in losses(tmp_path).values()


def test_both_heads_resume_where_the_second_one_stopped(train: Train, tmp_path: Path) -> None:
    train("--stop-after", "5", out=tmp_path, head="both")
    assert not losses(tmp_path, "canonical")
    train("--resume", "--stop-after", "9", out=tmp_path, head="both")
    assert (len(losses(tmp_path)), len(losses(tmp_path, "canonical"))) == (12, 2)
    assert (
        "stopped before the canonical head" in train("--overwrite", "--stop-after", "12", out=tmp_path, head="both").err
    )
    finished = train("--resume", out=tmp_path, head="both")
    assert "largest |fused − canonical| training loss over 12 steps" in finished.out
    again = train("--resume", out=tmp_path, head="both")
    assert again.out.splitlines()[-5:] == finished.out.splitlines()[-5:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_resumes_exactly(
    train: Train, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    record = Trainer._record

    def interrupted(self: Trainer, step: int, *rest: Any) -> None:
        if step == 4:  # which is read before the checkpoint of step 5
            signal.raise_signal(number)
        record(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_record", interrupted)
        finished = train(out=tmp_path / "parts")
    assert finished.code == 128 + number
    # It is noted after step 6, whose numbers are read when three more steps have been launched.
    sentence = "stopped after step 9 of 12; everything up to it is saved; go on with --resume --out "
    assert finished.err.rstrip().endswith(sentence + str(tmp_path / "parts"))
    assert train("--resume", out=tmp_path / "parts").code == 0
    assert losses(tmp_path / "parts") == losses(whole)


def test_a_second_start_finds_every_program_compiled(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "build", build)
    kept = []
    for number in range(2):
        jax.clear_caches()
        assert train(out=tmp_path / f"{number}", cache_dir=tmp_path / "cache").code == 0
        kept.append({path.name for path in (tmp_path / "cache" / "programs").iterdir()})
    assert any(name.startswith("jit_train-") for name in kept[0])
    assert kept[0] == kept[1]


def test_a_second_plain_run_gets_a_folder_of_its_own(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert train("--stop-after", "1").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["train_lm", "train_lm-2"]


def test_overwriting_replaces_the_run_and_keeps_what_is_not_its_own(train: Train, tmp_path: Path) -> None:
    train(out=tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert train("--overwrite", out=tmp_path, head="canonical").code == 0
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert not losses(tmp_path, "fused")
    assert len(losses(tmp_path, "canonical")) == 12


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(train: Train, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("steps = 9\nlayers = 2\nseed = 5\n", encoding="utf-8")
    assert train("--config", str(file), out=tmp_path / "run").code == 0
    stored = (tmp_path / "run" / "config.toml").read_text(encoding="utf-8").splitlines()
    assert {"steps = 12", "layers = 1", "seed = 5", "beta2 = 0.95"} <= set(stored)


@pytest.mark.parametrize("options", [{"backward": "recompute"}, {"backward": "in_forward", "implementation": "xla"}])
def test_the_backward_mode_and_the_implementation_can_be_chosen(
    train: Train, tmp_path: Path, options: dict[str, str]
) -> None:
    train(out=tmp_path / "canonical", head="canonical")
    assert train(out=tmp_path / "fused", **options).code == 0
    pairs = zip(losses(tmp_path / "canonical", "canonical").values(), losses(tmp_path / "fused").values(), strict=True)
    assert max(abs(one - two) for one, two in pairs) <= 1e-4


def test_a_log_rewound_keeps_the_other_head(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for head in ("fused", "canonical"):
            for step in (1, 2, 3):
                log.write("train", head, step, loss=0.0)
            log.write("summary", head, 3)
        log.rewind("canonical", 1)
        log.write("train", "canonical", 2, loss=1.0)
    records = list(read_records(path))
    assert curve(records, "train", "fused") == {1: 0.0, 2: 0.0, 3: 0.0}
    assert curve(records, "train", "canonical") == {1: 0.0, 2: 1.0}
    assert [record["head"] for record in records if record["kind"] == "summary"] == ["fused"]
