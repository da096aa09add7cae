"""Result files: whole after each point, gone on with after an interruption, never mixed; and how they are written."""

import argparse
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from experiments import files
from experiments.bench import results
from experiments.bench.results import FOLDER, Point, ResultError, ResultFile, read, run
from experiments.bench.timing import Rounds

MACHINE = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-20"}
RECORD = {"n": 1, "v": 2, "results": {"forward": {"ms": 1.0}}}


def measured(folder: Path, points: Any, machine: dict[str, Any] = MACHINE, **options: Any) -> None:
    """Runs a command whose points are measured by these functions, or have these records."""
    made = [Point(name, found if callable(found) else lambda found=found: found) for name, found in points.items()]
    given = argparse.Namespace(**{"out": folder, "again": False, "rounds": Rounds(1)} | options)
    run([ResultFile("grid", made, "gpu_head grid")], machine, given)


def points_of(folder: Path) -> list[str]:
    return list(read(folder / "grid.json")["points"])


def test_every_point_is_on_disk_before_the_next_one_begins_and_a_second_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, {"a": RECORD, "b": RECORD, "c": mock.Mock(side_effect=KeyboardInterrupt)})
    assert points_of(tmp_path) == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["grid.json"]
    measured(tmp_path, {"a": mock.Mock(side_effect=AssertionError("it has been measured")), "c": RECORD})
    assert points_of(tmp_path) == ["a", "b", "c"]
    assert read(tmp_path / "grid.json")["command"] == "python -m experiments.bench gpu_head grid"


def test_a_point_that_fails_is_named_after_all_others_are_on_disk(tmp_path: Path) -> None:
    failing = {"a": RECORD, "b": mock.Mock(side_effect=RuntimeError("out of memory")), "c": RECORD}
    with pytest.raises(ExceptionGroup, match="1 points failed") as raised:
        measured(tmp_path, failing)
    assert raised.value.exceptions[0].__notes__ == ["while b was measured"]
    assert points_of(tmp_path) == ["a", "c"]


def test_no_point_is_begun_that_would_end_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def measure() -> dict[str, Any]:
        clock[0] += 10.0
        return RECORD

    monkeypatch.setattr(results.time, "monotonic", lambda: clock[0])
    measured(tmp_path, dict.fromkeys("abcdef", measure), rounds=Rounds(1, end=35.0))
    assert points_of(tmp_path) == ["a", "b", "c"]
    assert "time is up with 3 points left" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"device": "NVIDIA H100"}, {"power_limit": "9 W"}, {"jax": "0.12"}, {"rounds": 3}])
def test_results_of_different_machines_or_versions_are_not_mixed(tmp_path: Path, change: dict[str, str]) -> None:
    measured(tmp_path, {"a": RECORD})
    with pytest.raises(ResultError, match=f"{next(iter(change.values()))}.*Pass --again .* or --out"):
        measured(tmp_path, {"b": RECORD}, MACHINE | change)
    measured(tmp_path, {"b": RECORD}, MACHINE | change, again=True)
    assert points_of(tmp_path) == ["b"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"command": 1, "machine": {}, "points": []}'])
def test_what_is_not_a_result_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "grid.json"
    path.write_text(content)
    with pytest.raises(ResultError, match=re.compile(r"is not a result file: .*move it away", re.DOTALL)):
        measured(tmp_path, {"a": RECORD})
    assert path.read_text() == content


def test_published_files_are_as_the_writer_writes_them() -> None:
    """A program's samples on one line, so that a file has a line a program. Another package writes `check_device`'s."""
    for name, document in results.load(FOLDER).items():
        assert (FOLDER / f"{name}.json").read_text() == files.as_json(document) + "\n", name
    assert math.fsum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.json")) <= 8000
