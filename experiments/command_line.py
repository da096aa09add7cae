"""What the command lines of experiments share."""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

# Numbers lie at depth 0, samples at 1, a program's numbers and samples at 2.
_DEPTH_OF_A_LINE = 2


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def positive(word: str) -> int:
    """An int above 0, for `argparse`."""
    if not (word.isascii() and word.isdigit() and int(word)):
        raise argparse.ArgumentTypeError(f"{word!r} is no positive int")
    return int(word)


def command(name: str, words: Sequence[str] | None) -> str:
    """How a result is made again: the module with the words given (None: the process's), but where to write."""
    kept = list(sys.argv[1:] if words is None else words)
    if "--out" in kept:
        del kept[kept.index("--out") : kept.index("--out") + 2]
    return " ".join([f"python -m experiments.{name}", *(word for word in kept if not word.startswith("--out="))])


class Progress:
    """A bar on standard error, where that is a terminal and tqdm (extra `experiments`) is installed.

    A context, whose end is the bar's.
    """

    def __init__(self, total: int, unit: str) -> None:
        try:
            from tqdm import tqdm
        except ImportError:  # the benchmarks themselves need JAX or PyTorch only
            self._bar: Any = None
        else:
            self._bar = tqdm(total=total, unit=unit, dynamic_ncols=True, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def print(self, line: str) -> None:
        """Prints the line on standard output, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)

    def update(self, count: int) -> None:
        """So many more are done."""
        if self._bar is not None:
            self._bar.update(count)
            self._bar.refresh()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file in one step; where that fails it is what it was, and nothing lies beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_figure(figure: Any, path: Path) -> Path:
    """Writes a figure of matplotlib's in one step; returns the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())
    return path


def write_record(path: Path, record: Any) -> None:
    """Writes a result file in one step."""
    write_atomically(path, as_json(record) + "\n")


def as_json(value: Any, indent: int = 0) -> str:
    """JSON whose lines are rows: a program's numbers and samples stand on one line, whatever holds several on more."""
    if _depth(value) <= _DEPTH_OF_A_LINE and indent:
        return json.dumps(value)
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {as_json(item, indent + 1)}" for key, item in value.items()]
    else:
        lines = [inner + as_json(item, indent + 1) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(lines), " " * indent + closing])


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def read_record(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """A result file to draw; ends the command where there is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        parser.error(f"{path} holds no results to draw: {error}")
