"""Tuning tables: what is written is read back, and whatever else a file holds is refused by name, with the repair."""

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, most_stages
from pallas_ce.backends.mosaic_gpu.tuning import tables
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, ShapeClass, Table, TableError, class_of

DEVICE = "NVIDIA H200"
KEY = ShapeClass("forward", 8192, 131072, 4096, 0)
CONFIG = Config(rows=64, columns=256, stages=3, cluster="rows", in_flight=1, row_group=4)


def document() -> dict[str, Any]:
    config = {"rows": 64, "columns": 256, "piece": None, "stages": 3, "cluster": "rows", "in_flight": 1}
    config |= {"ping_pong": False, "lead": 0, "row_group": 4}
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


def test_a_document_means_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document()))
    assert tables.load(path, DEVICE).entries == {KEY: Entry(CONFIG, 9.5, 10.0)}


def test_a_table_that_cannot_be_written_leaves_the_old_one_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    tables.save(path, Table(DEVICE))
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        tables.save(path, Table(DEVICE, {KEY: Entry(CONFIG, 1.0, 1.0)}))
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON"),
        (b"import os; os.system('true')", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b"9" * 10_000, "it is not JSON"),
        (b" " * (2**20 + 1), "larger than 1048576 bytes"),
        (b"[]", r"the table is \[\] and not an object"),
        (b"null", "the table is None and not an object"),
        (changed(format=1), "its format is 1 and not 3"),
        (changed(format=True), "its format is True and not 3"),
        (changed(device="NVIDIA H100"), "for the device 'NVIDIA H100' and not for 'NVIDIA H200'"),
        (changed(device=["NVIDIA H200"]), "for the device"),
        (changed(entries={}), '"entries" must be a list'),
        (changed(made=[]), '"made" an object'),
        (changed(entries=KeyError), r"the table lacks \['entries'\]"),
        (changed(surprise=1), "the table has unknown keys"),
        (changed(entries=[7]), "entry 0 is 7 and not an object"),
        (changed(entry__surprise=1), "entry 0 has unknown keys"),
        (changed(entry__kernel="rm -rf"), "kernel of entry 0 is 'rm -rf'"),
        (changed(entry__kernel=["forward"]), "kernel of entry 0 is"),
        (changed(entry__rows=1000), "not powers of two"),
        (changed(entry__rows=2**80), "rows of entry 0 is a huge number"),
        (changed(entry__rows=8192.0), "rows of entry 0 is 8192.0 and not a whole number"),
        (changed(entry__rows=True), "rows of entry 0 is True"),
        (changed(entry__vocab_axis=2), "vocab_axis of entry 0 is 2"),
        (changed(entry__config=[]), r"the config of entry 0 is \[\]"),
        (changed(entry__config__depth=64), "unknown keys"),
        (changed(entry__config__stages=KeyError), r"lacks \['stages'\]"),
        (changed(entry__config__stages=5), "stages of the config of entry 0 is 5 and not a whole number from 2 to 4"),
        (changed(entry__config__stages="4"), "stages of the config of entry 0 is '4'"),
        (changed(entry__config__rows=128), r"\(rows, .*\) of the config of entry 0 is \(128, 256, None, False\)"),
        (changed(entry__config__ping_pong=True), r"\(rows, .*\) of the config of entry 0 is \(64, 256, None, True\)"),
        (changed(entry__config__ping_pong=0), "ping_pong of the config of entry 0 is 0 and not true or false"),
        (changed(entry__config__columns=10**30), "columns of the config of entry 0 is a huge number"),
        (changed(entry__config__cluster="both"), "cluster of the config of entry 0 is 'both'"),
        (changed(entry__config__cluster={}), "cluster of the config of entry 0 is"),
        (changed(entry__config__in_flight=2), "in_flight of the config"),
        (changed(entry__config__lead=3), "lead of the config of entry 0 is 3 and not a whole number from 0 to 2"),
        (changed(entry__config__row_group=0), "row_group of the config"),
        (changed(entry__microseconds=float("nan")), "microseconds of entry 0 is nan"),
        (changed(entry__microseconds=-1), "microseconds of entry 0 is -1"),
        (changed(entry__microseconds=10**400), "microseconds of entry 0 is a huge number"),
        (changed(entry__rule_microseconds=None), "rule_microseconds of entry 0 is None"),
    ],
)
def test_what_is_not_a_table_is_refused_with_file_reason_and_repair(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(TableError, match=reason) as caught:
        tables.load(path, DEVICE)
    assert str(path) in str(caught.value)
    assert "Delete it, or make a new one with `python -m pallas_ce.backends.mosaic_gpu.tune`" in str(caught.value)


def test_a_class_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(changed(entries=document()["entries"] * 2)))
    with pytest.raises(TableError, match="entry 1 is for the same class as an earlier one"):
        tables.load(path, DEVICE)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "unreadable"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "real.json").write_text(json.dumps(document()))
        path.symlink_to(tmp_path / "real.json")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(json.dumps(document()))
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
    with pytest.raises(TableError, match=str(path)):
        tables.load(path, DEVICE)


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
    assert class_of("stash", 1664, 128256, 4096, 1) == ("stash", 2048, 131072, 4096, 1)
    assert class_of("forward", 1, 1, 1, 0) == ("forward", 1, 1, 1, 0)
    assert class_of("forward", 8192, 50257, 2880, 0) == ("forward", 8192, 65536, 2048, 0)


def test_file_names_hold_nothing_but_letters_digits_and_underscores() -> None:
    assert tables.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tables.file_name("../../etc/passwd x") == "etc_passwd_x.json"
