"""Finds phrases that must be read twice in comments, docstrings and pages: `python tools/check_words.py FILE ...`.

Identifiers, code and quoted text are left alone.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES = re.compile(r"\b(that of|those of|of which|what is|so many|as much again)\b", re.IGNORECASE)
PRONOUN = re.compile(r"(it|they|this|these|those|that)\b", re.IGNORECASE)
QUOTED = re.compile(r"```.*?```|~~~.*?~~~|`[^`]*`|\"[^\"\n]*\"", re.DOTALL)

Found = Iterator[tuple[int, str]]


def in_text(text: str, first_line: int = 1) -> Found:
    """Lines and phrases of a page, or of a part of one."""
    plain = QUOTED.sub(lambda match: re.sub(r"[^\n]", "·", match.group()), text)
    for match in PHRASES.finditer(re.sub(r"\s", " ", plain)):
        yield first_line + plain.count("\n", 0, match.start()), match.group()


def in_module(source: str) -> Found:
    """Lines and phrases of a module's comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from in_text(token.string, token.start[0])
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node, clean=False)) is None:
            continue
        line = node.body[0].lineno
        yield from in_text(text, line)
        if PRONOUN.match(text.lstrip()):
            yield line, f"a docstring that begins with {text.split()[0]!r}"


def main(paths: list[str]) -> int:
    """The number of phrases, each printed."""
    found = 0
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        for line, phrase in in_module(text) if path.endswith(".py") else in_text(text):
            print(f"{path}:{line}: {phrase}")
            found += 1
    return found


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
