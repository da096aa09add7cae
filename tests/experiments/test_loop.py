"""The training loop keeps the device busy: batches come ahead, numbers late, and neither changes what is trained."""

import itertools
import threading
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from experiments.lm.config import TrainConfig
from experiments.lm.data.ahead import made_ahead
from experiments.lm.data.packing import Dataset, training_batch
from experiments.lm.model.program import Program, StepNumbers, TrainState
from experiments.lm.run.checkpoint import Checkpoints
from experiments.lm.run.loop import Trainer
from experiments.lm.run.metrics import MetricsLog, read_records

STEPS = 20


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("count", [1, 3, 50])
def test_items_come_in_order_and_no_more_are_made_than_asked_for(count: int) -> None:
    made: list[int] = []
    items = made_ahead(lambda number: made.append(number) or number, range(2, 12), count)
    for place, item in enumerate(items):
        assert item == 2 + place
        assert len(made) <= place + 1 + count
    assert made == list(range(2, 12))
    assert not waiting_threads()


def test_an_error_comes_in_its_items_place_and_ends_the_thread() -> None:
    def make(number: int) -> int:
        if number == 3:
            raise OSError("no such row")
        return number

    items = made_ahead(make, range(10), 4)
    assert list(itertools.islice(items, 3)) == [0, 1, 2]
    with pytest.raises(OSError, match="no such row"):
        next(items)
    assert not waiting_threads()


def test_what_is_not_used_up_ends_when_closed() -> None:
    items = made_ahead(lambda number: number, range(10**9), 4)
    assert next(items) == 0
    items.close()
    assert not waiting_threads()


class Late:
    """A number on a device: what is done to it goes to a journal."""

    def __init__(self, journal: list[tuple[str, int]], step: int) -> None:
        self.journal, self.step = journal, step

    def copy_to_host_async(self) -> None:
        self.journal.append(("copy", self.step))

    def __float__(self) -> float:
        assert ("copy", self.step) in self.journal
        self.journal.append(("read", self.step))
        return 0.5


class Unsaved(Checkpoints[Any]):
    """Checkpoints that keep what would be saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.saved: dict[int, Any] = {}

    def save(self, step: int, state: Any, description: dict[str, Any]) -> None:
        self.saved[step] = state


class Run(NamedTuple):
    """What a training did, in order, with what it saved; its state is the batches that it was given."""

    journal: list[tuple[str, int]]
    saved: dict[int, TrainState]
    records: list[dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    journal: list[tuple[str, int]] = []

    def train(state: TrainState, rows: int) -> tuple[TrainState, StepNumbers]:
        step = len(state.params) + 1
        journal.append(("launch", step))
        numbers: Any = StepNumbers(Late(journal, step), Late(journal, step))
        return TrainState(cast(Any, [*state.params, rows]), None), numbers

    parts: Any = {
        "initial_state": lambda _: TrainState(cast(Any, []), None),
        "abstract_state": None,
        "placed": lambda rows: int(rows[0, 1]),
        "train": train,
        "validate": lambda *_: journal.append(("validate", 0)) or 1.0,
    }
    config = TrainConfig(steps=STEPS, batch_size=1, sequence_length=1, validate_every=11, checkpoint_every=7)
    rows = np.arange(12, dtype=np.int32).reshape(6, 2)
    dataset = Dataset(rows, rows[1:2], end_of_text=0, unigram_entropy=1.0, digest="")
    checkpoints = Unsaved(tmp_path)
    with MetricsLog(path := tmp_path / "metrics.jsonl") as log:
        Trainer(Program("fused", **parts, facts={}), config, dataset, checkpoints, log, lambda: lambda: 0).run(False)
    return Run(journal, checkpoints.saved, list(read_records(path)))


def test_numbers_are_read_when_later_steps_have_been_launched(run: Run) -> None:
    """But where all are waited for: after the warm-up, and before validating and saving."""
    waits = (3, 7, 11, 14, STEPS)
    launched = 0
    for action, step in run.journal:
        if action == "launch":
            launched = step
        if action == "read":
            assert launched - step >= 3 or launched in waits, (step, launched)
            assert launched - step <= 3
    for step in waits:
        reads = [place for place, entry in enumerate(run.journal) if entry == ("read", step)]
        assert step == STEPS or max(reads) < run.journal.index(("launch", step + 1))
    assert [record["step"] for record in run.records if record["kind"] == "train"] == list(range(1, STEPS + 1))


def test_a_checkpoint_is_of_the_batches_trained_and_not_of_those_made_ahead(run: Run) -> None:
    def batches(steps: int) -> list[int]:
        rows = np.arange(12).reshape(6, 2)
        return [int(training_batch(rows, seed=0, step=step, batch_size=1)[0, 1]) for step in range(steps)]

    assert {step: state.params for step, state in run.saved.items()} == {n: batches(n) for n in (7, 14, STEPS)}
