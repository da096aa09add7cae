from pathlib import Path

import pytest

from experiments.lm.config import UsageError
from experiments.lm.data.corpus import Document, digest, load_documents, split


def test_the_standard_library_is_read_without_tests_and_installed_packages() -> None:
    names = [document.name for document in load_documents("")]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]
    assert not [name for name in names if "_sysconfigdata" in name]


def test_a_folder_gives_its_text_files_in_order_and_leaves_out_the_rest(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"two\r\nlines\r")
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("secret", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret", encoding="utf-8")
    assert load_documents(str(tmp_path)) == [Document("a.txt", "one"), Document("b/two.txt", "two\nlines\n")]


def test_a_single_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number} of a long book\n" for number in range(3000)), encoding="utf-8")
    documents = load_documents(str(path))
    assert len(documents) > 5
    assert all(document.text.endswith("\n") for document in documents)
    assert "".join(document.text for document in documents) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xff\xfe\xff", b"a\0b"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="holds no UTF-8 text that is not empty"):
        load_documents(str(path))


def test_the_digest_sees_names_contents_and_where_one_ends() -> None:
    documents = [Document("a", "xy"), Document("b", "z")]
    assert digest(documents) == digest(list(documents))
    others = [
        [Document("a", "x"), Document("b", "yz")],
        [Document("c", "xy"), Document("b", "z")],
        documents[::-1],
    ]
    assert len({digest(other) for other in [documents, *others]}) == 4


def test_the_split_is_by_whole_documents_and_depends_on_names_alone() -> None:
    documents = [Document(f"d{number}", f"{number} " * 50) for number in range(200)]
    training, validation = split(documents, 0.1)
    assert sorted(training + validation, key=lambda d: documents.index(d)) == documents
    share = sum(len(d.text) for d in validation) / sum(len(d.text) for d in documents)
    assert 0.1 <= share < 0.12
    assert {d.name for d in split(documents[::-1], 0.1)[1]} == {d.name for d in validation}


def test_one_long_document_does_not_take_over_the_validation_part() -> None:
    documents = [Document(f"d{number}", "x" * 10_000) for number in range(50)] + [Document("long", "x" * 300_000)]
    assert "long" not in {document.name for document in split(documents, 0.1)[1]}


def test_a_text_of_one_document_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="too few documents"):
        split([Document("only", "text")], 0.1)
