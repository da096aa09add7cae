"""Tuning tables: what is written is read back, and whatever else a file holds is refused by name, with the repair."""

import json
import os
import pickle
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, most_stages
from pallas_ce.backends.mosaic_gpu.tuning import tables
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, Shape, Table, TableError

DEVICE = "NVIDIA H200"
KEY = Shape("forward", 8192, 131072, 4096, 0)
FIELDS = ("rows", "columns", "piece", "stages", "cluster", "in_flight", "ping_pong", "lead", "row_group")
STORED = dict(zip(FIELDS, (64, 256, None, 3, "rows", 1, False, 0, 4), strict=True))
PING_PONG = dict(zip(FIELDS, (128, 192, 64, 4, None, 1, True, 0, 12), strict=True))
CONFIG = Config(**STORED)


def document() -> dict[str, Any]:
    config = dict(STORED)
    entry = {**KEY._asdict(), "config": config, "microseconds": 9.5, "rule_microseconds": 10}
    return {"format": 3, "device": DEVICE, "made": {"jax": "0.11.2"}, "entries": [entry]}


def changed(**changes: Any) -> Any:
    """The document with values replaced: `entry__config__rows=5` reaches inside; None as a name removes a key."""
    whole = document()
    for path, value in changes.items():
        *outer, last = path.split("__")
        at = whole
        for name in outer:
            at = at["entries"][0] if name == "entry" else at[name]
        if value is KeyError:
            del at[last]
        else:
            at[last] = value
    return whole


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "table.json"
    table = Table(DEVICE, {KEY: Entry(CONFIG, 9.5, 10.0)}, {"jax": "0.11.2"})
    tables.save(path, table)
    assert tables.load(path, DEVICE) == table
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    path.write_text(json.dumps(document()))
    assert tables.load(path, DEVICE) == table


def test_a_table_that_cannot_be_written_leaves_the_old_one_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    tables.save(path, Table(DEVICE))
    before = path.read_text()
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tables.save(path, Table(DEVICE, {KEY: Entry(CONFIG, 1.0, 1.0)}))
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_table_that_does_not_fit_the_disk_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    path, limits = tmp_path / "table.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    tables.save(path, Table(DEVICE))
    before = path.read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(OSError, match="File too large"):
            tables.add(path, Table(DEVICE), {KEY: Entry(CONFIG, 1.0, 1.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (pickle.dumps(Path), "codec can't decode"),
        (b"import os; os.system('true')", "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"[" * 200_000, "recursion"),
        (b"9" * 10_000, "Exceeds the limit"),
        (b"[]", r"\[\] is not an object of format, device"),
        (changed(format=1), r"format is 1 and not one of \(3,\)"),
        (changed(format=True), "format is True"),
        (changed(device="NVIDIA H100"), r"device is 'NVIDIA H100' and not one of \('NVIDIA H200',\)"),
        (changed(entries={}), "entries is not a list"),
        (changed(entries=KeyError), "is not an object of format, device, made, entries"),
        (changed(entries=[7]), "in entry 0, 7 is not an object of kernel, rows"),
        (changed(entries=document()["entries"] * 2), "in entry 1, an earlier one is for the same class"),
        (changed(entry__kernel="rm -rf"), "in entry 0, kernel is 'rm -rf' and not one of"),
        (changed(entry__rows=1000), r"rows is 1000 and not one of \(1, 2, 4, 8"),
        (changed(entry__rows=2**80), "rows is 1208925"),
        (changed(entry__rows=True), "rows is True"),
        (changed(entry__config=[]), r"\[\] is not an object of rows, columns"),
        (changed(entry__config__stages=5), r"stages is 5 and not one of range\(2, 5\)"),
        (changed(entry__config__rows=128), r"the tile .* is \(128, 256, None, False\) and not one of"),
        (changed(entry__config__ping_pong=0), r"the tile .* is \(64, 256, None, 0\)"),
        (changed(entry__config__columns=10**400), "the tile"),
        (changed(entry__config__cluster={}), "cluster is {} and not one of"),
        (changed(entry__config__row_group=0), r"row_group is 0 and not one of range\(1, 65\)"),
        (changed(entry__config=PING_PONG | {"lead": 2}), "ping_pong goes with lead=0, not 2"),
        (changed(entry__microseconds=float("nan")), "microseconds is nan"),
        (changed(entry__microseconds=-1), "microseconds is -1"),
        (changed(entry__microseconds=10**400), "microseconds is 1000"),
    ],
)
def test_what_is_not_a_table_is_refused_with_file_reason_and_repair(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(TableError, match=reason) as caught:
        tables.load(path, DEVICE)
    assert str(path) in str(caught.value)
    assert "Delete it, or make a new one with `python -m pallas_ce.tune`" in str(caught.value)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=f"{tmp_path} cannot be used"):
        tables.load(tmp_path, DEVICE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@hypothesis.given(place=st.sampled_from(["whole", "entry", "config"]), name=st.integers(0, 8), value=JSON)
def test_any_value_anywhere_is_either_a_table_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: str, name: int, value: Any
) -> None:
    whole = document()
    at = {"whole": whole, "entry": whole["entries"][0], "config": whole["entries"][0]["config"]}[place]
    at[list(at)[name % len(at)]] = value
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(whole))
    try:
        table = tables.load(path, DEVICE)
    except TableError:
        return
    for key, entry in table.entries.items():
        config = entry.config
        assert (config.rows, config.columns, config.piece, config.ping_pong) in TILES[key.kernel]
        assert config.stages <= most_stages(key.kernel, config)


def test_a_shape_belongs_to_the_nearest_powers_of_two() -> None:
    assert Shape("stash", 1664, 128256, 4096, 1).nearest == ("stash", 2048, 131072, 4096, 1)
    assert Shape("forward", 1, 1, 1, 0).nearest == ("forward", 1, 1, 1, 0)
    assert Shape("forward", 8192, 50257, 2880, 0).nearest == ("forward", 8192, 65536, 2048, 0)


def test_file_names_hold_nothing_but_letters_digits_and_underscores() -> None:
    assert tables.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tables.file_name("../../etc/passwd x") == "etc_passwd_x.json"
