"""From a text to packed rows: documents, split, tokeniser, tokens, rows."""

from pathlib import Path

from experiments.lm.config import TrainConfig, UsageError
from experiments.lm.data import corpus, packing, tokenizer
from experiments.lm.data.packing import Dataset


def load_dataset(config: TrainConfig) -> Dataset:
    """Reads, splits, tokenises and packs the text of a run, and prints what it found.

    Raises:
        UsageError: if the text is missing, empty, or too short for the vocabulary or for one batch.
    """
    documents = corpus.load_documents(config.data)
    training, validation = corpus.split(documents, config.validation_fraction)
    bpe, cached = tokenizer.load_tokenizer(training, config.vocab_size, Path(config.cache_dir))
    tokens, end_of_text = tokenizer.encode(bpe, training), tokenizer.end_of_text_id(bpe)
    rows = packing.pack(tokens, config.sequence_length, end_of_text)
    if len(rows) < config.batch_size:
        raise UsageError(
            f"the training text has {len(tokens)} tokens, too few for one batch of {config.batch_size} rows of "
            f"{config.sequence_length} tokens; give more text, or lower --batch-size or --sequence-length"
        )
    validation_rows = packing.pack(tokenizer.encode(bpe, validation), config.sequence_length, end_of_text)
    name = config.data or "the Python standard library's source"
    print(
        f"text: {name}, {len(documents):,} documents; byte-level BPE of {config.vocab_size:,} entries "
        f"({'from the cache' if cached else 'trained now'}); {len(tokens):,} training tokens in {len(rows):,} rows",
        flush=True,
    )
    return Dataset(rows, validation_rows, end_of_text, packing.unigram_entropy(tokens), corpus.digest(documents))
