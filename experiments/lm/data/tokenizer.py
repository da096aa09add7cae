"""A byte-level BPE trained on the text itself and kept in a cache.

Every byte has an entry, so any text can be encoded; one special entry ends a document.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.files import write_atomically
from experiments.lm.config import UsageError
from experiments.lm.data.corpus import Document, digest

END_OF_TEXT = "<|endoftext|>"
_ENCODED_TOGETHER = 64


class TooFewEntriesError(UsageError):
    """The text does not support a vocabulary of that size, but of `entries`."""

    def __init__(self, message: str, entries: int) -> None:
        super().__init__(message)
        self.entries = entries


def load_tokenizer(documents: Sequence[Document], vocab_size: int, cache_dir: Path) -> tuple[Tokenizer, bool]:
    """The tokeniser of these documents, and whether it came from the cache; a file is named by all it depends on."""
    key = f"{digest(documents)} {vocab_size} {version('tokenizers')}"
    path = cache_dir / f"bpe-{vocab_size}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    cached = _read_cached(path, vocab_size)
    tokenizer = cached or _train((document.text for document in documents), vocab_size)
    if cached is None:
        write_atomically(path, tokenizer.to_str())
    # A text may spell out "<|endoftext|>": it is text there, not the end of a document. The file does not keep this.
    tokenizer.encode_special_tokens = True
    return tokenizer, cached is not None


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> np.ndarray:
    """The documents as one stream of int32 ids `[tokens]`, each document followed by the end-of-text token."""
    end = np.array([end_of_text_id(tokenizer)], np.int32)
    parts: list[np.ndarray] = []
    # An encoding holds far more than its ids, so that all at once would be the run's peak memory.
    for batch in itertools.batched(documents, _ENCODED_TOGETHER):
        encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        parts += [part for encoding in encodings for part in (np.array(encoding.ids, np.int32), end)]
    return np.concatenate(parts)


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document."""
    number = tokenizer.token_to_id(END_OF_TEXT)
    assert number is not None  # it was trained with it
    return number


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # An entry seen once is a copy of the text rather than a regularity of it.
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    entries = tokenizer.get_vocab_size()
    if entries < vocab_size:
        raise TooFewEntriesError(
            f"vocab_size is {vocab_size}, but the text supports only {entries} entries; "
            f"use --vocab-size {entries} or less, or give more text",
            entries,
        )
    return tokenizer


def _read_cached(path: Path, vocab_size: int) -> Tokenizer | None:
    """The tokeniser of a file; None where there is none, or none of that size: it is trained and written again."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # The library raises plain Exception.
        return None
    return tokenizer if tokenizer.get_vocab_size() == vocab_size else None
