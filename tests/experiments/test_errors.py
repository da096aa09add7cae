"""Every documented error, tried through the command: one sentence, exit code 2, and nothing written."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from experiments.lm.run.loop import Trainer
from experiments.lm.run.metrics import MetricsLog, read_records

Train = Callable[..., Any]


def written(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("flags", "changes", "sentence"),
    [
        (["--stpes", "3"], {}, "unrecognized arguments: --stpes 3"),
        (["--step", "3"], {}, "unrecognized arguments: --step 3"),  # not guessed
        ([], {"steps": "ten"}, "argument --steps: invalid int value: 'ten'"),
        (["--resume", "--overwrite"], {}, "not allowed with argument --resume"),
        (["--config", "none.toml"], {}, "none.toml does not exist"),
        (["--config", "/"], {}, "cannot be read: Is a directory"),
        ([], {"steps": 0}, "steps is 0; it must be at least 1"),
        ([], {"batch_size": -4}, "batch_size is -4; it must be at least 1"),
        ([], {"attention_heads": 3}, "attention_heads is 3, which does not divide width (16)"),
        ([], {"attention_heads": 16}, "= 1, which is odd"),
        ([], {"learning_rate": "inf"}, "learning_rate is inf; it must be a finite number"),
        ([], {"head": "magic"}, "head is 'magic'; it must be one of fused, canonical, both"),
        ([], {"stop_after": 0}, "--stop-after is 0; it must be at least 1"),
        ([], {"implementation": "magic"}, "this configuration cannot be trained: implementation"),
        ([], {"data": "none.txt"}, "none.txt does not exist"),
        ([], {"vocab_size": 50_000}, "vocab_size is 50000, but the text supports only"),
        ([], {"sequence_length": 100_000}, "too few for one batch of 4 rows of 100000 tokens"),
    ],
)
def test_options_that_make_no_sense_are_named(
    refused: Callable[..., str], flags: list[str], changes: dict[str, object], sentence: str
) -> None:
    assert sentence in refused(*flags, **changes)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        *(
            ("mine.toml", text, "mine.toml is not valid TOML")
            for text in ("steps = ", "steps 3", "[", "steps = 3\nsteps = 4")
        ),
        ("mine.toml", "stpes = 3", "mine.toml has the unknown key 'stpes'; known keys: head, data,"),
        ("mine.toml", "[model]\nwidth = 3", "mine.toml has the unknown key 'model'"),
        ("mine.toml", 'steps = "ten"', "mine.toml sets steps to 'ten', which must be of type int"),
        ("mine.toml", "train = 1", "mine.toml sets train to 1; it must be a section"),
        (
            "mine.toml",
            "[train]\nsteps = 3",
            "mine.toml has the unknown key 'steps'; known keys: loss_fn, ce_chunk_size",
        ),
        (
            "mine.toml",
            "loss_fn = 'x'\n[train]\nloss_fn = 'y'",
            "mine.toml sets loss_fn twice, in its [train] section and outside",
        ),
        ("empty.txt", "", "empty.txt is empty"),
        ("empty.txt", "  \n", "empty.txt is empty"),
        ("short.txt", "a few words", "too few documents (1)"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_is_wrong(
    refused: Callable[..., str], tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    path = written(tmp_path / name, content)
    assert sentence in (refused("--config", str(path)) if name == "mine.toml" else refused(data=path))


@pytest.mark.parametrize(
    ("flags", "option", "place", "sentence"),
    [
        ([], "data", "empty", "holds no file of UTF-8 text"),
        ([], "out", "full", "is not empty; continue it with --resume, replace it with --overwrite"),
        (["--overwrite"], "out", "full", "holds no training run, so --overwrite will not delete it"),
        ([], "out", "full/file", "is a file; give a folder"),
        ([], "out", "full/file/below", "cannot be written: Not a directory"),
        (["--resume"], "out", "none", "there is no run to resume in"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_and_left_alone(
    refused: Callable[..., str], tmp_path: Path, flags: list[str], option: str, place: str, sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    file = written(tmp_path / "full" / "file", "mine")
    assert sentence in refused(*flags, **{option: tmp_path / place})
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
@pytest.mark.parametrize("option", ["out", "cache_dir"])
def test_a_folder_that_cannot_be_written_is_refused(refused: Callable[..., str], option: str) -> None:
    assert "/proc/nowhere cannot be written" in refused(**{option: "/proc/nowhere"})


def test_resuming_with_another_configuration_names_what_differs(refused: Callable[..., str], stopped_run: Path) -> None:
    assert "made with seed = 0, but now seed = 1" in refused("--resume", out=stopped_run, seed=1)
    assert "made with layers = 1, but now layers = 2" in refused("--resume", out=stopped_run, layers=2)


def test_resuming_without_a_checkpoint_says_so(train: Train, stopped_run: Path) -> None:
    shutil.rmtree(stopped_run / "checkpoints")
    finished = train("--resume", out=stopped_run)
    assert finished.code == 0
    assert f"--resume: no checkpoint in {stopped_run / 'checkpoints' / 'fused'}, so it starts at step 0" in finished.err


def test_resuming_with_another_text_is_refused(
    refused: Callable[..., str], stopped_run: Path, tmp_path: Path, text: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(text.iterdir()):
        written(other / path.name, path.read_text(encoding="utf-8").upper())
    assert "the text is not the one that the checkpoint in" in refused("--resume", out=stopped_run, data=other)


def test_a_checkpoint_of_another_configuration_is_refused(
    train: Train, refused: Callable[..., str], stopped_run: Path, tmp_path: Path
) -> None:
    train("--stop-after", "1", out=tmp_path / "other", seed=1)
    (stopped_run / "checkpoints").rename(tmp_path / "aside")
    (tmp_path / "other" / "checkpoints").rename(stopped_run / "checkpoints")
    assert "was made with seed = 1, but now seed = 0" in refused("--resume", out=stopped_run)


@pytest.mark.parametrize(
    "damage",
    [lambda first, rest: first, lambda first, rest: first + bytes([rest[0] ^ 1]) + rest[1:]],
    ids=["cut short", "one bit changed"],
)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_takes_its_place(
    train: Train, refused: Callable[..., str], stopped_run: Path, damage: Callable[[bytes, bytes], bytes]
) -> None:
    newest = stopped_run / "checkpoints" / "fused" / "7"
    largest = max((path for path in (newest / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    content = largest.read_bytes()
    middle = len(content) // 2
    largest.write_bytes(damage(content[:middle], content[middle:]))
    sentence = refused("--resume", out=stopped_run)
    assert f"the checkpoint {newest} cannot be read: its file state/" in sentence
    assert "delete that folder to resume from step 5" in sentence
    newest.rename(stopped_run / "aside")
    assert train("--resume", out=stopped_run).code == 0
    records = read_records(stopped_run / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 13))


@pytest.mark.parametrize("missing", ["state", "description", "state/_METADATA", "description/metadata"])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_checkpoint_with_a_part_missing_is_refused(
    refused: Callable[..., str], stopped_run: Path, tmp_path: Path, missing: str, checksums: bool
) -> None:
    if not checksums:
        (stopped_run / "checkpoints" / "fused" / "7" / "checksums.json").unlink()
    (stopped_run / "checkpoints" / "fused" / "7" / missing).rename(tmp_path / "aside")
    assert "cannot be read" in refused("--resume", out=stopped_run)


def test_a_stored_configuration_that_is_damaged_is_refused(refused: Callable[..., str], stopped_run: Path) -> None:
    written(stopped_run / "config.toml", "steps = ")
    assert "config.toml is not valid TOML" in refused("--resume", out=stopped_run)


def test_a_checkpoint_cut_short_is_passed_over(train: Train, stopped_run: Path) -> None:
    checkpoints = stopped_run / "checkpoints" / "fused"
    # What a process that dies while writing leaves behind.
    (checkpoints / "7" / "state").rename(checkpoints / "7" / "state.orbax-checkpoint-tmp")
    (checkpoints / "7").rename(checkpoints / "7.orbax-checkpoint-tmp")
    assert train("--resume", out=stopped_run).code == 0
    assert sorted(path.name for path in checkpoints.iterdir()) == ["10", "12"]


def test_a_missing_package_is_named_with_how_to_get_it(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("session", "checkpoint"):
        monkeypatch.delitem(sys.modules, f"experiments.lm.run.{module}")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "the package orbax is missing; run: pip install 'pallas-ce[experiments]'" in refused()


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Trainer._record

    def diverging(self: Trainer, step: int, numbers: Any, *rest: Any) -> None:
        record(self, step, numbers._replace(loss=jnp.nan) if step == 8 else numbers, *rest)

    monkeypatch.setattr(Trainer, "_record", diverging)
    finished = train(out=tmp_path)
    assert finished.code == 1
    sentence = "error: the loss became nan at step 8; lower --learning-rate (the checkpoint of step 5 is kept)"
    assert sentence in finished.err


def test_running_out_of_memory_is_said_in_a_sentence(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")
    monkeypatch.setattr(Trainer, "_train", Mock(side_effect=error))
    finished = train(out=tmp_path)
    assert finished.code == 1
    assert "error: training the fused head does not fit the device's memory; lower --batch-size" in finished.err


def test_a_full_disk_is_said_in_a_sentence(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", Mock(side_effect=full))
        finished = train(out=tmp_path / "one")
    assert (finished.code, finished.err.splitlines()[-1]) == (
        1,
        "error: reading or writing failed: [Errno 28] No space left on device",
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1024))
    finished = train(out=tmp_path / "two")
    assert finished.code == 1
    assert "checkpoints/fused/5 cannot be written: it needs" in finished.err


@pytest.mark.parametrize(("flags", "code"), [(["--help"], 0), (["--steps", "0"], 2)])
def test_the_command_works_as_a_process_of_its_own(flags: list[str], code: int) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error", "-m", "experiments.train_lm", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == code
    assert "Traceback" not in finished.stderr
