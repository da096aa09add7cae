import pickle
from pathlib import Path

import numpy as np
import pytest

from experiments.lm.config import UsageError
from experiments.lm.data.corpus import Document, load_documents
from experiments.lm.data.tokenizer import END_OF_TEXT, encode, end_of_text_id, load_tokenizer


@pytest.fixture(scope="module")
def documents(text: Path) -> list[Document]:
    return load_documents(str(text))


def test_the_second_time_the_tokeniser_comes_from_the_cache_and_is_the_same(
    documents: list[Document], tmp_path: Path
) -> None:
    first, first_cached = load_tokenizer(documents, 300, tmp_path / "cache")
    second, second_cached = load_tokenizer(documents, 300, tmp_path / "cache")
    assert (first_cached, second_cached) == (False, True)
    assert first.to_str() == second.to_str()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


def test_another_text_or_size_is_another_entry_of_the_cache(documents: list[Document], tmp_path: Path) -> None:
    for chosen, size in ((documents, 300), (documents, 301), (documents[1:], 300)):
        assert not load_tokenizer(chosen, size, tmp_path)[1]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"[" * 200_000, pickle.dumps(Path)])
def test_a_damaged_cache_entry_is_trained_again(documents: list[Document], tmp_path: Path, content: bytes) -> None:
    load_tokenizer(documents, 300, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(content)
    assert not load_tokenizer(documents, 300, tmp_path)[1]
    assert load_tokenizer(documents, 300, tmp_path)[1]


def test_any_text_survives_and_every_document_ends_with_its_token(documents: list[Document], tmp_path: Path) -> None:
    bpe, _ = load_tokenizer(documents, 300, tmp_path)
    texts = ["plain", "tabs\tand\n\nlines  ", "ünïcode 字 🙂", f"spelled out: {END_OF_TEXT}!"]
    stream = encode(bpe, [Document(str(number), text) for number, text in enumerate(texts)])
    ends = np.flatnonzero(stream == end_of_text_id(bpe))
    assert stream.dtype == np.int32
    assert len(ends) == len(texts)
    starts = [0, *(ends[:-1] + 1)]
    assert [bpe.decode(stream[start:end].tolist()) for start, end in zip(starts, ends, strict=True)] == texts


def test_a_vocabulary_larger_than_the_text_supports_is_refused_with_the_largest_that_works(
    documents: list[Document], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"vocab_size is 60000, but the text supports only (\d+) entries") as error:
        load_tokenizer(documents, 60_000, tmp_path)
    assert not list(tmp_path.iterdir())
    largest = int(str(error.value).split("only ")[1].split()[0])
    assert load_tokenizer(documents, largest, tmp_path)[0].get_vocab_size() == largest
