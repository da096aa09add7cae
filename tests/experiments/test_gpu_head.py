"""The GPU benchmarks of the head: their commands at small sizes on a CPU, every section for a moment on a GPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from experiments import gpu_head, peers
from experiments.bench import timing
from experiments.bench.command import dry
from experiments.bench.peers import PEERS, Peer
from experiments.bench.points import GRID, HEADS, OPTIONS_SHAPE, SECTIONS, standard, variants
from experiments.bench.programs import inputs

SHAPE = (512, 4096, 256)


def traced(shape: tuple[int, int, int], programs: dict[str, Any], *_: Any) -> dict[str, Any]:
    """In place of a measurement: traces every program, which fails where one is wrong."""
    n, v, h = shape
    for program in programs.values():
        jax.eval_shape(program, *jax.eval_shape(lambda: inputs(n, v, h)))
    return {"n": n, "v": v, "h": h, "results": {name: {"ms": 1.0, "ratio": 1.0} for name in programs}}


def test_the_grid_is_the_papers_and_heads_are_those_of_published_models() -> None:
    assert len(SECTIONS["grid"]) == len(GRID) == 20
    assert {point.shape for point in SECTIONS["grid"].values()} == set(GRID)
    assert {name: point.shape for name, point in SECTIONS["heads"].items()} == HEADS


def test_a_dry_run_measures_every_section_and_can_be_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "measure", traced)
    monkeypatch.setattr(timing, "compile_seconds", traced)
    words = ["--dry-run", "--out", str(tmp_path)]
    assert gpu_head.main(["heads", "options", "compile", *words]) == 0
    assert capsys.readouterr().out
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(files) == {"gpu_head_heads.json", "gpu_head_options.json", "gpu_head_compile.json"}
    heads = files["gpu_head_heads.json"]
    assert heads["command"] == "python -m experiments.gpu_head heads"
    assert {"device", "jax", "date", "clock", "rounds"} <= set(heads["machine"])
    assert list(heads["points"]) == list(HEADS)
    assert set(standard("xla", SHAPE)) <= set(heads["points"]["GPT-2"]["results"])
    options = files["gpu_head_options.json"]["points"]["options"]
    assert (options["n"], options["v"], options["h"]) == dry(OPTIONS_SHAPE)
    assert set(variants("xla", SHAPE)) == set(options["results"])
    assert gpu_head.main(["heads", *words]) == 0
    assert capsys.readouterr().out == ""


def test_a_run_that_is_out_of_time_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "measure", traced)
    assert gpu_head.main(["heads", "--minutes", "0", "--dry-run", "--out", str(tmp_path)]) == 0
    assert "time is up with 7 points left; run the same command again to go on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"), [(["gird"], "there is no section 'gird'"), (["--dry-run"], "--dry-run needs --out")]
)
def test_words_that_make_no_sense_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_head.main(words)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_point_is_timed_beside_the_bare_products() -> None:
    programs = {name: standard("xla", SHAPE)[name] for name in ("forward", "in_forward")}
    found = timing.measure((64, 512, 64), programs, 2, timing.back_to_back)["results"]
    three = sum(found[name]["ms"] for name in ("bare", "for_hidden", "for_weight"))
    assert found["forward"]["ratio"] == pytest.approx(found["forward"]["ms"] / found["bare"]["ms"])
    assert found["in_forward"]["ratio"] == pytest.approx(found["in_forward"]["ms"] / three)
    assert all(len(result["samples"]) == 2 and result["ms"] > 0 for result in found.values())


def test_times_are_those_of_one_launch_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def program() -> int:
        clock[0] += 0.002
        return 0

    def wait(_: Any) -> None:
        clock[0] += 0.0002  # a fixed cost

    monkeypatch.setattr(timing, "jax", SimpleNamespace(block_until_ready=wait))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert timing.back_to_back(program, ()) == pytest.approx(2.0, rel=3e-3)


def test_a_first_round_is_not_counted_and_rounds_go_in_either_direction_from_one_after_the_other() -> None:
    order: list[int] = []

    def clock(program: Any, arguments: Any) -> float:
        order.append(id(program))
        return float(len(order))

    found = timing.measure((16, 32, 16), {"forward": lambda hidden, weight, labels: hidden @ weight.T}, 2, clock)
    first, second, third = order[:4], order[4:8], order[8:]
    assert second == first[::-1]
    assert third == [*first[-1:], *first[:-1]]
    assert found["results"]["bare"]["samples"] == [8.0, 10.0]
    assert found["results"]["forward"]["samples"] == [5.0, 9.0]


def test_compile_seconds_are_those_of_each_program() -> None:
    compiled = []

    def program(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        compiled.append(weight.shape[0])
        return hidden @ weight.T

    found = timing.compile_seconds((64, 2048, 16), {"forward": program, "in_forward": program})
    assert found["first_seconds"] > 0
    for result in found["results"].values():
        assert set(result) == {"compile_seconds", "untuned_seconds"}
        assert min(result.values()) > 0
    assert len(set(compiled)) == 5


def test_a_missing_peer_is_left_out_with_the_way_to_install_it() -> None:
    peer = Peer("nobody", "no_such_module", "no-such-package", lambda: pytest.fail("it must not be made"))
    assert peer.missing() == "no_such_module is not installed (pip install no-such-package)"
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def test_peers_need_torch_and_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.main([]) == 2
    assert "pip install 'pallas-ce[torch]'" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_contender_is_timed_on_the_gpu() -> None:
    programs = standard("mosaic_gpu", SHAPE)
    record = timing.measure(SHAPE, programs, 1, timing.back_to_back)
    assert all(record["results"][name]["ratio"] > 0 for name in programs)


@pytest.mark.gpu
@pytest.mark.parametrize("clock", timing.CLOCKS)
def test_variants_are_timed_on_the_gpu(clock: str) -> None:
    programs = variants("mosaic_gpu", OPTIONS_SHAPE)
    record = timing.measure(SHAPE, programs, 1, timing.CLOCKS[clock])
    assert all(record["results"][name]["ratio"] > 0 for name in programs)


@pytest.mark.parametrize(("logits_bytes", "most"), [(2**30, 16), (2**33, 2), (2**35, 1)])
def test_programs_are_compiled_at_once_as_memory_allows(
    logits_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert timing._compiled_at_once(logits_bytes) == most
