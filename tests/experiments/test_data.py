"""From a text to batches: documents, the tokeniser, rows and their order."""

import pickle
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lm.config import UsageError
from experiments.lm.data import packing
from experiments.lm.data.corpus import Document, digest, load_documents, split
from experiments.lm.data.tokenizer import END_OF_TEXT, encode, end_of_text_id, load_tokenizer

END = 0


@pytest.fixture(scope="module")
def documents(text: Path) -> list[Document]:
    return load_documents(str(text))


def test_the_standard_library_is_read_without_tests_and_installed_packages() -> None:
    names = [document.name for document in load_documents("")]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    left_out = {"test", "tests", "site-packages", "__pycache__"}
    assert not [name for name in names if left_out & set(name.split("/")) or "_sysconfigdata" in name]


def test_a_folder_gives_its_text_files_in_order_and_leaves_out_the_rest(tmp_path: Path) -> None:
    files = {"b/two.txt": b"two\r\nlines\r", "a.txt": b"one", "blank.txt": b" \n", "image.bin": b"\xff\xfe\x00"}
    for name, content in (files | dict.fromkeys((".hidden", ".git/config"), b"secret")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_documents(str(tmp_path)) == [Document("a.txt", "one"), Document("b/two.txt", "two\nlines\n")]


def test_a_single_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number} of a long book\n" for number in range(3000)), encoding="utf-8")
    pieces = [document.text for document in load_documents(str(path))]
    assert len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xff\xfe\xff", b"a\0b"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match="holds no UTF-8 text that is not empty"):
        load_documents(str(tmp_path / "file"))


def test_the_digest_sees_names_contents_and_where_one_ends() -> None:
    texts = [(("a", "xy"), ("b", "z")), (("a", "x"), ("b", "yz")), (("c", "xy"), ("b", "z")), (("b", "z"), ("a", "xy"))]
    found = [digest([Document(*each) for each in text]) for text in (*texts, texts[0])]
    assert len(set(found)) == 4
    assert found[-1] == found[0]


def test_the_split_is_by_whole_documents_and_depends_on_names_alone() -> None:
    documents = [Document(f"d{number}", f"{number} " * 50) for number in range(200)]
    training, validation = split(documents, 0.1)
    assert sorted(training + validation, key=documents.index) == documents
    share = sum(len(d.text) for d in validation) / sum(len(d.text) for d in documents)
    assert 0.1 <= share < 0.12
    assert {d.name for d in split(documents[::-1], 0.1)[1]} == {d.name for d in validation}
    long = [Document(f"d{number}", "x" * 10_000) for number in range(50)] + [Document("long", "x" * 300_000)]
    assert "long" not in {document.name for document in split(long, 0.1)[1]}
    with pytest.raises(UsageError, match="too few documents"):
        split([Document("only", "text")], 0.1)


def test_a_tokeniser_comes_from_the_cache_for_the_same_text_and_size(documents: list[Document], tmp_path: Path) -> None:
    cases = [(documents, 300), (documents, 300), (documents, 301), (documents[1:], 300)]
    (first, _), (second, _), *_ = found = [load_tokenizer(*case, tmp_path) for case in cases]
    assert [cached for _, cached in found] == [False, True, False, False]
    assert first.to_str() == second.to_str()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"[" * 200_000, pickle.dumps(Path)])
def test_a_damaged_cache_entry_is_trained_again(documents: list[Document], tmp_path: Path, content: bytes) -> None:
    load_tokenizer(documents, 300, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(content)
    assert not load_tokenizer(documents, 300, tmp_path)[1]
    assert load_tokenizer(documents, 300, tmp_path)[1]


def test_any_text_survives_and_every_document_ends_with_its_token(documents: list[Document], cache: Path) -> None:
    bpe, _ = load_tokenizer(documents, 300, cache)
    texts = ["plain", "tabs\tand\n\nlines  ", "ünïcode 字 🙂", f"spelled out: {END_OF_TEXT}!"]
    stream = encode(bpe, [Document(str(number), text) for number, text in enumerate(texts)])
    assert stream.dtype == np.int32
    *parts, rest = np.split(stream, 1 + np.flatnonzero(stream == end_of_text_id(bpe)))
    assert not rest.size
    assert [bpe.decode(part[:-1].tolist()) for part in parts] == texts


def test_a_vocabulary_larger_than_the_text_supports_is_refused_with_the_largest_that_works(
    documents: list[Document], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"vocab_size is 60000, but the text supports only (\d+) entries") as error:
        load_tokenizer(documents, 60_000, tmp_path)
    assert not list(tmp_path.iterdir())
    largest = int(str(error.value).split("only ")[1].split()[0])
    assert load_tokenizer(documents, largest, tmp_path)[0].get_vocab_size() == largest


def test_rows_share_one_token_so_that_every_token_is_predicted_once() -> None:
    rows = packing.pack(np.arange(1, 12, dtype=np.int32), 4, END)
    np.testing.assert_array_equal(rows, [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, END, END]])
    np.testing.assert_array_equal(packing.pack(np.arange(1, 6, dtype=np.int32), 4, END), [[1, 2, 3, 4, 5]])
    assert packing.pack(np.array([END], np.int32), 4, END).shape == (0, 5)


def test_labels_are_ignored_across_document_boundaries_and_in_what_fills_a_row_up() -> None:
    rows = packing.pack(np.array([5, 6, END, 7, 8, 9, END], np.int32), 4, END)
    inputs, labels = packing.inputs_and_labels(jnp.asarray(rows), END)
    np.testing.assert_array_equal(inputs, [[5, 6, END, 7], [8, 9, END, END]])
    np.testing.assert_array_equal(labels, [[6, END, -100, 8], [9, END, -100, -100]])
    assert packing.counted_labels(rows, END) == 5


def test_the_training_order_is_a_function_of_seed_and_step() -> None:
    rows = np.arange(10, dtype=np.int32)[:, None]
    batches = [packing.training_batch(rows, seed=3, step=step, batch_size=4) for step in range(5)]
    seen = np.concatenate(batches).ravel()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()
    np.testing.assert_array_equal(packing.training_batch(rows, seed=3, step=3, batch_size=4), batches[3])
    assert packing.training_batch(rows, seed=4, step=3, batch_size=4).tolist() != batches[3].tolist()


def test_validation_batches_are_of_equal_shape_and_hold_every_row_once() -> None:
    rows = np.arange(1, 11, dtype=np.int32).reshape(5, 2)
    batches = packing.validation_batches(rows, 2, END)
    assert [batch.shape for batch in batches] == [(2, 2)] * 3
    np.testing.assert_array_equal(np.concatenate(batches)[:5], rows)
    assert packing.counted_labels(batches[-1], END) == 1


def test_the_mean_loss_is_over_labels_and_not_over_batches() -> None:
    rows = np.array([[1, 2, 2], [4, END, 2], [END, END, 3]], np.int32)  # of 2, 1 and no labels
    dataset = packing.Dataset(rows, rows, END, 0.0, "")
    assert packing.mean_loss(dataset, 1, lambda batch: batch[0, 0]) == 2.0


def test_the_unigram_entropy_is_that_of_the_tokens_own_distribution() -> None:
    assert packing.unigram_entropy(np.array([7, 7, 7, 7])) == 0.0
    assert packing.unigram_entropy(np.repeat([1, 5, 900, 3], 10)) == pytest.approx(np.log(4))
