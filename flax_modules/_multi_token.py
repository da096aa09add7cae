"""What the NNX and the Linen `MultiTokenLossHead` share: the labels of each head, and the weighted sum of the losses.

Everything here works on one row of tokens at a time, the last axis of `labels`; leading axes are batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_ce import Metrics
from pallas_ce.statistics.labels import NO_TARGET, as_array, canonical, counted


class Head(Protocol):
    """What is read of a `LossHead` here."""

    features: int
    vocab_size: int
    ignore_index: int | None


def shift(values: jax.Array, fill: ArrayLike) -> jax.Array:
    """`values [..., T]` moved one position earlier; the last position of every row becomes `fill`."""
    last = jnp.full_like(values[..., :1], fill)
    return jnp.concatenate([values[..., 1:], last], axis=-1)


def future_labels(
    labels: jax.Array, num_tokens: int, *, ignore_index: int | None, vocab_size: int
) -> tuple[jax.Array, ...]:
    """The labels `[..., T]` of each head: `labels` themselves, then int32 copies shifted by one position more each.

    Head i reads `labels[..., t + i]` at position t. It is ignored where the row has no such position, and where any
    label from t to t + i does not count: an ignored label is how packed documents mark their boundary, and no head may
    look across it.
    """
    if not isinstance(labels, jax.Array):
        labels = as_array(np.asarray(labels))
    ids = canonical(labels, vocab_size)
    counts = counted(ids, ignore_index)
    ignored = NO_TARGET if ignore_index is None else ignore_index
    result = [labels]
    shifted = jnp.where(counts, ids, ignored)
    for _ in range(1, num_tokens):
        # One step at a time, so that each position's own label stops everything behind it.
        shifted = jnp.where(counts, shift(shifted, ignored), ignored)
        result.append(shifted)
    return tuple(result)


def weighted_loss(
    heads: Sequence[Callable[..., Any]],
    hiddens: Sequence[jax.Array],
    labels: Sequence[jax.Array],
    *,
    head_weights: ArrayLike | Sequence[float] | None,
    token_weights: jax.Array | None,
    normalizer: ArrayLike | Sequence[float] | None,
    validate_labels: bool,
    return_metrics: bool,
    **options: Any,
) -> jax.Array | tuple[jax.Array, tuple[Metrics, ...]]:
    """`Σ_i head_weights[i] * heads[i](hiddens[i], labels[i])`, and the heads' metrics."""
    count = len(heads)
    weights = per_head("head_weights", 1.0 / count if head_weights is None else head_weights, count)
    normalizers = None if normalizer is None else per_head("normalizer", normalizer, count)
    total: jax.Array | None = None
    metrics = []
    for i, (head, hidden, label) in enumerate(zip(heads, hiddens, labels, strict=True)):
        if i and token_weights is not None:
            # A token weight belongs to the label it came with, so it moves with it.
            token_weights = shift(jnp.asarray(token_weights), 0)
        if total is not None:
            # One head at a time: left alone, XLA may interleave the heads and hold the scratch of several.
            hidden, total = jax.lax.optimization_barrier((hidden, total))
        head_normalizer = None if normalizers is None else normalizers[i]
        # Metrics are not free (the accuracy needs the largest logit), so heads are only asked when the caller asks.
        result = head(
            hidden,
            label,
            token_weights=token_weights,
            normalizer=head_normalizer,
            validate_labels=validate_labels and i == 0,  # the other labels are made from these
            return_metrics=return_metrics,
            **options,
        )
        if return_metrics:
            result, head_metrics = result
            metrics.append(head_metrics)
        term = weights[i].astype(result.dtype) * result
        total = term if total is None else total + term
    assert total is not None
    return (total, tuple(metrics)) if return_metrics else total


def per_head(name: str, value: ArrayLike | Sequence[float], count: int) -> jax.Array:
    """`value`, a scalar or `[count]`, as one float per head."""
    array = jnp.asarray(value, jnp.float32)
    if array.shape not in ((), (count,)):
        raise ValueError(f"{name} has shape {array.shape}: give one number, or one for each of the {count} heads")
    return jnp.broadcast_to(array, (count,))


def per_head_hidden(hidden: jax.Array | Sequence[jax.Array], count: int, *, distinct: bool) -> tuple[jax.Array, ...]:
    """One hidden state for each head, from one array for all of them or a sequence of `count` arrays.

    `distinct` says that heads differ by more than their hidden states, so that one array may serve them all.
    """
    if isinstance(hidden, (list, tuple)):
        if len(hidden) != count:
            raise ValueError(f"hidden is a sequence of {len(hidden)} arrays, but there are {count} heads")
        return tuple(hidden)
    if not distinct and count > 1:
        raise ValueError(
            f"hidden is one array, but the {count} heads share their weight and project_hidden=False, so all of them "
            f"would predict the same: give a sequence of {count} hidden states, or build with project_hidden=True"
        )
    return (hidden,) * count  # type: ignore[return-value]


def count_heads(num_heads: int, shared: bool, num_tokens: int | None) -> int:
    """The number of tokens predicted, from the number of heads given and the `num_tokens` argument."""
    if shared:
        if num_tokens is None or num_tokens < 1:
            raise ValueError(f"{num_tokens=}: with one head shared by all tokens, say how many it predicts (1 or more)")
        return num_tokens
    if num_heads == 0:
        raise ValueError("head is an empty sequence: give one LossHead for each token predicted")
    if num_tokens is not None and num_tokens != num_heads:
        raise ValueError(f"{num_tokens=}, but head is a sequence of {num_heads} heads: leave num_tokens out")
    return num_heads


def check_heads(heads: Sequence[Head]) -> None:
    """Refuses heads that cannot read the same hidden states and labels."""
    for name in ("features", "vocab_size", "ignore_index"):
        values = [getattr(head, name) for head in heads]
        if len(set(values)) > 1:
            raise ValueError(f"head is a sequence of heads with different {name}: {values}; all must agree")


def check_index(head: int, count: int) -> None:
    """Refuses a head that does not exist."""
    if not 0 <= head < count:
        raise ValueError(f"{head=} is not one of the {count} heads: 0 to {count - 1}")


def select[T](heads: Sequence[T], i: int) -> T:
    """The head of the token `i + 1` ahead: the shared one, or the i-th of separate ones."""
    return heads[i] if len(heads) > 1 else heads[0]
