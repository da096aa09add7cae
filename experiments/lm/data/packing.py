"""Token streams cut into rows, and the order in which rows are trained on.

Row `i` holds the stream's tokens `i·T … i·T + T`: T inputs and, one to the right, T labels. Neighbouring rows share one
token, so every token is predicted exactly once. Rows run across documents; where the input is the end of a document
the label would be the first token of an unrelated one, and is ignored instead.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Dataset:
    """Packed int32 rows `[rows, T + 1]` and facts about them.

    The last row is filled up with end-of-text tokens. `unigram_entropy` is of the training tokens' own distribution, in
    nats; `digest` recognises the text when a run is resumed.
    """

    training: np.ndarray
    validation: np.ndarray
    end_of_text: int
    unigram_entropy: float
    digest: str


def pack(stream: np.ndarray, sequence_length: int, end_of_text: int) -> np.ndarray:
    """Cuts a stream `[tokens]` into rows `[rows, sequence_length + 1]`.

    The last row is filled up with `end_of_text`, whose labels are ignored; a stream of one token has no row.
    """
    rows = math.ceil((len(stream) - 1) / sequence_length)
    padded = np.full(max(rows, 0) * sequence_length + 1, end_of_text, np.int32)
    padded[: len(stream)] = stream[: len(padded)]
    starts = np.arange(max(rows, 0))[:, None] * sequence_length
    return padded[starts + np.arange(sequence_length + 1)]


def inputs_and_labels(rows: jax.Array, end_of_text: int) -> tuple[jax.Array, jax.Array]:
    """Splits rows `[B, T + 1]` into inputs `[B, T]` and labels `[B, T]`, −100 where a new document would begin."""
    inputs = rows[:, :-1]
    return inputs, jnp.where(inputs == end_of_text, IGNORE_INDEX, rows[:, 1:])


def counted_labels(rows: np.ndarray, end_of_text: int) -> int:
    """How many labels of these rows are not ignored."""
    return int(np.count_nonzero(rows[:, :-1] != end_of_text))


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy −Σ p log p of the tokens' own distribution, in nats: the loss of the best model that ignores context."""
    counts = np.bincount(tokens)
    probabilities = counts[counts > 0] / tokens.size
    return float(-(probabilities * np.log(probabilities)).sum())


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def training_batch(rows: np.ndarray, seed: int, step: int, batch_size: int) -> np.ndarray:
    """The rows `[batch_size, T + 1]` of one step, a function of the seed and the step and nothing else.

    Each epoch visits every row once in its own order; a batch may run from one epoch into the next.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    chosen = [_epoch_order(len(rows), seed, int(place // len(rows)))[place % len(rows)] for place in places]
    return rows[np.array(chosen)]


def validation_batches(rows: np.ndarray, batch_size: int, end_of_text: int) -> list[np.ndarray]:
    """All validation rows as batches of equal shape; the last is filled up with rows whose labels are all ignored."""
    missing = -len(rows) % batch_size
    filler = np.full((missing, rows.shape[1]), end_of_text, rows.dtype)
    filled = np.concatenate([rows, filler])
    return list(filled.reshape(-1, batch_size, rows.shape[1]))


def mean_loss(dataset: Dataset, batch_size: int, loss: Callable[[np.ndarray], Any]) -> float:
    """The mean over all counted labels of the validation rows, from what `loss` says of each batch."""
    batches = validation_batches(dataset.validation, batch_size, dataset.end_of_text)
    counts = [counted_labels(batch, dataset.end_of_text) for batch in batches]
    losses = [loss(batch) for batch, count in zip(batches, counts, strict=True) if count]
    return math.fsum(float(value) * count for value, count in zip(losses, filter(None, counts), strict=True)) / sum(
        counts
    )
