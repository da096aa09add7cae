"""The options of the cross entropies, with a head and on materialized logits: read once, by one rule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.api import checks as arguments
from pallas_ce.statistics.cross_entropy import CrossEntropy, Metrics, safe_inverse
from pallas_ce.streaming.rows import flat_rows, zeroed

# Makes a sum over the rows that a device has one over all rows that the call is about.
Total = Callable[[jax.Array], jax.Array]


def _alone(rows: jax.Array) -> jax.Array:
    return rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """Optional arrays of a call; None where a term is absent."""

    token_weights: Any | None
    class_weights: Any | None
    label_smoothing: Any | None
    z_loss: Any | None
    normalizer: Any | None

    def logit_weights(self, vocab_size: int, wide: Any) -> jax.Array | None:
        """The u of `mean_logit` that smoothing reads, c/V; None where it is 1/V throughout or not read."""
        if self.class_weights is None or self.label_smoothing is None:
            return None
        return jax.lax.stop_gradient(self.class_weights.astype(wide)) / vocab_size


def read_options(
    token_weights: jax.Array | None,
    class_weights: Any | None,
    label_smoothing: Any,
    z_loss: Any,
    normalizer: Any | None,
    vocab_size: int,
) -> Options:
    """Checked options; `token_weights` have been read already. The number 0 leaves a term out."""
    label_smoothing = arguments.scalar("label_smoothing", label_smoothing, 0.0, 1.0)
    z_loss = arguments.scalar("z_loss", z_loss)
    if class_weights is not None:
        class_weights = arguments.by_column("class_weights", class_weights, vocab_size)
    return Options(
        token_weights,
        class_weights,
        None if arguments.is_known(label_smoothing, 0.0) else label_smoothing,
        None if arguments.is_known(z_loss, 0.0) else z_loss,
        arguments.normalizer(normalizer),
    )


def row_loss(
    options: Options, reduction: str, wide: Any, ids: jax.Array, mask: jax.Array, total: Total = _alone
) -> tuple[CrossEntropy, dict[str, jax.Array], dict[str, jax.Array]]:
    """The row loss, its inputs by row `[...]`, and those all rows share, the normalisers' inverses included.

    Args:
        options: of the call.
        reduction: "mean" and "none" carry the mean's normalisers, "sum" those of a plain sum.
        wide: the accumulator dtype.
        ids: canonical labels `[...]`.
        mask: `[...]` bool, which rows count.
        total: what makes a device's sum over rows that of the call.
    """
    loss = CrossEntropy(
        smoothing=options.label_smoothing is not None,
        z_loss=options.z_loss is not None,
        class_weights=options.class_weights is not None,
        token_weights=options.token_weights is not None,
    )
    by_row: dict[str, jax.Array] = {}
    shared: dict[str, jax.Array] = {}
    weight = jnp.ones(ids.shape, wide)
    if options.token_weights is not None:
        weight = by_row["token_weight"] = options.token_weights.reshape(ids.shape).astype(wide)
    z_normalizer = total(jnp.sum(jnp.where(mask, weight, 0)))
    normalizer = z_normalizer
    if options.class_weights is not None:
        class_weights = jax.lax.stop_gradient(options.class_weights.astype(wide))
        if not class_weights.size:  # nothing counts in an empty vocabulary
            class_weights = jnp.zeros(1, wide)
        by_row["class_weight"] = class_weights[jnp.where(mask, ids, 0)]
        shared["mean_class_weight"] = jnp.mean(class_weights)
        normalizer = total(jnp.sum(jnp.where(mask, weight * by_row["class_weight"], 0)))
    if options.label_smoothing is not None:
        shared["smoothing"] = jnp.asarray(options.label_smoothing, wide)
    if options.z_loss is not None:
        shared["z_loss"] = jnp.asarray(options.z_loss, wide)
    if options.normalizer is not None:
        normalizer = z_normalizer = jnp.asarray(options.normalizer, wide)
    if reduction == "sum":
        shared |= unnormalised(wide)
    else:
        shared["inverse_normalizer"] = safe_inverse(normalizer)
        shared["inverse_z_normalizer"] = safe_inverse(z_normalizer)
    return loss, by_row, shared


def unnormalised(wide: Any) -> dict[str, jax.Array]:
    """The normalisers' inverses of a plain sum."""
    one = jnp.ones((), wide)
    return {"inverse_normalizer": one, "inverse_z_normalizer": one}


def call_metrics(
    loss: CrossEntropy,
    found: dict[str, jax.Array],
    ids: jax.Array,
    mask: jax.Array,
    given: tuple[dict[str, jax.Array], dict[str, jax.Array]],
    total: Total = _alone,
) -> Metrics:
    """Metrics of a call, without gradient, from its statistics `[...]` and what `row_loss` returned."""
    shared = given[1]
    found, by_row, mask, ids = flat_rows(mask.shape, (found, given[0], mask, ids))
    read, by_row = zeroed(mask, (found, by_row))
    cross_entropy, z_part = loss.parts(read, (by_row, shared))
    count = total(jnp.sum(mask, dtype=jnp.int32))
    wide = cross_entropy.dtype
    inverse_count = safe_inverse(count.astype(wide))
    z_sum = jnp.zeros((), wide) if z_part is None else total(jnp.sum(z_part, where=mask))
    values = Metrics(
        cross_entropy=total(jnp.sum(cross_entropy, where=mask)) * shared["inverse_normalizer"],
        z_loss=z_sum * shared["inverse_z_normalizer"],
        num_tokens=count,
        accuracy=total(jnp.sum(mask & (found["argmax"] == ids), dtype=wide)) * inverse_count,
        mean_lse=total(jnp.sum(found["lse"])) * inverse_count,
    )
    return jax.tree.map(jax.lax.stop_gradient, values)
