"""Every command that measures runs at small sizes on a CPU, and programs are timed as they should be."""

import contextlib
import importlib.util
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.bench import (
    check,
    gpu_head,
    gpu_scaling,
    paper_table,
    results,
    timing,
    train_speed,
    training_evidence,
    trainings,
)
from experiments.bench.__main__ import main
from experiments.bench.gpu_head import SECTIONS
from experiments.bench.paper_table import TABLE
from experiments.bench.processes import apart


def traced(programs: dict[str, Any], arguments: Any, rounds: timing.Rounds, *_: Any) -> dict[str, Any]:
    """In place of a measurement: traces every program, which fails where one is wrong."""
    for name, program in programs.items():
        jax.eval_shape(program, *arguments[name])
    return {name: {"ms": 1.0, "samples": [1.0] * rounds.least, "temporary_mib": 0.0} for name in programs}


def dry_run(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """Runs the command; the points of its files."""
    assert main([name, "--dry-run", "--rounds", "2", "--out", str(folder), *words]) == 0
    documents = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert all(d["machine"]["dry_run"] and {"device", "jax", "date"} <= set(d["machine"]) for d in documents.values())
    assert all(d["command"].startswith(f"python -m experiments.bench {name}") for d in documents.values())
    return {stem: document["points"] for stem, document in documents.items()}


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("name", "sections", "timed"),
    [
        pytest.param("gpu_head", list(SECTIONS), False, marks=pytest.mark.nightly),
        ("gpu_losses", ["log_probs", "support", "top_k", "distillation"], False),
        ("gpu_losses", ["given"], True),
        ("paper_table", [], False),
        ("cpu_head", [], True),
    ],
)
def test_every_program_of_a_command_can_be_timed(
    name: str, sections: list[str], timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Compiled and timed, or traced alone."""
    if not timed:
        monkeypatch.setattr(timing, "compiled_in_turn", traced)
        monkeypatch.setattr(timing, "compile_seconds", lambda _, programs, __: {"results": {n: {} for n in programs}})
    monkeypatch.setattr(gpu_head, "SECTIONS", {section: cases[:1] for section, cases in SECTIONS.items()})
    monkeypatch.setattr(paper_table, "TABLE", dict(list(TABLE.items())[:2]))
    found = dry_run(name, tmp_path, *sections)
    assert set(found) == {f"{name}_{section}" for section in sections} or set(found) == {name}
    results = [point["results"] for points in found.values() for point in points.values()]
    assert all(results)
    if timed:
        assert all(x["ms"] > 0 and len(x["samples"]) == 2 for programs in results for x in programs.values())
    capsys.readouterr()
    dry_run(name, tmp_path, *sections)
    assert capsys.readouterr().out == ""  # all of it is there


def scaling(words: list[str]) -> int:
    """The command, with one of our two modes."""
    gpu_scaling.LOSSES.pop("in_forward")
    return main(words)


@pytest.mark.nightly
@pytest.mark.slow
def test_several_devices_are_measured_in_every_layout(tmp_path: Path) -> None:
    words = ["gpu_scaling", "--dry-run", "--rounds", "1", "--out", str(tmp_path)]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    assert apart(scaling, words, XLA_FLAGS=flags) == 0
    points = json.loads((tmp_path / "gpu_scaling_2.json").read_text())["points"]
    assert list(points) == ["tensor", "sequence", "data", "fsdp", "apart"]
    for name, gpus in (("tensor", 2), ("data", 1)):
        found = points[name]["results"]
        one, split = (found[f"{layout}, recompute"]["ms"] for layout in ("one", name))
        assert found[f"{name}, recompute"]["efficiency"] == pytest.approx(one / (gpus * split))
    assert points["sequence"]["results"]["sequence, recompute"]["to_tensor"] > 0


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Trainings that have a process of their own run here, with the tests' caches."""
    monkeypatch.chdir(cache)
    for module in (trainings, train_speed, training_evidence):
        monkeypatch.setattr(module, "apart", lambda function, *given, **_: function(*given))


@pytest.mark.nightly
def test_the_loop_is_compared_with_its_step(
    in_this_process: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def here(start: Any, config: Any, head: str, folder: str, **_: str) -> Any:
        found = start(config, head, folder)
        kept.append({path.name for path in Path(folder).iterdir() if path.name.endswith("-cache")})
        return found

    monkeypatch.setattr(train_speed, "apart", here)
    found = dry_run("train_speed", tmp_path, "--data", str(text))["train_speed"]["defaults"]
    starts = [start for result in found["results"].values() for start in result["start"].values()]
    assert all(seconds > 0 for start in starts for seconds in start.values())
    assert len(kept[0]) > 1
    assert kept[::2] == kept[1::2]  # a second start compiles nothing


@pytest.mark.nightly
def test_trainings_are_compared_and_what_is_missing_is_left_out(
    in_this_process: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(trainings, "_DRY_LIMIT", 4)
    found = dry_run("training_evidence", tmp_path, "--data", str(text))["training_evidence"]
    assert "TRL is left out: torch is not installed" in capsys.readouterr().err
    assert list(found) == [f"train_lm, {head}{part}" for part in ("", trainings.LARGEST) for head in train_speed.HEADS]
    fused, canonical = (found[f"train_lm, {head}"]["losses"] for head in train_speed.HEADS)
    assert fused == pytest.approx(canonical, abs=1e-4)
    assert fused[-1] < fused[0]
    assert main(["gpu_report", "--folder", str(tmp_path)]) == 0
    assert "| train_lm, fused and canonical |" in (tmp_path / "training_evidence.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpu_head", "gird", "--dry-run", "--out", "x"], "there is no section 'gird'"),
        (["gpu_head", "--dry-run"], "--dry-run needs --out"),
        (["gpu_head"], "--dry-run shows on a CPU that it works"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    assert said in capsys.readouterr().err


def test_what_is_checked_has_been_measured() -> None:
    for name, case in check.CASES.items():
        point = results.read(results.FOLDER / f"{name}.json")["points"][case.name]
        assert tuple(point[size] for size in "nvh") == case.shape
        assert set(case.programs(lambda name: name, case.shape)) < set(point["results"])


@pytest.mark.parametrize(
    ("now", "status", "said"),
    [
        ({"ms": 1.03, "mib": 64.5}, 0, "as before"),
        ({"ms": 1.05, "mib": 65.5}, 1, "slower, more memory"),
        ({"ms": 0.9}, 0, "faster"),
        ({"jitter": 0.2}, 1, "too unsteady to be judged"),
        ({"device": "NVIDIA H100"}, 0, "skipped"),
        ({"jax": "0.12.0", "ms": 1.05}, 1, "slower (with jax 0.12.0, before with 0.11.2)"),
        ({"jax": "0.12.1", "ms": 1.05}, 0, "| forward | 1.050 ± 0.007 | 1.050 | 64.00 | 64.00 | as before |"),
    ],
)
def test_the_head_is_compared_with_result_files_of_the_same_gpu(
    now: Any, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def record(ms: float = 1.0, mib: float = 64.0, jitter: float = 0.01) -> dict[str, Any]:
        steady = {"ms": 10.0, "samples": [10.0] * 10, "temporary_mib": 32.0}
        taken = {"samples": [10.0 * ms * (1 + jitter * (-1) ** i) for i in range(10)], "temporary_mib": mib}
        return {"results": dict.fromkeys(timing.THREE, steady) | {"forward": taken}, "left_out": {}}

    here = {"device": now.pop("device", "NVIDIA H200"), "jax": now.pop("jax", "0.11.2")}
    for name, case in check.CASES.items():
        for suffix, jax_version, ms in (("", "0.11.2", 1.0), ("_newer", "0.12.1", 1.05)):
            machine = {"device": "NVIDIA H200", "jax": jax_version}
            document = {"command": "", "machine": machine, "points": {case.name: record(ms)}}
            (tmp_path / f"{name}{suffix}.json").write_text(json.dumps(document))
    monkeypatch.setattr(results, "describe", lambda: here)
    monkeypatch.setattr(timing, "measure", lambda *_: record(**now))
    assert main(["check", "--folder", str(tmp_path)]) == status
    assert said in capsys.readouterr().out


def test_rounds_go_in_either_direction_and_the_first_is_not_counted() -> None:
    order: list[int] = []

    def milliseconds(run: int) -> float:
        order.append(run)
        return float(len(order))

    found = timing.in_turn({"a": 0, "b": 1, "c": 2}, milliseconds, timing.Rounds(2))
    assert order == [0, 1, 2, 2, 1, 0, 2, 0, 1]
    assert found["a"] == {"ms": 7.0, "samples": [6.0, 8.0], "half_width": pytest.approx(2 / 7)}


@pytest.mark.parametrize(("minutes", "rounds"), [(10, 24), (0.1, 5), (0.01, 3)])
def test_rounds_go_on_until_every_mean_is_known_or_time_is_up(
    minutes: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program takes a second each time; the other 1 or 1.1 in turn, whose mean 24 rounds tell to two per cent."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    unsteady = itertools.cycle([1.0, 1.1])

    def milliseconds(run: str) -> float:
        now[0] += 0.5
        return next(unsteady) if run == "unsteady" else 1.0

    found = timing.in_turn({"a": "steady", "b": "unsteady"}, milliseconds, timing.Rounds(3, 0.02, 60 * minutes))
    assert len(found["b"]["samples"]) == rounds
    assert (found["b"]["half_width"] <= 0.02) == (rounds == 24)


def test_ratios_are_to_the_bare_product_or_to_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "back_to_back", lambda *_: 1.0)
    once = timing.Rounds(1)
    found = timing.measure((16, 32, 16), {"forward": lambda h, w, _: h @ w.T, "x": lambda h, w, _: h @ w.T}, once)
    assert [found["results"][name]["ratio"] for name in ("forward", "x")] == [1.0, pytest.approx(1 / 3)]
    programs = {"vast": lambda h, w, _: jax.numpy.zeros(2**50, "int8") + h[0, 0].astype("int8")}
    assert "RESOURCE_EXHAUSTED" in timing.measure((16, 32, 16), programs, once)["left_out"]["vast"]


def test_a_host_that_is_held_up_in_the_short_series_does_not_shorten_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch takes a millisecond, the first six."""
    now, launches = [0.0], []

    def launch() -> None:
        now[0] += 1e-3 if launches else 6e-3
        launches.append(None)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert timing.per_launch(launch, lambda last: None) == pytest.approx(1.0)
