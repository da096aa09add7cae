"""Which tiles a kernel takes: the user's table, then the shipped one, then the rule; how the tuner fills a table."""

import concurrent.futures
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import explain, tune
from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu.schedule import config
from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages
from pallas_ce.backends.mosaic_gpu.tuning import measure, tables, tuning
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, Shape, Table
from pallas_ce.head import HeadSpec

DEVICE = "NVIDIA H200"
SPEC = HeadSpec(4096, 131072, 131072, 0, np.dtype(jnp.bfloat16), None)
TUNED = Config(rows=64, columns=256, stages=3, cluster="rows", in_flight=1, row_group=4)
CLASS = Shape("forward", 8192, 131072, 4096, 0)
KERNELS: tuple[Kernel, ...] = ("forward", "stash", "dlogits")


@pytest.fixture(autouse=True)
def h200_with_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(targets, "cuda_kind", lambda: DEVICE)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    tuning._tables.cache_clear()
    yield
    tuning._tables.cache_clear()


def chosen(kernel: Kernel = "forward", vectors: int = 2, options: int = 0, rows: int = 8192) -> tuning.Choice:
    return tuning.tiles_for(kernel, SPEC, rows, 131072, vectors, options)


def save(path: Path, tuned: Config = TUNED) -> None:
    tables.save(path, Table(DEVICE, {CLASS: Entry(tuned, 1.0, 2.0)}))


def test_the_users_table_comes_before_the_shipped_one_and_that_before_the_rule(tmp_path: Path) -> None:
    assert chosen() == (config.default_tiles("forward", 2, 0), "the default rule")
    tuning._tables.cache_clear()
    save(tmp_path / "shipped/nvidia_h200.json")
    assert chosen() == (TUNED, "the table shipped for NVIDIA H200")
    assert chosen(rows=7000).config == TUNED
    # Other classes, and kernels with many vectors or options.
    for other in (chosen(rows=1024), chosen("stash"), chosen(vectors=3), chosen(options=1)):
        assert other.source == "the default rule"
    tuning._tables.cache_clear()
    path, tuned = tmp_path / "cache/pallas_ce/nvidia_h200.json", dataclasses.replace(TUNED, row_group=16)
    save(path, tuned)
    assert chosen() == (tuned, f"the user's table {path}")


def test_without_a_gpu_no_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "cache/pallas_ce/nvidia_h200.json")
    monkeypatch.setattr(targets, "cuda_kind", lambda: None)
    assert chosen().source == "the default rule"


def test_a_broken_table_is_named_in_one_warning_and_left_out(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json")
    path = tmp_path / "cache/pallas_ce/nvidia_h200.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1')
    with pytest.warns(UserWarning, match=f"{path} cannot be used: Expecting.*Delete it, or make a new one"):
        assert chosen().config == TUNED
    assert chosen().config == TUNED  # a second warning would be an error here


def test_the_variable_names_a_table_which_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    with pytest.warns(UserWarning, match=r"mine\.json, which PALLAS_CE_TUNING names, does not exist"):
        assert chosen().source == "the default rule"
    tuning._tables.cache_clear()
    save(tmp_path / "mine.json")
    assert chosen().source.endswith("mine.json")


@pytest.mark.parametrize("path", sorted((Path(tuning.__file__).parent / "tuned").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_tables_are_in_order(path: Path) -> None:
    device = json.loads(path.read_text())["device"]
    assert tables.file_name(device) == path.name
    tables.load(path, device)


@pytest.mark.usefixtures("local_h100")
def test_explain_says_where_tiles_come_from(tmp_path: Path) -> None:
    save(tmp_path / "shipped/nvidia_h200.json")
    arrays = [jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16) for rows in (8192, 131072)]
    told = explain(*arrays, implementation="mosaic_gpu", differentiate=())
    (launch,) = told.launches
    assert (launch.tile_rows, launch.tile_columns, launch.cluster) == (128, 256, 2)
    assert launch.source == "the table shipped for NVIDIA H200"
    assert "chosen by the table shipped for NVIDIA H200" in str(told)


@pytest.mark.parametrize(("rows", "cluster"), [(1024, "columns"), (1664, "rows"), (300, "rows"), (200, "columns")])
def test_the_rule_takes_the_cluster_that_computes_fewest_rows_for_nothing(rows: int, cluster: str) -> None:
    assert chosen("stash", options=1, rows=rows).config.cluster == cluster


@pytest.mark.parametrize(
    ("device", "kernel", "rows", "options", "pairs"),
    [
        ("NVIDIA H100 80GB HBM3", "forward", 8192, 0, True),
        ("NVIDIA H100 80GB HBM3", "forward", 2048, 0, False),  # few logits
        ("NVIDIA H100 80GB HBM3", "forward", 8192, 2, False),  # too many registers for ping-pong
        ("NVIDIA H100 80GB HBM3", "stash", 8192, 0, False),
        ("NVIDIA H200", "forward", 32768, 0, False),
        (None, "forward", 32768, 0, False),
    ],
)
def test_much_work_goes_to_pairs_of_blocks_where_memory_is_slower(
    device: str | None, kernel: Kernel, rows: int, options: int, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "cuda_kind", lambda: device)
    assert (chosen(kernel, options=options, rows=rows).config == config.IN_PAIRS) == pairs


@pytest.mark.parametrize(
    ("device", "rows", "tiles", "paced"),
    [
        ("NVIDIA H200", 2048, config.PING_PONG, True),
        ("NVIDIA H200", 1024, config.PING_PONG, False),  # a short launch
        ("NVIDIA H200", 2048, config.IN_PAIRS, False),  # which share loads
        ("NVIDIA H200", 2048, Config(cluster=None), False),
        ("NVIDIA H100 80GB HBM3", 2048, config.PING_PONG, False),
        (None, 2048, config.PING_PONG, True),
    ],
)
def test_thread_blocks_keep_pace_in_a_long_forward_on_an_h200(
    device: str | None, rows: int, tiles: Config, paced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "cuda_kind", lambda: device)
    assert config.keeps_pace(tiles, rows, 131072, 4096) == paced


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_can_stand_in_a_table(kernel: Kernel, tmp_path: Path) -> None:
    first = list(measure.first_candidates(kernel))
    assert {config.default_tiles(kernel, 2, 0), config.IN_PAIRS} <= set(first)
    every = {*first, *(near for c in first for near in measure.refinements(c))}
    assert len(first) == len(set(first)) == sum(3 if ping_pong else 6 for *_, ping_pong in TILES[kernel])
    assert measure.number_of_measurements(kernel) == len(first) + 5
    for candidate in every:
        entry = Entry(candidate, 1.0, 1.0)
        tables.save(tmp_path / "t.json", Table(DEVICE, {Shape(kernel, 8192, 131072, 4096, 0): entry}))
        assert list(tables.load(tmp_path / "t.json", DEVICE).entries.values()) == [entry]


def test_no_more_stages_are_taken_than_shared_memory_holds() -> None:
    assert {c.stages for kernel in KERNELS for c in measure.first_candidates(kernel)} == {4, 5}
    small, ping_pong = Config(rows=64, columns=128), Config(rows=128, columns=192, in_flight=1, ping_pong=True)
    assert (most_stages("forward", small), most_stages("stash", small)) == (7, 6)
    assert (most_stages("forward", ping_pong), most_stages("stash", ping_pong)) == (5, 5)
    assert most_stages("stash", dataclasses.replace(ping_pong, ping_pong=False)) == 3


class Fake:
    """Measures by a made-up law: tiles of 64 rows are 10 % faster, one product in flight another 10 %."""

    def __init__(self, gain: float = 0.9, fail: Any = lambda config: False, stop_after: float = float("inf")) -> None:
        self.gain, self.fail, self.stop_after, self.measured = gain, fail, stop_after, 0

    def __call__(self, config: Config) -> Entry | str:
        if self.measured >= self.stop_after:
            raise KeyboardInterrupt
        self.measured += 1
        if self.fail(config):
            return "it does not run"
        factor = (self.gain if config.rows == 64 else 1) * (self.gain if config.in_flight else 1)
        return Entry(config, 100.0 * factor * (0.99 if config.row_group == 16 and factor < 0.95 else 1), 100.0)


def test_the_fastest_candidate_is_found_and_one_that_fails_is_left_out() -> None:
    best = measure.best_of(CLASS, Fake())
    assert (best.config.rows, best.config.in_flight, best.config.row_group) == (64, 1, 16)
    assert best.microseconds == pytest.approx(100 * 0.9 * 0.9 * 0.99)
    assert measure.best_of(CLASS, Fake(fail=lambda config: config.rows == 64)).config.rows == 128
    assert measure.best_of(CLASS, Fake(fail=lambda config: True)) is None
    # Without a gain beyond the noise the rule's tiles stay.
    assert measure.best_of(CLASS, Fake(gain=0.999)).config == config.default_tiles("forward", 2, 0)


def test_cases_are_the_blocks_that_calls_work_on_one_for_each_class() -> None:
    found = tune.blocks_of([(8192, 131072, 4096), (8128, 131072, 4096)], KERNELS, 0)
    assert [c[:3] for c in found] == [("forward", 8192, 131072), ("stash", 8192, 131072), ("dlogits", 8192, 11520)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidates_program_agrees_with_the_rules(kernel: Kernel, interpreted: Any) -> None:
    small = Shape(kernel, 64, 64, 16, 0)
    given = measure.arrays(small)
    a, b = (
        interpreted(measure.program(small, Config(rows=64, columns=64, stages=2, sms=2, cluster=cluster)))(*given)
        for cluster in ("rows", None)
    )
    assert bool(measure._agree(a, b))
    assert not bool(measure._agree(a, jax.tree.map(lambda x: x + jnp.asarray(0.1, x.dtype), b)))


@pytest.mark.parametrize("text", ["8192", "a,b,c", "1,2,3,4", "0,5,5"])
def test_the_command_refuses_shapes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--shape", text])
    assert f"'{text}'" in capsys.readouterr().err


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "cuda_kind", lambda: None)
    assert tune.main([]) == 2
    assert "tuning needs a GPU of the kernels' kind: JAX finds none" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert tune.main([]) == 2
    assert "pip install 'pallas-ce[experiments]'" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Has the command find a GPU, and measure by the made-up law."""
    fake = Fake()
    monkeypatch.setattr(tune, "cuda_kind", lambda: DEVICE)
    monkeypatch.setattr(tune, "device_refusal", lambda: None)
    monkeypatch.setattr(measure, "on_device", lambda case, launches: fake)
    return fake


def test_the_command_says_before_measuring_that_it_cannot_write(
    tmp_path: Path, gpu: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("disk full")))
    assert tune.main(["--out", str(tmp_path / "table.json")]) == 2
    assert "choose another with --out" in capsys.readouterr().err
    assert gpu.measured == 0


TWO_SHAPES = ["--shape", "8192,131072,4096", "--shape", "1024,131072,4096", "--kernels", "forward"]


def test_an_interrupted_command_keeps_whole_classes(
    tmp_path: Path, gpu: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.stop_after = 26  # the first class takes 20
    assert tune.main([*TWO_SHAPES, "--out", str(tmp_path / "table.json")]) == 0
    assert "table.json: 1 classes of shapes, 1 left for the next run" in capsys.readouterr().out
    assert list(tables.load(tmp_path / "table.json", DEVICE).entries) == [CLASS]


def test_when_time_is_up_the_command_stops(tmp_path: Path, gpu: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([*TWO_SHAPES, "--minutes", "0"]) == 0
    assert "0 classes of shapes, 2 left for the next run" in capsys.readouterr().out
    assert gpu.measured == 0


def test_the_command_tunes_writes_and_goes_on(tmp_path: Path, gpu: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.fail = lambda config: config.columns == 192
    words = ["--shape", "8192,131072,4096", "--kernels", "forward"]
    assert tune.main(words) == 0
    path = tmp_path / "cache/pallas_ce/nvidia_h200.json"
    told = capsys.readouterr()
    assert f"{path}: 1 classes of shapes" in told.out
    assert "left out Config(rows=128, columns=192" in told.out + told.err
    tuning._tables.cache_clear()
    assert chosen().config.rows == 64
    once = gpu.measured
    assert tune.main(words) == 0
    assert gpu.measured == once
    path.write_text("broken")
    assert tune.main(words) == 2
    assert "Delete it" in capsys.readouterr().err


def test_two_commands_at_once_keep_what_each_has_measured(tmp_path: Path, gpu: Fake) -> None:
    """As on a host of several GPUs of one model."""
    path, other = tmp_path / "table.json", dataclasses.replace(TUNED, row_group=16)
    both = [Table(DEVICE), Table(DEVICE)]
    for table in both:
        tables.add(path, table, {})
    few, many = CLASS._replace(rows=1024), CLASS._replace(rows=16384)
    tables.add(path, both[0], {CLASS: Entry(TUNED, 1.0, 2.0), few: Entry(TUNED, 1.0, 2.0)})
    tables.add(path, both[1], {few: Entry(other, 1.0, 2.0), many: Entry(other, 1.0, 2.0)})
    found = tables.load(path, DEVICE).entries
    assert {key: entry.config for key, entry in found.items()} == {CLASS: TUNED, few: other, many: other}
    assert [x.name for x in tmp_path.iterdir() if x.is_file()] == ["table.json"]


def test_a_table_that_is_written_and_read_at_once_is_always_whole(tmp_path: Path) -> None:
    path, keys = tmp_path / "table.json", [CLASS._replace(rows=2**power) for power in range(24)]
    tables.save(path, Table(DEVICE))

    def add(some: list[Shape]) -> None:
        for key in some:
            tables.add(path, Table(DEVICE), {key: Entry(TUNED, 1.0, 2.0)})

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        adding = [threads.submit(add, keys[start::4]) for start in range(4)]
        while not all(future.done() for future in adding):
            assert tables.load(path, DEVICE).entries.keys() <= set(keys)
        assert [future.result() for future in adding] == [None] * 4
    assert tables.load(path, DEVICE).entries.keys() == set(keys)
