"""A tiny text and a tiny model, trained through the real command in a second or two."""

import contextlib
import dataclasses
import functools
import io
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.lm.config import TrainConfig
from experiments.lm.loop import Trainer
from experiments.lm.model import program
from experiments.train_lm import main

TINY = {
    "vocab-size": 300,
    "validation-fraction": 0.1,
    "width": 16,
    "layers": 1,
    "attention-heads": 2,
    "mlp-width": 32,
    "steps": 12,
    "sequence-length": 16,
    "batch-size": 4,
    "learning-rate": 0.01,
    "validate-every": 5,
    "checkpoint-every": 5,
}


class Finished(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of thirty short documents made of a hundred words."""
    folder = tmp_path_factory.mktemp("text")
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghij", k=source.randint(2, 7))) for _ in range(100)]
    for number in range(30):
        lines = [" ".join(source.choices(words, k=8)) for _ in range(20)]
        (folder / f"document{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests' tokenisers are kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session", autouse=True)
def programs_are_compiled_once() -> Iterator[None]:
    """Compiling takes far longer than the tiny runs: runs that differ in uncompiled settings share their programs."""
    cached = functools.lru_cache(program.build)
    neutral = {"head": "both", "seed": 0, "validate_every": 1, "checkpoint_every": 1, "data": "", "cache_dir": ""}

    def build_once(config: TrainConfig, head: str, end_of_text: int) -> program.Program:
        return cached(dataclasses.replace(config, **neutral), head, end_of_text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "build", build_once)
        yield


@pytest.fixture(scope="session")
def arguments(text: Path, cache: Path) -> Callable[..., list[str]]:
    """Makes a command line for the tiny run; keyword arguments replace its options."""

    def build(*flags: str, **changes: object) -> list[str]:
        options = {"data": text, "cache-dir": cache, **TINY}
        options |= {name.replace("_", "-"): value for name, value in changes.items()}
        return [*flags, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]

    return build


def command(arguments: list[str]) -> Finished:
    """Runs the command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse's
            code = int(ended.code or 0)
    return Finished(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def train(arguments: Callable[..., list[str]]) -> Callable[..., Finished]:
    """Runs the tiny training, with flags and changed options."""
    return lambda *flags, **changes: command(arguments(*flags, **changes))


@pytest.fixture(scope="session")
def whole(train: Callable[..., Finished], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny training, not interrupted; for reading."""
    train(out=(run := tmp_path_factory.mktemp("whole")))
    return run


@pytest.fixture
def stopped_at(train: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the training with a signal to the process while the step's numbers are recorded."""

    def run(step: int, *flags: str, number: int = signal.SIGINT, **changes: object) -> Any:
        record = Trainer._record

        def interrupted(self: Trainer, recorded: int, *rest: Any) -> None:
            if recorded == step:
                signal.raise_signal(number)
            record(self, recorded, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_record", interrupted)
            return train(*flags, **changes)

    return run
