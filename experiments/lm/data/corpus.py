"""Real text as a list of documents: the Python standard library's own source, or any file or folder.

Order, digest and split depend on nothing but the names and the contents of the documents.
"""

import hashlib
import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.lm.config import UsageError

# Not everyone's Python ships its tests, and the build configuration differs between machines: without them the text is
# the same wherever the same version of Python is.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_SKIPPED_PREFIX = "_sysconfigdata"

# A single file has no documents of its own, so it is cut into pieces of this many lines.
_PIECE_LINES = 200


class Document(NamedTuple):
    """A named text; the name decides its place in the order and on which side of the split it falls."""

    name: str
    text: str


def load_documents(data: str) -> list[Document]:
    """Reads the training text: the documents that are not blank, in a fixed order.

    Args:
        data: a file, a folder (every UTF-8 file below it, hidden ones excepted), or empty for the standard library.

    Raises:
        UsageError: if there is nothing to read.
    """
    path = Path(data or sysconfig.get_paths()["stdlib"])
    if not path.exists():
        raise UsageError(f"the text {path} does not exist")
    if path.is_file():
        lines = (_read(path) or "").splitlines(keepends=True)
        texts = {f"piece {i:08d}": "".join(piece) for i, piece in enumerate(itertools.batched(lines, _PIECE_LINES))}
    else:
        texts = {}
        for file in path.rglob("*" if data else "*.py"):
            parts = file.relative_to(path).parts
            skipped = _SKIPPED_FOLDERS.intersection(parts) or parts[-1].startswith(_SKIPPED_PREFIX)
            if any(part.startswith(".") for part in parts) if data else skipped:
                continue
            if file.is_file() and (text := _read(file)) is not None:
                texts["/".join(parts)] = text
    documents = [Document(name, text) for name, text in sorted(texts.items()) if text.strip()]
    if not documents:
        raise UsageError(f"{path} holds no UTF-8 text that is not empty; give a text with --data PATH")
    return documents


def _read(path: Path) -> str | None:
    """The file's text with line ends as newlines, or None where it is not UTF-8 text."""
    raw = path.read_bytes()
    try:
        return None if b"\0" in raw else raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def digest(documents: Sequence[Document]) -> str:
    """A SHA-256 over names and contents: equal digests mean equal text in equal order."""
    total = hashlib.sha256()
    for part in itertools.chain.from_iterable(documents):
        encoded = part.encode()
        total.update(len(encoded).to_bytes(8, "little") + encoded)
    return total.hexdigest()


def split(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Divides whole documents into a training and a validation part, the same way on every machine and for every seed.

    Documents are taken for validation in the order of a hash of their names until `validation_fraction` of the
    characters is reached; one that alone is longer than all of that share is left to the training part.

    Raises:
        UsageError: if either part would be empty.
    """
    wanted = validation_fraction * sum(len(document.text) for document in documents)
    chosen: set[str] = set()
    taken = 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if taken < wanted and len(document.text) <= max(wanted, 8192):
            chosen.add(document.name)
            taken += len(document.text)
    training = [document for document in documents if document.name not in chosen]
    validation = [document for document in documents if document.name in chosen]
    if not training or not validation:
        raise UsageError(
            f"the text has too few documents ({len(documents)}) to keep a share of {validation_fraction} of it "
            "for validation; give more text"
        )
    return training, validation
