"""Finds phrases that must be read twice in comments, docstrings, errors and pages: `tools/check_words.py FILE ...`.

Identifiers, code and quoted text are left alone.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES = re.compile(r"\b(that\s+of|those\s+of|of\s+which|what\s+is|so\s+many|as\s+much\s+again)\b", re.IGNORECASE)
PRONOUN = re.compile(r"(its?|they|their|this|these|those|that)\b", re.IGNORECASE)
QUOTED = re.compile(r"```.*?```|~~~.*?~~~|`[^`]*`|\"[^\"\n]*\"", re.DOTALL)

Found = Iterator[tuple[int, str]]


def in_text(text: str, first_line: int = 1) -> Found:
    """Lines and phrases of a page, or of a part of one."""
    plain = QUOTED.sub(lambda match: re.sub(r"[^\n]", "·", match.group()), text)
    for match in PHRASES.finditer(plain):
        yield first_line + plain.count("\n", 0, match.start()), " ".join(match.group().split())


def in_module(source: str) -> Found:
    """Lines and phrases of a module's comments, docstrings, and strings within `raise`."""
    comments = [x for x in tokenize.generate_tokens(io.StringIO(source).readline) if x.type == tokenize.COMMENT]

    def text_of(numbered: tuple[int, tokenize.TokenInfo]) -> tuple[int, int]:
        """Comments below each other in one column are one text, if nothing stands before them."""
        place, comment = numbered
        line, column = comment.start
        return (line - place, column) if comment.line[:column].isspace() or not column else (-line, column)

    for _, group in itertools.groupby(enumerate(comments), text_of):
        lines = [comment for _, comment in group]
        yield from in_text("\n".join(comment.string.lstrip("# ") for comment in lines), lines[0].start[0])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from in_text(part.value, part.lineno)
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
