"""Result files of the GPU benchmarks: whole after each point, gone on with after an interruption, never mixed."""

import argparse
import functools
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from experiments import gpu_report, peers, site
from experiments.bench import ladder, report, results, scaling, summary, timing
from experiments.bench.points import SECTIONS
from experiments.bench.results import ResultError, ResultFile, read, run
from experiments.bench.wins import wins

RESULTS = results.FOLDER
MACHINE = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-20"}


def record(n: int, v: int, **ratios: float) -> dict[str, Any]:
    """A point whose bare product takes a millisecond and the three products three."""
    base = {name: {"ms": 1.0, "temporary_mib": 0.0} for name in ("bare", "for_hidden", "for_weight")}
    found = {
        name: {"ms": ratio * (1.0 if name.startswith("forward") else 3.0), "ratio": ratio, "temporary_mib": 100.0}
        for name, ratio in ratios.items()
    }
    return {"n": n, "v": v, "h": 256, "results": base | found}


def measured(
    folder: Path, points: Any, machine: dict[str, Any] = MACHINE, name: str = "gpu_head_grid", **options: Any
) -> int:
    """Runs a command whose points are measured by these functions, or have these records."""
    made = {point: found if callable(found) else lambda found=found: found for point, found in points.items()}
    given = argparse.Namespace(**{"out": folder, "again": False, "minutes": None} | options)
    return run([ResultFile(name, f"python -m experiments.{name}", made)], machine, lambda *_: "", given)


def points_of(folder: Path) -> list[str]:
    return list(read(folder / "gpu_head_grid.json")["points"])


def test_every_point_is_on_disk_before_the_next_one_begins(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, {"a": record(1, 2), "b": record(1, 2), "c": Mock(side_effect=KeyboardInterrupt)})
    assert points_of(tmp_path) == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_head_grid.json"]


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    measured(tmp_path, {"a": record(1, 2)})
    again = Mock(side_effect=AssertionError("it has been measured"))
    assert measured(tmp_path, {"a": again, "b": record(1, 2)}) == 0
    assert points_of(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 2)])
def test_a_file_gone_on_with_says_how_often_each_point_was_measured_at_least(
    first: int, then: int, tmp_path: Path
) -> None:
    measured(tmp_path, {"a": record(1, 2)}, MACHINE | {"rounds": first})
    measured(tmp_path, {"a": record(1, 2), "b": record(1, 2)}, MACHINE | {"rounds": then})
    assert read(tmp_path / "gpu_head_grid.json")["machine"]["rounds"] == 2


def test_a_point_that_fails_is_named_after_all_others_are_on_disk(tmp_path: Path) -> None:
    failing = {"a": record(1, 2), "b": Mock(side_effect=RuntimeError("out of memory")), "c": record(1, 2)}
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
        return record(1, 2)

    monkeypatch.setattr(results.time, "monotonic", lambda: clock[0])
    measured(tmp_path, dict.fromkeys("abcdef", measure), minutes=35 / 60)
    assert points_of(tmp_path) == ["a", "b", "c"]
    assert "time is up with 3 points left" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"device": "NVIDIA H100"}, {"jax": "0.12.0"}])
def test_results_of_different_machines_or_versions_are_not_mixed(
    tmp_path: Path, change: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(tmp_path, {"a": record(1, 2)})
    assert measured(tmp_path, {"b": record(1, 2)}, MACHINE | change) == 2
    assert re.search(f"{next(iter(change.values()))}.*Pass --again .* or --out", capsys.readouterr().err)
    assert measured(tmp_path, {"b": record(1, 2)}, MACHINE | change, again=True) == 0
    assert points_of(tmp_path) == ["b"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"command": 1, "machine": {}, "points": []}'])
def test_what_is_not_a_result_file_is_refused_and_left_alone(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu_head_grid.json"
    path.write_text(content)
    assert measured(tmp_path, {"a": record(1, 2)}) == 2
    assert re.search(r"is not a result file: .*move it away", capsys.readouterr().err)
    assert path.read_text() == content


def sections() -> dict[str, Any]:
    common = {"forward canonical": 1.05, "recompute": 1.4, "canonical": 1.03}
    return {
        "grid": {
            "1024x32768": record(1024, 32768, forward=0.9, in_forward=1.0, **common),
            "1024x65536": record(1024, 65536, forward=1.0, in_forward=1.1, **common),
        }
    }


def figures(found: dict[str, Any]) -> dict[str, float | None]:
    return {target.what: target.value for target in summary.targets(found)}


def test_figures_are_geometric_means_and_worst_points() -> None:
    found = figures(sections())
    assert found["forward / bare product, geometric mean over the grid"] == pytest.approx(math.sqrt(0.9))
    assert found["forward / bare product, worst point"] == 1.0
    assert found["in_forward / three products, worst point"] == 1.1
    # 100 MiB of temporaries, less the float32 sum for the weight (32 or 64 MiB) or for hidden (1 MiB).
    assert found["in_forward, MiB beside dW, V ≤ 131072"] == 100 - 32
    assert found["recompute, MiB beside dH, worst point"] == 100 - 1
    assert found["in_forward, MiB beside dW, V = 262144"] is None


def test_quotients_are_of_times_at_one_point() -> None:
    point = record(1, 2, in_forward=1.0, **{"in_forward quarter": 0.3, "in_forward half scratch": 1.05})
    found = figures({"options": {"options": point}})
    assert found["in_forward, a quarter of the rows / all"] == pytest.approx(0.3)
    assert found["in_forward, half the scratch / default"] == pytest.approx(1.05)


def test_what_the_bridge_to_pytorch_takes_is_among_the_figures() -> None:
    def host(forward: float, both: float) -> dict[str, Any]:
        us = {"bridge forward": forward, "native forward": 100, "bridge forward+backward": both}
        return {"results": {name: {"us": x} for name, x in {**us, "native forward+backward": 200}.items()}}

    points = {
        "host a": host(300, 1200),
        "host b": host(350, 1000),
        "device a": {"ratio": 1.01},
        "done a": {"ratio": 1.2},
        "memory a": {"ratio": 0.9},
        "given a": {"results": {"in place": {"share": 0.7}}},
        "given b": {"results": {"in place": {"share": 0.9}}},
    }
    found = figures({"torch_gpu": points})
    assert [value for what, value in found.items() if what.startswith("PyTorch")] == [3.5, 6.0, 1.01, 1.2, 0.9, 0.7]


def test_a_win_is_over_stored_logits_and_every_peer_where_all_were_timed_beside_ours() -> None:
    points = sections()["grid"]

    def peer(name: str, ratio: float, *, ours: float = 1.0, at: Any = tuple(points)) -> dict[str, Any]:
        return {point: record(1024, 1, **{name: ratio, "forward": ours, "in_forward": ours}) for point in at}

    won = functools.partial(wins, "in_forward", points)
    assert won() == (1, 2)
    assert won(peer("quack", 1.2)) == (1, 2)
    assert won(peer("quack", 0.99)) == (0, 2)
    assert won(peer("quack", 0.99, ours=0.98)) == (1, 2)
    assert won(peer("forward quack", 0.5)) == (1, 2)
    assert won(peer("Liger", 1.2), peer("quack", 0.99)) == (0, 2)
    assert won(peer("Liger", 1.2), peer("quack", 1.2, at=["1024x32768"])) == (1, 1)
    assert won({}) == (0, 0)
    # Of one that was timed in two processes, their mean counts.
    assert won(peer("quack", 0.99), peer("quack", 1.02)) == (1, 2)
    assert won(peer("quack", 0.97), peer("quack", 1.02)) == (0, 2)
    alone = {point: record(1024, 1, quack=0.5) for point in points}
    assert won(alone) == (0, 0)
    assert wins("forward", points, peer("forward quack", 0.5), peer("quack", 0.5)) == (0, 2)
    assert wins("forward", points, peer("forward quack", 9.0), peer("quack", 0.5)) == (2, 2)


def test_a_figure_of_the_grid_shows_no_other_points() -> None:
    documents = report.load(RESULTS)
    head = record(site.ROWS, 50257, in_forward=9.0, recompute=9.0, canonical=9.0, CCE=9.0)
    with_heads = {
        name: document | {"points": document["points"] | {"GPT-2": head}} for name, document in documents.items()
    }
    assert site.lines(with_heads) == site.lines(documents)


def test_peers_chosen_by_name_have_a_file_of_their_own_that_the_report_shows(tmp_path: Path) -> None:
    file = peers.result_file(["quack", "torch, bfloat16 logits"], lambda shape: record(*shape[:2], quack=1.2))
    run([file], MACHINE, lambda *_: "", argparse.Namespace(out=tmp_path, again=False, minutes=None))
    document = read(tmp_path / "peers_quack_torch_bfloat16_logits.json")
    assert document["command"] == "python -m experiments.peers --peers quack 'torch, bfloat16 logits'"
    assert list(document["points"]) == [*SECTIONS["grid"], *SECTIONS["heads"]]
    assert report.load(tmp_path) == {"peers_quack_torch_bfloat16_logits": document}


def test_the_report_shows_measured_numbers_machine_and_what_was_left_out(tmp_path: Path) -> None:
    measured(tmp_path, sections()["grid"])
    left_out = {"left_out": {"Liger": "liger_kernel is not installed (pip install liger-kernel)"}}
    measured(tmp_path, {"1024x32768": record(1024, 32768, quack=1.2, in_forward=1.0) | left_out}, name="peers")
    written = report.write(tmp_path)
    assert [path.name for path in written] == ["gpu_report.md", "gpu_head_grid.png"]
    text = written[0].read_text()
    assert "| in_forward / three products, worst point | ≤ 1.06 | 1.1 | no |" in text
    assert "| seconds to compile a call, worst | ≤ 4 | not measured |  |" in text
    assert "| in_forward, the fastest of all, share of 1 points (grid) | ≥ 0.9 | 1 | yes |" in text
    assert "| forward, the fastest of all, share of 0 points (heads) | ≥ 0.8 | not measured |  |" in text
    assert "device NVIDIA H200, jax 0.11.2, date 2026-11-20" in text
    assert "Left out: Liger: liger_kernel is not installed" in text
    assert "3.000 ms (1.000), 100 MiB" in text
    assert written[1].read_bytes().startswith(b"\x89PNG")


def test_a_step_of_the_ladder_is_what_the_grid_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--folder", str(tmp_path), "--step", "first"]) == 2
    assert "holds no points" in capsys.readouterr().err
    measured(tmp_path, sections()["grid"])
    assert gpu_report.main(["--folder", str(tmp_path), "--step", "first"]) == 0
    assert gpu_report.main(["--folder", str(tmp_path), "--step", "wider tiles"]) == 0
    first, second = ladder.load(tmp_path / ladder.FILE)
    machine = {"what": "first", "date": "2026-11-20", "device": "NVIDIA H200"}
    assert first == machine | {"points": 2, "forward": 0.9487, "in_forward": 1.0488, "recompute": 1.4}
    assert second["what"] == "wider tiles"
    assert (
        "| wider tiles | 2026-11-20, NVIDIA H200 | 2 | 0.949 | 1.049 | 1.400 |"
        in (tmp_path / "gpu_report.md").read_text()
    )


def test_without_results_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--folder", str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_broken_ladder_is_refused(tmp_path: Path) -> None:
    (tmp_path / ladder.FILE).write_text('[{"what": "x"}]')
    with pytest.raises(ResultError, match="is not a ladder"):
        ladder.load(tmp_path / ladder.FILE)


def test_the_published_report_is_made_from_its_result_files() -> None:
    text = report.markdown(report.load(RESULTS), ladder.load(RESULTS / ladder.FILE))
    assert (RESULTS / "gpu_report.md").read_text() == text


def test_the_published_scaling_is_made_from_its_result_files() -> None:
    documents = scaling.read(RESULTS)
    assert [document["records"][0]["gpus"] for document in documents] == [2, 4]
    assert (RESULTS / "gpu_scaling.md").read_text() == scaling.markdown(documents)


def test_a_figure_that_misses_its_bound_is_said_to(tmp_path: Path) -> None:
    two, _ = scaling.read(RESULTS)
    tensor = next(r for r in two["records"] if r["layout"] == "tensor")
    for value, said in ((0.97, "no"), (0.98, "yes")):
        tensor["results"]["in_forward"]["efficiency"] = value
        assert f"| tensor on 2, in_forward: efficiency | ≥ 0.98 | {value:.3f} | {said} |" in scaling.markdown([two])
    (tmp_path / scaling.file_name(2)).write_text(json.dumps(two))
    assert [path.name for path in scaling.write(tmp_path)] == ["gpu_scaling.md", "gpu_scaling.png"]


def test_a_host_that_is_held_up_in_the_short_series_does_not_shorten_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of a millisecond each, the first of which takes six."""
    now, launches = [0.0], []

    def launch() -> None:
        now[0] += 1e-3 if launches else 6e-3
        launches.append(None)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert timing.per_launch(launch, lambda last: None) == pytest.approx(1.0)
