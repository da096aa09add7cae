"""The whole command: what it prints and writes, what it refuses, and that Ctrl-C and resuming change nothing."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.lm import config as configs
from experiments.lm import loop
from experiments.lm.config import OF_LOSS, OPTIONS, TrainConfig, UsageError, default_config, merge, read_toml, to_toml
from experiments.lm.loop import Trainer
from experiments.lm.records import curve, differences, read_records
from experiments.train_lm import main
from pallas_ce import LossConfig, loss_names

Train = Callable[..., Any]
ROOT = Path(__file__).parents[2]
SHIPPED = sorted((Path(configs.__file__).parents[1] / "configs").glob("*.toml"))


def losses(run: Path, head: str = "fused", kind: str = "train") -> dict[int, float]:
    return curve(list(read_records(run / "metrics.jsonl")), kind, head)


def falls(of_steps: dict[int, float]) -> bool:
    values = list(of_steps.values())
    return bool(np.mean(values[-3:]) < np.mean(values[:3]) - 0.5)


def test_both_heads_agree_and_everything_is_reported_and_written(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = train(head="both", out=run)
    assert finished.code == 0, finished.err
    records = list(read_records(run / "metrics.jsonl"))
    assert list(differences(records)) == list(range(1, 13))
    assert max(differences(records).values()) <= 1e-4
    for head in ("fused", "canonical"):
        assert falls(losses(run, head))
        assert sorted(losses(run, head, "validation")) == [5, 10, 12]
    assert f"files: {run}" in finished.out
    assert "tokens/s=" in finished.err  # The progress bar.
    for picture in ("loss.png", "difference.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_resumes_exactly(
    stopped_at: Train, train: Train, whole: Path, tmp_path: Path, number: int
) -> None:
    """Twice: the second time the run has a checkpoint to begin with."""
    run = tmp_path / "parts"
    finished = stopped_at(1, number=number, out=run)
    assert finished.code == 130
    assert finished.err.rstrip().endswith(f"stopped after step 4 of 12; go on with --resume --out {run}")
    assert stopped_at(6, "--resume", number=number, out=run).code == 130
    assert train("--resume", out=run).code == 0
    for kind in ("train", "validation"):
        assert losses(run, kind=kind) == losses(whole, kind=kind)


def test_a_second_signal_ends_the_process_at_once() -> None:
    with loop.stop_requests() as stop:
        assert not stop(1)
        signal.raise_signal(signal.SIGINT)
        assert stop(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_both_heads_resume_where_the_second_one_stopped(stopped_at: Train, train: Train, tmp_path: Path) -> None:
    stopped_at(1, out=tmp_path, head="both")
    assert not losses(tmp_path, "canonical")
    finished = train("--resume", out=tmp_path, head="both")
    assert "largest |fused − canonical| training loss over 12 steps" in finished.out
    again = train("--resume", out=tmp_path, head="both")
    assert again.out.splitlines()[-4:] == finished.out.splitlines()[-4:]


def test_default_folders_are_numbered_and_the_latest_is_resumed(
    stopped_at: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        stopped_at(1)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["train_lm", "train_lm-2"]
    assert main(["--resume"]) == 0  # all other options are the run's
    assert len(losses(tmp_path / "runs" / "train_lm-2")) == 12


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(train: Train, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("steps = 9\nseed = 5\n[train]\nz_loss_weight = 1e-4\n", encoding="utf-8")
    assert train("--config", str(file), out=tmp_path / "run").code == 0
    stored = (tmp_path / "run" / "config.toml").read_text(encoding="utf-8").splitlines()
    assert {"steps = 12", "seed = 5", "z_loss_weight = 0.0001", "beta2 = 0.95"} <= set(stored)


def test_a_stored_configuration_reads_back_as_it_was(tmp_path: Path) -> None:
    config = TrainConfig(data='a "quoted" path\\with ü', steps=7, tie_embeddings=True, optimizer="muon")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert merge(TrainConfig(), read_toml(path), "test") == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_shipped_configurations_are_valid_on_every_backend(path: Path, backend: str) -> None:
    merge(default_config(backend), read_toml(path), str(path))
    LossConfig.from_toml(path)


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        (["--stpes", "3"], {}, ["unrecognized arguments: --stpes 3"]),
        ([], {"steps": "ten"}, ["argument --steps: invalid int value: 'ten'"]),
        (["--config", "none.toml"], {}, ["none.toml cannot be read"]),
        ([], {"steps": 0}, ["steps is 0; it must be at least 1"]),
        ([], {"learning_rate": "nan"}, ["learning_rate is nan; it must be at least 0"]),
        ([], {"attention_heads": 16}, ["attention_heads is 16, and width 16 is no multiple of its double"]),
        ([], {"head": "magic"}, ["argument --head: invalid choice: 'magic'"]),
        ([], {"implementation": "magic"}, ["this configuration cannot be trained: implementation"]),
        ([], {"data": "none.txt"}, ["none.txt does not exist"]),
        ([], {"vocab_size": 50_000}, ["vocab_size is 50000, but the text supports only"]),
        ([], {"sequence_length": 100_000}, ["too few for one batch of 4 rows of 100000 tokens"]),
        (["--resume"], {}, ["there is no run to resume in"]),
        *(
            ([], {"mesh": mesh}, ["write for instance data=2,tensor=2", "each axis once"])
            for mesh in ("model=2", "data=2,,tensor=2", "data=two", "tensor=0", "data=2,data=2")
        ),
        ([], {"mesh": "data=2,sequence"}, ["sequence splits tokens over the tensor axis", "at least 2"]),
        ([], {"mesh": "data=2,tensor=2"}, ["of 4 devices, but there are 1", "data=1"]),
        ([], {"mesh": "data=3"}, ["batch_size is 4", "data=3", "3 or 6 would"]),
        ([], {"mesh": "data=2,fsdp=3"}, ["batch_size is 4", "data·fsdp=6", "; 6 would"]),
        ([], {"mesh": "fsdp=3", "batch_size": 6}, ["width is 16", "fsdp=3", "15 or 18 would"]),
        ([], {"mesh": "tensor=4"}, ["attention_heads is 2", "tensor=4", "; 4 would"]),
        ([], {"mesh": "tensor=2", "mlp_width": 33}, ["mlp_width is 33", "tensor=2", "32 or 34 would"]),
        ([], {"mesh": "tensor=2,sequence", "sequence_length": 15}, ["sequence_length is 15", "14 or 16 would"]),
    ],
)
def test_what_makes_no_sense_is_named_and_nothing_is_written(
    train: Train, tmp_path: Path, flags: list[str], changes: dict[str, object], words: list[str]
) -> None:
    finished = train(*flags, **{"out": tmp_path / "run", **changes})
    assert finished.code == 2
    assert all(word in finished.err for word in (*words, "error: ")), finished.err
    assert "Traceback" not in finished.out + finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stpes": 3}, "unknown key 'stpes'; known keys: head, data,"),
        ({"steps": 1.5}, "must be of type int"),
        ({"steps": True}, "must be of type int"),
        ({"learning_rate": "x"}, "must be of type float"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of float32, bfloat16"),
        ({"seed": 2**31}, "seed is 2147483648; it must be at least 0 and at most 2147483647"),
        *(
            ({"head": head, name: value}, f"head is '{head}', which trains the plain cross entropy")
            for head in ("both", "canonical")
            for name, value in [("loss_fn", "cross_entropy"), *zip(OF_LOSS[2:], (0.1, 0.1, 9.0), strict=True)]
        ),
    ],
)
def test_values_of_a_file_are_checked(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        merge(TrainConfig(), values, "test")
    assert merge(TrainConfig(), {"clip_norm": 2}, "test").clip_norm == 2.0


def test_a_run_is_gone_on_with_as_it_was_begun(
    stopped_at: Train, train: Train, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    stopped_at(1, out=run)
    assert "is not an empty folder; continue the run in it with --resume" in train(out=run).err
    assert "was made with seed = 0, but now seed = 1" in train("--resume", out=run, seed=1).err
    other = tmp_path / "other"
    other.mkdir()
    for path in list(text.iterdir())[1:]:
        (other / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert "the text is not the one" in train("--resume", out=run, data=other).err
    assert train("--resume", out=run).code == 0


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Trainer._record

    def diverging(self: Trainer, step: int, numbers: Any, *rest: Any) -> None:
        record(self, step, numbers._replace(loss=np.nan) if step == 8 else numbers, *rest)

    monkeypatch.setattr(Trainer, "_record", diverging)
    finished = train(out=tmp_path)
    assert finished.code == 1
    assert "error: the loss became nan at step 8; lower --learning-rate" in finished.err


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_train_together(arguments: Any, whole: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2"

    def started(index: int, *words: str) -> "subprocess.Popen[str]":
        several = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(index)]
        command = [sys.executable, "-m", "experiments.train_lm", *several, *words, "--mesh", "data=4"]
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    both = [started(index, *arguments(out=tmp_path / "run")) for index in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found, want = losses(tmp_path / "run"), losses(whole)
    np.testing.assert_allclose(list(found.values()), list(want.values()), rtol=1e-5)


def test_the_command_works_as_a_process_of_its_own() -> None:
    command = [sys.executable, "-W", "error", "-m", "experiments.train_lm", "--help"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, check=True)


@pytest.mark.nightly
def test_the_reference_recipe_trains(train: Train, tmp_path: Path) -> None:
    """Muon, chunked cross entropy and z-loss together, from the file that ships."""
    recipe, run = next(path for path in SHIPPED if path.stem == "muon_chunked_z_loss"), tmp_path / "run"
    finished = train("--config", str(recipe), out=run, steps=30)
    assert finished.code == 0, finished.err
    assert falls(losses(run, "logits"))
    stored = LossConfig.from_toml(run / "config.toml")
    assert stored == LossConfig.from_toml(recipe) == LossConfig("chunked_cross_entropy", 4096, 1e-4)
    assert train("--resume", out=run, steps=30).code == 0


@pytest.mark.nightly
def test_every_loss_trains_alike_and_validates_without_its_regularisers(train: Train, tmp_path: Path) -> None:
    runs = {}
    for name, head in (("fused_linear_cross_entropy", "fused"), ("cross_entropy", "logits")):
        assert train(out=tmp_path / name, loss_fn=name, z_loss_weight=1e-2, label_smoothing=0.1).code == 0
        runs[head] = [list(losses(tmp_path / name, head, kind).values()) for kind in ("train", "validation")]
    for fused, logits in zip(*runs.values(), strict=True):
        np.testing.assert_allclose(fused, logits, atol=1e-4)
    trained, validation = runs["fused"]
    assert validation[-1] < trained[-1] - 0.1  # at a log-sum-exp of 5 or more the z part alone is 0.25


def test_the_choices_of_the_command_are_the_losses_that_the_library_has_registered() -> None:
    assert set(OPTIONS["loss_fn"].metadata["choices"]) <= set(loss_names())
    assert set(OF_LOSS) == set(LossConfig.__dataclass_fields__)
