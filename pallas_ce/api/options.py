"""The options of the cross entropies, with a head and on materialized logits: read once, by one rule."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from pallas_ce.api import checks
from pallas_ce.backends.protocol import Backward
from pallas_ce.statistics.cross_entropy import CrossEntropy, Metrics, reduce_rows, safe_inverse
from pallas_ce.streaming.rows import flat_rows, zeroed

Inputs = dict[str, jax.Array]

# Makes a sum over the rows that a device has one over all rows that the call is about.
Total = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """How losses by row become what a call returns: arrays, None where a term is absent, and static facts."""

    token_weights: Any | None
    class_weights: Any | None
    label_smoothing: Any | None
    z_loss: Any | None
    normalizer: Any | None
    reduction: str = dataclasses.field(metadata={"static": True})
    backward: Backward = dataclasses.field(metadata={"static": True})
    return_metrics: bool = dataclasses.field(metadata={"static": True})

    @property
    def by_row(self) -> bool:
        """Whether the loss is not reduced."""
        return self.reduction == "none"

    def logit_weights(self, vocab_size: int, wide: Any) -> jax.Array | None:
        """The u of `mean_logit` that smoothing reads, c/V; None where it is 1/V throughout or not read."""
        if self.class_weights is None or self.label_smoothing is None:
            return None
        return jax.lax.stop_gradient(self.class_weights.astype(wide)) / vocab_size

    def of_rows(self, shifted: Callable[[jax.Array, int], jax.Array]) -> Self:
        """With token weights at the rows that predict these, by `Problem.shifted`."""
        weights = None if self.token_weights is None else shifted(self.token_weights, 0)
        return dataclasses.replace(self, token_weights=weights)

    def reduced(
        self, values: jax.Array, mask: jax.Array | None, leading: tuple[int, ...], total: Total = lambda x: x
    ) -> jax.Array:
        """The loss from values of rows of the shape `leading`, `[...]` or `[N]`; they count where `mask` is True."""
        weights = None if self.token_weights is None else self.token_weights.reshape(values.shape)
        loss = reduce_rows(values, mask, weights, self.reduction, self.normalizer, total)
        return loss.reshape(leading) if self.by_row else loss

    def row_loss(
        self, wide: Any, ids: jax.Array, mask: jax.Array, total: Total
    ) -> tuple[CrossEntropy, tuple[Inputs, Inputs]]:
        """The row loss, and its inputs: by row `[...]`, and those all rows share, the normalisers' inverses included.

        `wide` is the accumulator dtype, `ids` are canonical labels `[...]`, and rows count where `mask [...]` is True.
        """
        by_row: Inputs = {}
        shared: Inputs = {}
        weight = jnp.ones(ids.shape, wide)
        if self.token_weights is not None:
            weight = by_row["token_weight"] = self.token_weights.reshape(ids.shape).astype(wide)
        normalizer = z_normalizer = total(jnp.sum(jnp.where(mask, weight, 0)))
        if self.class_weights is not None:
            class_weights = jax.lax.stop_gradient(self.class_weights.astype(wide))
            if not class_weights.size:  # nothing counts in an empty vocabulary
                class_weights = jnp.zeros(1, wide)
            by_row["class_weight"] = jnp.where(mask, class_weights[jnp.where(mask, ids, 0)], 0)
            normalizer = total(jnp.sum(jnp.where(mask, weight * by_row["class_weight"], 0)))
        if self.label_smoothing is not None:
            shared["smoothing"] = jnp.asarray(self.label_smoothing, wide)
        if self.z_loss is not None:
            shared["z_loss"] = jnp.asarray(self.z_loss, wide)
        if self.normalizer is not None:
            normalizer = z_normalizer = jnp.asarray(self.normalizer, wide)
        if self.reduction == "sum":
            normalizer = z_normalizer = jnp.ones((), wide)
        shared["inverse_normalizer"], shared["inverse_z_normalizer"] = map(safe_inverse, (normalizer, z_normalizer))
        loss = CrossEntropy(self.label_smoothing is not None, self.z_loss is not None, self.reduction == "mean")
        return loss, (by_row, shared)


def read_options(
    leading: tuple[int, ...],
    vocab_size: int,
    of: str = "hidden's",
    *,
    token_weights: Any | None = None,
    class_weights: Any | None = None,
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    normalizer: Any | None = None,
    reduction: str = "mean",
    backward: Backward = "auto",
    return_metrics: bool = False,
) -> Options:
    """Checked options for rows of the shape `leading`; errors say `of` which argument. The number 0 is no term."""
    checks.check_reduction(reduction, normalizer, backward)
    label_smoothing = checks.scalar("label_smoothing", label_smoothing, 0.0, 1.0)
    z_loss = checks.scalar("z_loss", z_loss, 0.0)
    return Options(
        checks.by_row("token_weights", token_weights, leading, of),
        checks.by_column("class_weights", class_weights, vocab_size),
        None if checks.is_known(label_smoothing, 0.0) else label_smoothing,
        None if checks.is_known(z_loss, 0.0) else z_loss,
        checks.normalizer(normalizer),
        reduction,
        backward,
        return_metrics,
    )


def call_metrics(
    loss: CrossEntropy,
    found: dict[str, jax.Array],
    ids: jax.Array,
    mask: jax.Array,
    given: tuple[Inputs, Inputs],
    total: Total,
) -> Metrics:
    """Metrics of a call, without gradient, from its statistics `[...]` and the inputs of `row_loss`."""
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
