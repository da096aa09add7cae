"""Markdown tables of result files; every number in them comes from a file."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
ABSENT = "–"
COLUMNS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))


def table(rows: Iterable[Row], columns: Columns) -> str:
    """A Markdown table.

    Args:
        rows: what each row is made from.
        columns: by heading, a format of the row's entries, as "{ms:.3f}", or a function of the row. A row that lacks
            an entry has a dash there.
    """
    lines = [list(columns), ["---"] * len(columns), *([_cell(row, form) for form in columns.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(row: Row, form: str | Callable[[Row], str]) -> str:
    try:
        return form(row) if callable(form) else form.format_map(row)
    except (KeyError, TypeError):  # an entry that is missing, or None
        return ABSENT


def entry(name: Any, form: str = "") -> Callable[[Row], str]:
    """A column of one entry, whose name no format can hold."""
    return lambda row: format(row[name], form)


def rows_of(document: Row) -> Iterator[dict[str, Any]]:
    """A row for each point and program of a result file: its numbers, with the point's own and both names."""
    for name, point in document["points"].items():
        for program, found in point.get("results", {}).items():
            yield {**point, "point": name, "program": program, **found}


def machine_line(document: Row) -> str:
    """How a result file was made, and on what."""
    facts = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    return f"`{document['command']}`: {facts}."


def left_out(document: Row) -> list[str]:
    """What has no results, where, and why."""
    places: dict[tuple[str, str], list[str]] = {}
    for name, point in document["points"].items():
        for key in point.get("left_out", {}).items():
            places.setdefault(key, []).append(name)
    return [f"Left out at {'; '.join(names)}: {program}, {why}." for (program, why), names in places.items()]
