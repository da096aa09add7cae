"""Files that are whole or not there, and JSON whose lines are rows."""

import json
import os
from pathlib import Path
from typing import Any

# Numbers lie at depth 0, samples at 1, a program's numbers and samples at 2.
_DEPTH_OF_A_LINE = 2


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file in one step; where that fails it is what it was, and nothing lies beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
