"""What the commands share: counts, how a result is made again, files that are whole or not there."""

import argparse
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from experiments import command_line, cpu_head, grpo


@pytest.mark.parametrize("word", ["0", "-3", "2.5", "many"])
def test_a_count_is_a_positive_int(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_head.main(["--repeats", word])
    assert f"argument --repeats: {word!r} is no positive int" in capsys.readouterr().err


def test_a_command_is_told_without_where_it_wrote() -> None:
    words = ["--tokens", "64", "--out", "there.json", "--device=cpu"]
    assert (
        command_line.command("pipeline_memory", words)
        == "python -m experiments.pipeline_memory --tokens 64 --device=cpu"
    )
    assert command_line.command("cpu_head", ["--out=there.json"]) == "python -m experiments.cpu_head"


def test_a_bar_is_for_terminals_and_lines_stand_apart_from_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go() -> tuple[str, str]:
        with command_line.Progress(2, "point") as bar:
            bar.print("first")
            bar.update(1)
        return capsys.readouterr()

    assert go() == ("first\n", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    out, err = go()
    assert out == "first\n"
    assert "1/2" in err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert go() == ("first\n", "")


def test_nothing_to_draw_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grpo.main(["--plot-only", "--out", str(tmp_path / "missing.json")])
    assert "missing.json holds no results to draw" in capsys.readouterr().err


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "found.json"
    command_line.write_record(path, {"a": 1})
    monkeypatch.setattr(command_line.os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        command_line.write_record(path, {"a": 2})
    assert command_line.read_record(argparse.ArgumentParser(), path) == json.loads(path.read_text()) == {"a": 1}
