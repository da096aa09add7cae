"""What the NNX and the Linen `LossHead` share: from a head's options and parameters to the loss, logits, statistics.

The modules own parameters and options, nothing else; the functions here take both and call `pallas_ce`. Parameters
are handed over in the dtype they are stored in: `pallas_ce` casts them itself and so returns a float32 gradient for
float32 parameters, where a cast in the module would have rounded it.
"""

from typing import NamedTuple, Protocol

import jax
from flax.typing import Dtype
from jax.typing import ArrayLike

from pallas_ce import Metrics, RowStatistics, linear_cross_entropy, linear_row_statistics
from pallas_ce.api import inputs
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.statistics.cross_entropy import Reduction


class Projection(NamedTuple):
    """The parameters of a head: `weight` is `[V, H]` (`vocab_axis` 0) or `[H, V]` (1), `bias` `[V]` or None."""

    weight: jax.Array
    vocab_axis: int
    bias: jax.Array | None


class Options(Protocol):
    """The attributes of a `LossHead` that say how its loss is computed."""

    vocab_size: int
    dtype: Dtype | None
    ignore_index: int | None
    label_smoothing: ArrayLike
    z_loss: ArrayLike
    logit_softcap: float | None
    logit_scale: ArrayLike
    reduction: Reduction
    backward: Backward
    implementation: Implementation | None
    scratch_bytes: int | None


def num_columns(vocab_size: int, padded_vocab_size: int | None) -> int:
    """The number of vocabulary entries the weight holds, padding included."""
    if vocab_size < 1:
        raise ValueError(f"{vocab_size=} must be at least 1")
    if padded_vocab_size is None:
        return vocab_size
    if padded_vocab_size < vocab_size:
        raise ValueError(
            f"{padded_vocab_size=} is smaller than {vocab_size=}: it is the size with padding, at least vocab_size"
        )
    return padded_vocab_size


def tied_vocab_size(vocab_size: int | None, num_embeddings: int) -> int:
    """The number of an embedding's rows that are vocabulary: all of them unless `vocab_size` says fewer."""
    if vocab_size is None:
        return num_embeddings
    if vocab_size > num_embeddings:
        raise ValueError(f"{vocab_size=} is larger than the embedding, which has {num_embeddings} rows")
    return vocab_size


def loss(
    options: Options,
    projection: Projection,
    hidden: jax.Array,
    labels: jax.Array,
    *,
    token_weights: jax.Array | None,
    class_weights: jax.Array | None,
    normalizer: ArrayLike | None,
    label_smoothing: ArrayLike | None,
    z_loss: ArrayLike | None,
    logit_scale: ArrayLike | None,
    reduction: Reduction | None,
    validate_labels: bool,
    return_metrics: bool,
) -> jax.Array | tuple[jax.Array, Metrics]:
    """The loss of a head; None for an option means the head's own."""
    return linear_cross_entropy(
        hidden,
        projection.weight,
        labels,
        bias=projection.bias,
        vocab_axis=projection.vocab_axis,
        vocab_size=options.vocab_size,
        ignore_index=options.ignore_index,
        token_weights=token_weights,
        class_weights=class_weights,
        label_smoothing=options.label_smoothing if label_smoothing is None else label_smoothing,
        z_loss=options.z_loss if z_loss is None else z_loss,
        logit_softcap=options.logit_softcap,
        logit_scale=options.logit_scale if logit_scale is None else logit_scale,
        reduction=options.reduction if reduction is None else reduction,
        normalizer=normalizer,
        dtype=options.dtype,
        backward=options.backward,
        implementation=options.implementation,
        scratch_bytes=options.scratch_bytes,
        validate_labels=validate_labels,
        return_metrics=return_metrics,
    )


def row_statistics(
    options: Options,
    projection: Projection,
    hidden: jax.Array,
    labels: jax.Array | None,
    *,
    statistics: tuple[str, ...],
    row_mask: jax.Array | None,
    logit_weights: jax.Array | None,
    logit_scale: ArrayLike | None,
) -> RowStatistics:
    """Row statistics of the head's logits."""
    return linear_row_statistics(
        hidden,
        projection.weight,
        labels,
        statistics=statistics,
        row_mask=row_mask,
        logit_weights=logit_weights,
        bias=projection.bias,
        vocab_axis=projection.vocab_axis,
        vocab_size=options.vocab_size,
        logit_softcap=options.logit_softcap,
        logit_scale=options.logit_scale if logit_scale is None else logit_scale,
        dtype=options.dtype,
        implementation=options.implementation,
        scratch_bytes=options.scratch_bytes,
    )


def logits(options: Options, projection: Projection, hidden: jax.Array, logit_scale: ArrayLike | None) -> jax.Array:
    """`softcap(logit_scale * (hidden @ weight + bias))`, `[..., vocab_size]`, accumulated and returned in float32."""
    arrays, spec = inputs.read_head(
        hidden,
        projection.weight,
        projection.bias,
        options.logit_scale if logit_scale is None else logit_scale,
        None,
        vocab_axis=projection.vocab_axis,
        vocab_size=options.vocab_size,
        logit_softcap=options.logit_softcap,
        dtype=options.dtype,
    )
    rows, head = inputs.flatten(arrays, spec)
    # Padding is cut from the result and not from the weight, which would be copied for it.
    values = head.logits(rows, head.weight, head.bias)[:, : spec.vocab_size]
    return values.reshape(*arrays.hidden.shape[:-1], spec.vocab_size)
