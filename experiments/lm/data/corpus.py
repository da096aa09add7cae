"""Real text as a list of documents: the Python standard library's own source, or any file or folder.

Order, digest and split depend on nothing but the names and the contents of the documents.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.lm.config import UsageError

# Not everyone's Python ships its tests, and the build configuration differs between machines: without them the text is
# the same wherever the same version of Python is.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_SKIPPED_PREFIX = "_sysconfigdata"

# A single file has no documents of its own, so it is cut at line ends into pieces of about this many characters.
_PIECE_CHARACTERS = 8192


@dataclass(frozen=True)
class Document:
    """A named text; the name decides its place in the order and on which side of the split it falls."""

    name: str
    text: str


def load_documents(data: str) -> list[Document]:
    """Reads the training text.

    Args:
        data: a file, a folder (every UTF-8 file below it, hidden ones excepted), or empty for the standard library.

    Returns:
        The documents that are not blank, in a fixed order.

    Raises:
        UsageError: if there is nothing to read.
    """
    if not data:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in root.rglob("*.py") if not path.name.startswith(_SKIPPED_PREFIX)]
        paths = [path for path in paths if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)]
        nothing = f"the Python standard library at {root} has no source files; give a text with --data PATH"
        return _documents_below(root, paths, nothing)
    path = Path(data)
    if not path.exists():
        raise UsageError(f"the text {data} does not exist")
    if path.is_dir():
        return _documents_below(
            path, _visible_files(path), f"the folder {data} holds no file of UTF-8 text that is not empty"
        )
    text = _read(path)
    if text is None:
        raise UsageError(f"the file {data} is not UTF-8 text")
    if not text.strip():
        raise UsageError(f"the text {data} is empty")
    return list(_pieces(text))


def digest(documents: Sequence[Document]) -> str:
    """A SHA-256 over names and contents: equal digests mean equal text in equal order."""
    total = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            encoded = part.encode()
            total.update(len(encoded).to_bytes(8, "little"))
            total.update(encoded)
    return total.hexdigest()


def split(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Divides whole documents into a training and a validation part, the same way on every machine and for every seed.

    Documents are taken for validation in the order of a hash of their names until `validation_fraction` of the
    characters is reached; one that alone is longer than all of that share is left to the training part.

    Returns:
        The training and the validation documents, each in the order given.

    Raises:
        UsageError: if either part would be empty.
    """
    wanted = validation_fraction * sum(len(document.text) for document in documents)
    chosen: set[str] = set()
    taken = 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if taken >= wanted:
            break
        if len(document.text) <= max(wanted, _PIECE_CHARACTERS):
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


def _visible_files(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"the folder {error.filename} cannot be read: {error.strerror}")

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith(".") and Path(folder, name).is_file())


def _documents_below(root: Path, paths: Iterable[Path], nothing: str) -> list[Document]:
    """Those of the paths that are text; without any, `nothing` is the error."""
    texts = {path.relative_to(root).as_posix(): _read(path) for path in paths}
    documents = [Document(name, text) for name, text in sorted(texts.items()) if text is not None and text.strip()]
    if not documents:
        raise UsageError(nothing)
    return documents


def _read(path: Path) -> str | None:
    """The file's text with line ends as newlines, or None where it is not UTF-8 text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the text {path} cannot be read: {error.strerror}") from None
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def _pieces(text: str) -> Iterator[Document]:
    lines: list[str] = []
    number = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        if sum(map(len, lines)) >= _PIECE_CHARACTERS:
            yield Document(f"piece {number:08d}", "".join(lines))
            lines, number = [], number + 1
    if "".join(lines).strip():
        yield Document(f"piece {number:08d}", "".join(lines))
