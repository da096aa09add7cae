"""Which tiles a kernel takes: the user's table, then the shipped one, then the rule; how the tuner fills a table."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import explain
from pallas_ce.backends.mosaic_gpu.schedule import config
from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages
from pallas_ce.backends.mosaic_gpu.tuning import candidates, tables, tune, tuning
from pallas_ce.backends.mosaic_gpu.tuning.candidates import Case, Times
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, Table, class_of
from pallas_ce.head import HeadSpec

DEVICE = "NVIDIA H200"
SPEC = HeadSpec(4096, 131072, 131072, 0, np.dtype(jnp.bfloat16), None)
TUNED = Config(rows=64, columns=256, stages=3, cluster="rows", in_flight=1, row_group=4)
CLASS = class_of("forward", 8192, 131072, 4096, 0)
KERNELS: tuple[Kernel, ...] = ("forward", "stash", "dlogits")


@pytest.fixture(autouse=True)
def h200_with_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "device_kind", lambda: DEVICE)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    tuning._tables.cache_clear()
    yield
    tuning._tables.cache_clear()


def chosen(kernel: Kernel = "forward", vectors: int = 2, options: int = 0, rows: int = 8192) -> tuning.Choice:
    return tuning.choose(kernel, SPEC, rows, 131072, vectors, options)


def save(path: Path, tuned: Config = TUNED) -> None:
    tables.save(path, Table(DEVICE, {CLASS: Entry(tuned, 1.0, 2.0)}))


def test_without_a_table_the_rule_serves() -> None:
    assert chosen() == (config.choose("forward", 2, 0), "the default rule")


def test_the_shipped_table_serves_its_classes_and_the_rule_the_others(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json")
    assert chosen() == (TUNED, "the table shipped for NVIDIA H200")
    assert chosen(rows=7000).config == TUNED
    assert chosen(rows=1024).source == chosen("stash").source == "the default rule"


def test_the_users_table_comes_before_the_shipped_one(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json", dataclasses.replace(TUNED, row_group=16))
    path = tmp_path / "cache/pallas_ce/nvidia_h200.json"
    save(path)
    assert chosen() == (TUNED, f"the user's table {path}")


def test_the_variable_names_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "mine.json")
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    assert chosen().source.endswith("mine.json")


def test_kernels_with_many_vectors_or_options_follow_the_rule(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json")
    assert chosen(vectors=3).source == chosen(options=1).source == "the default rule"


def test_without_a_gpu_no_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "cache/pallas_ce/nvidia_h200.json")
    monkeypatch.setattr(config, "device_kind", lambda: None)
    assert chosen().source == "the default rule"


def test_a_broken_table_is_named_in_one_warning_and_left_out(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json")
    path = tmp_path / "cache/pallas_ce/nvidia_h200.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1')
    with pytest.warns(UserWarning, match=f"{path} cannot be used: it is not JSON.*Delete it, or make a new one"):
        assert chosen().config == TUNED
    assert chosen().config == TUNED  # a second warning would be an error here


def test_a_named_table_that_does_not_exist_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "gone.json"))
    with pytest.warns(UserWarning, match=r"gone\.json, which PALLAS_CE_TUNING names, does not exist"):
        assert chosen().source == "the default rule"


@pytest.mark.parametrize("path", sorted((Path(tuning.__file__).parent / "tuned").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_tables_are_in_order(path: Path) -> None:
    device = json.loads(path.read_text())["device"]
    assert tables.file_name(device) == path.name
    tables.load(path, device)


@pytest.mark.usefixtures("local_h100")
def test_explain_says_where_tiles_come_from(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json")
    told = explain(
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((131072, 4096), jnp.bfloat16),
        implementation="mosaic_gpu",
        differentiate=(),
    )
    (launch,) = told.launches
    assert (launch.tile_rows, launch.tile_columns, launch.cluster) == (128, 256, 2)
    assert launch.source == "the table shipped for NVIDIA H200"
    assert "chosen by the table shipped for NVIDIA H200" in str(told)


@pytest.mark.parametrize(("rows", "cluster"), [(1024, "columns"), (1664, "rows"), (300, "rows"), (200, "columns")])
def test_the_rule_takes_the_cluster_that_computes_fewest_rows_for_nothing(rows: int, cluster: str) -> None:
    assert chosen("stash", options=1, rows=rows).config.cluster == cluster


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_can_stand_in_a_table(kernel: Kernel, tmp_path: Path) -> None:
    first = list(candidates.first_candidates(kernel))
    every = {*first, *(near for c in first for near in candidates.refinements(kernel, c))}
    assert len(first) == len(set(first)) == sum(3 if ping_pong else 6 for *_, ping_pong in TILES[kernel])
    assert candidates.number_of_candidates(kernel) == len(first) + 4
    for candidate in every:
        entry = Entry(candidate, 1.0, 1.0)
        tables.save(tmp_path / "t.json", Table(DEVICE, {class_of(kernel, 8192, 131072, 4096, 0): entry}))
        assert list(tables.load(tmp_path / "t.json", DEVICE).entries.values()) == [entry]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_rules_tiles_are_among_the_candidates(kernel: Kernel) -> None:
    assert config.choose(kernel, 2, 0) in candidates.first_candidates(kernel)


def test_no_more_stages_are_taken_than_shared_memory_holds() -> None:
    assert {c.stages for kernel in KERNELS for c in candidates.first_candidates(kernel)} == {4, 5}
    small, ping_pong = Config(rows=64, columns=128), Config(rows=128, columns=192, in_flight=1, ping_pong=True)
    assert (most_stages("forward", small), most_stages("stash", small)) == (7, 6)
    assert (most_stages("forward", ping_pong), most_stages("stash", ping_pong)) == (5, 5)
    assert most_stages("stash", dataclasses.replace(ping_pong, ping_pong=False)) == 3


class Fake:
    """Measures by a made-up law: tiles of 64 rows are 10 % faster, one product in flight another 10 %."""

    def __init__(self, gain: float = 0.9, fail: Any = lambda config: False) -> None:
        self.gain, self.fail, self.measured = gain, fail, 0

    def __call__(self, case: Case, config: Config) -> Times | str:
        self.measured += 1
        if self.fail(config):
            return "it does not run"
        factor = (self.gain if config.rows == 64 else 1) * (self.gain if config.in_flight else 1)
        return Times(100.0 * factor * (0.99 if config.row_group == 16 and factor < 0.95 else 1), 100.0)


def case(rows: int = 8192) -> Case:
    return Case("forward", SPEC, rows, 131072)


def filled(measure: Any, cases: list[Case], limit: int = 10**6) -> tuple[Table, int, list[int], list[str]]:
    """The table, cases left, the table's length at each saving, and what was reported as not to be taken."""
    table, saved, refused, tried = Table(DEVICE), list[int](), list[str](), list[Config]()

    def report(case: Case, config: Config, result: Times | str) -> None:
        tried.append(config)
        if isinstance(result, str):
            refused.append(result)

    left = candidates.tune(
        cases, table, measure, lambda t: saved.append(len(t.entries)), report, lambda: len(tried) < limit
    )
    return table, left, saved, refused


def test_the_tuner_keeps_the_fastest_and_saves_after_each_class() -> None:
    table, left, saved, _ = filled(Fake(), [case(), case(1024)])
    best = table.entries[CLASS]
    assert (best.config.rows, best.config.in_flight, best.config.row_group) == (64, 1, 16)
    assert best.microseconds == pytest.approx(100 * 0.9 * 0.9 * 0.99)
    assert (left, saved) == (0, [1, 2])


def test_without_a_gain_beyond_the_noise_the_rules_tiles_stay() -> None:
    table, *_ = filled(Fake(gain=0.999), [case()])
    assert table.entries[CLASS].config == config.choose("forward", 2, 0)


def test_a_candidate_that_fails_is_reported_and_the_others_are_measured() -> None:
    table, left, _, refused = filled(Fake(fail=lambda config: config.rows == 64), [case()])
    assert table.entries[CLASS].config.rows == 128
    assert refused == ["it does not run"] * 6
    assert left == 0


def test_when_time_is_up_only_whole_classes_are_kept() -> None:
    measure = Fake()
    table, left, saved, _ = filled(measure, [case(), case(1024), case(16384)], limit=24)
    assert list(table.entries) == [CLASS]
    assert (left, saved) == (2, [1])
    assert measure.measured == 25  # the first class, its best once more, and what time was left for


def test_cases_are_the_blocks_that_calls_work_on_one_for_each_class() -> None:
    found = tune.cases([(8192, 131072, 4096), (8128, 131072, 4096)], KERNELS, 0)
    assert [(c.kernel, c.rows, c.columns) for c in found] == [
        ("forward", 8192, 131072),
        ("stash", 8192, 131072),
        ("dlogits", 8192, 11520),
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidates_program_agrees_with_the_rules(kernel: Kernel, interpreted: Any) -> None:
    small = Case(kernel, HeadSpec(16, 64, 64, 0, np.dtype(jnp.bfloat16), None), 64, 64)
    given = tune.arrays(small)
    a, b = (
        interpreted(tune.program(small, Config(rows=64, columns=64, stages=2, sms=2, cluster=cluster)))(*given)
        for cluster in ("rows", None)
    )
    assert bool(tune._agree(a, b))
    assert not bool(tune._agree(a, jax.tree.map(lambda x: x + jnp.asarray(0.1, x.dtype), b)))


@pytest.mark.parametrize("text", ["8192", "a,b,c", "1,2,3,4", "0,5,5"])
def test_the_command_refuses_shapes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--shape", text])
    assert f"'{text}'" in capsys.readouterr().err


def test_the_command_says_that_it_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "device_kind", lambda: None)
    assert tune.main([]) == 2
    assert "tuning needs a GPU of the kernels' kind: JAX finds none" in capsys.readouterr().err


def test_the_command_names_the_extra_of_its_progress_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert tune.main([]) == 2
    assert "pip install 'pallas-ce[experiments]'" in capsys.readouterr().err


def test_the_command_says_before_measuring_that_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "device_kind", lambda: DEVICE)
    monkeypatch.setattr(tune, "device_refusal", lambda: None)
    monkeypatch.setattr(tune, "OnDevice", lambda launches: pytest.fail("nothing is to be measured"))

    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    assert tune.main(["--out", str(tmp_path / "table.json")]) == 2
    assert "choose another with --out" in capsys.readouterr().err


def test_an_interrupted_command_keeps_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Fake()

    def interrupted_at_26(case: Case, config: Config) -> Times | str:
        if measure.measured == 26:
            raise KeyboardInterrupt
        return measure(case, config)

    monkeypatch.setattr(tune, "device_kind", lambda: DEVICE)
    monkeypatch.setattr(tune, "device_refusal", lambda: None)
    monkeypatch.setattr(tune, "OnDevice", lambda launches: interrupted_at_26)
    words = ["--shape", "8192,131072,4096", "--shape", "1024,131072,4096", "--kernels", "forward"]
    assert tune.main([*words, "--out", str(tmp_path / "table.json")]) == 0
    assert "table.json: 1 classes of shapes, 1 left for the next run" in capsys.readouterr().out
    assert list(tables.load(tmp_path / "table.json", DEVICE).entries) == [CLASS]


def test_the_command_tunes_writes_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Fake()
    monkeypatch.setattr(tune, "device_kind", lambda: DEVICE)
    monkeypatch.setattr(tune, "device_refusal", lambda: None)
    monkeypatch.setattr(tune, "OnDevice", lambda launches: measure)
    words = ["--shape", "8192,131072,4096", "--kernels", "forward"]
    assert tune.main(words) == 0
    path = tmp_path / "cache/pallas_ce/nvidia_h200.json"
    assert f"{path}: 1 classes of shapes" in capsys.readouterr().out
    tuning._tables.cache_clear()
    assert chosen().config.rows == 64
    once = measure.measured
    assert tune.main(words) == 0
    assert measure.measured == once
    path.write_text("broken")
    assert tune.main(words) == 2
    assert "Delete it" in capsys.readouterr().err
