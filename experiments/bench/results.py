"""Result files: one for each section, whole after every point, so that an interrupted run loses nothing and goes on."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.command_line import write_atomically

FOLDER = Path(__file__).parents[1] / "results"

# What points of one file must share to be compared.
SAME = ("device", "jax", "torch", "clock", "implementation")


class ResultError(Exception):
    """A result file that cannot be read or gone on with; the message says what to do."""


def read(path: Path) -> dict[str, Any]:
    """A result file: `{"command", "machine", "points": {name: record}}`.

    Raises:
        ResultError: it is not one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if set(document) != {"command", "machine", "points"} or not isinstance(document["points"], dict):
            raise ValueError("it lacks the keys of a result file")
    except (OSError, ValueError, TypeError) as error:
        raise ResultError(f"{path} is not a result file: {error}; move it away and run again") from error
    return dict(document)


class Results:
    """The results of one section, under way.

    Args:
        path: the file; results that it holds are kept.
        command: how it is made.
        machine: `experiments.bench.machine.describe()`.
        again: whether to forget what the file holds.

    Raises:
        ResultError: the file is not a result file, or comes from another device or version.
    """

    def __init__(self, path: Path, command: str, machine: dict[str, Any], again: bool = False) -> None:
        self.path = path
        self.document: dict[str, Any] = {"command": command, "machine": machine, "points": {}}
        if again or not path.exists():
            return
        old = read(path)
        for name in SAME:
            ours, theirs = machine.get(name), old["machine"].get(name)
            if ours != theirs:
                raise ResultError(
                    f"{path} was measured with {name} {theirs!r} and this is {ours!r}: ratios would mix. Pass --again "
                    "to measure all of it anew, or --out for another folder"
                )
        self.document["points"] = old["points"]

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """What has been measured, by name."""
        return dict(self.document["points"])

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Adds a point and writes the file."""
        self.document["points"][name] = record
        write_atomically(self.path, json.dumps(self.document, indent=1) + "\n")


class Budget:
    """Time for a run: a point is only begun if one as long as the longest so far would still end in time.

    Args:
        seconds: in all, or None for as much as it takes.
        now: the clock.
    """

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self._now, self._longest, self._last = now, 0.0, now()
        self._end = None if seconds is None else self._last + seconds

    def allows_another(self) -> bool:
        """Called before each point."""
        now = self._now()
        self._longest, self._last = max(self._longest, now - self._last), now
        return self._end is None or now + self._longest < self._end


def run_points[P](
    points: Iterable[P],
    name_of: Callable[[P], str],
    measure: Callable[[P], dict[str, Any]],
    results: Results,
    budget: Budget,
    told: Callable[[str, dict[str, Any]], None],
) -> int:
    """Measures the points that `results` lacks; returns how many are left when time runs out.

    Raises:
        ExceptionGroup: of the points that failed, when all others are measured and written.
    """
    missing = [point for point in points if name_of(point) not in results.points]
    failed: list[Exception] = []
    left = 0
    for done, point in enumerate(missing):
        if not budget.allows_another():
            left = len(missing) - done
            break
        try:
            record = measure(point)
        except Exception as error:
            error.add_note(f"while {name_of(point)} was measured")
            failed.append(error)
            continue
        results.add(name_of(point), record)
        told(name_of(point), record)
    if failed:
        raise ExceptionGroup(f"{len(failed)} points failed", failed)
    return left
