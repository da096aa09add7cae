"""From public arguments to a checked call of a head: what the public functions share."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.api import checks as arguments
from pallas_ce.api import low_rank, specs
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.dispatch.select import warn_once
from pallas_ce.dispatch.settings import Settings, decide
from pallas_ce.head import Batch, BatchSpec, Head, HeadSpec
from pallas_ce.parallel.mesh_axes import MeshAxes, check_split, refuse_shift, shards_of
from pallas_ce.statistics import labels as label_rule
from pallas_ce.streaming.rows import flat_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CheckedCall:
    """The checked arguments that all functions of a head share: a pytree of arrays, with static facts.

    Arrays are as the caller gave them, None where absent; `up`, `down` and `term_scale` are a low-rank term's.
    `logit_scale` is None where it is the number 1. `temperature` is `[]` or `[...]`; None where it is the number 1 or
    another number that the head has been divided by.
    """

    hidden: jax.Array
    weight: jax.Array
    up: jax.Array | None
    down: jax.Array | None
    bias: jax.Array | None
    logit_scale: jax.Array | None
    logit_weights: jax.Array | None
    temperature: jax.Array | None
    labels: jax.Array | None
    row_mask: jax.Array | None
    spec: HeadSpec = dataclasses.field(metadata={"static": True})
    ignore_index: int | None = dataclasses.field(metadata={"static": True})
    implementation: Implementation | None = dataclasses.field(metadata={"static": True})
    scratch_bytes: int | None = dataclasses.field(metadata={"static": True})
    mesh_axes: MeshAxes | None = dataclasses.field(metadata={"static": True})
    shift: int = dataclasses.field(metadata={"static": True})
    term_scale: float = dataclasses.field(metadata={"static": True})

    @property
    def leading(self) -> tuple[int, ...]:
        """Hidden's leading shape."""
        return self.hidden.shape[:-1]

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.leading)

    def settings(self, others: Any = (), *, scalar_loss: bool = False, backward: Backward = "auto") -> Settings:
        """How the call is carried out; `others` are its further arrays."""
        if doubt := check_split(self.mesh_axes, self.weight, self.hidden, (self.labels, self.row_mask)):
            warn_once(doubt)
        return decide(
            self.spec,
            self.tokens,
            (self.hidden, self.weight),
            scalar_loss=scalar_loss,
            rows=batch_spec(self.leading, self.labels, self.temperature),
            backward=backward,
            implementation=self.implementation,
            scratch_bytes=self.scratch_bytes,
            shards=shards_of(self.mesh_axes, self, others),
        )

    def rows(self) -> tuple[Batch, Head]:
        """The rows, with canonical labels `[...]` or `[..., K]`, and the head; inside jit."""
        spec, wide, temperature = self.spec, self.spec.accumulator, self.temperature
        ids = None
        if self.labels is not None:
            ids = self.shifted(label_rule.canonical(self.labels, spec.vocab_size), label_rule.NO_TARGET)
        scale = None if self.logit_scale is None else self.logit_scale.astype(wide)
        u = None if self.logit_weights is None else jax.lax.stop_gradient(self.logit_weights.astype(wide))
        if temperature is not None:
            temperature = jnp.broadcast_to(jax.lax.stop_gradient(1.0 / temperature.astype(wide)), self.leading)
        up, down = self.up, self.down
        if up is not None and down is not None:
            up, down = (up, down) if spec.vocab_axis == 0 else (up.T, down.T)
            down = self.term_scale * down.astype(wide)
        return Batch(self.hidden, ids, temperature), Head(self.weight, self.bias, scale, u, spec, None, up, down)

    def shifted(self, by_token: jax.Array, fill: int) -> jax.Array:
        """`[..., *K]` values of tokens at the rows that predict these; `fill` where there is none."""
        axis = len(self.leading) - 1
        return label_rule.shifted(by_token, self.shift, axis, fill) if self.shift else by_token

    def rows_that_count(self) -> tuple[Batch, Head, jax.Array | None]:
        """`rows`, with `NO_TARGET` for labels that do not count, and which rows do, `[...]`; None: all."""
        batch, head = self.rows()
        if batch.labels is None:
            return batch, head, self.row_mask
        ids, counted = label_rule.targets(batch.labels, self.ignore_index, len(self.leading))
        mask = counted if self.row_mask is None else counted & self.row_mask
        return batch._replace(labels=ids), head, mask

    def flat_rows_that_count(self) -> tuple[Batch, Head, jax.Array | None]:
        """Likewise, with one axis `[N]` in place of the leading ones."""
        batch, head, mask = self.rows_that_count()
        batch, mask = flat_rows(self.leading, (batch, mask))
        return batch, head, mask


def read_head(
    hidden: Any,
    weight: Any,
    labels: Any | None = None,
    *,
    bias: Any | None = None,
    vocab_axis: int = 0,
    vocab_size: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: Any = 1.0,
    logit_weights: Any | None = None,
    temperature: Any = 1.0,
    row_mask: Any | None = None,
    ignore_index: int | None = None,
    dtype: Any | None = None,
    precision: Any | None = None,
    implementation: Implementation | None = None,
    scratch_bytes: int | None = None,
    mesh_axes: MeshAxes | None = None,
    validate_labels: bool = False,
    shift: int = 0,
    needs_labels: bool = False,
    several: bool = False,
    folds: bool = True,
    zero: bool = False,
) -> CheckedCall:
    """The checked call.

    `needs_labels`: whether None is a mistake. `several`: whether a row may have several labels. `folds`: whether a
    number as temperature goes into the head; not where the logits are needed without it. `zero`: whether it may be 0.
    """
    ignore_index = arguments.ignored(ignore_index)
    hidden, given = arguments.array("hidden", hidden), low_rank.read(weight)
    weight, up, down = given.weight, given.up, given.down
    bias = None if bias is None else arguments.array("bias", bias)
    mesh_axes = arguments.mesh_axes(mesh_axes)
    parts = (1, 1) if mesh_axes is None else mesh_axes.parts
    spec = specs.head_spec(
        hidden, weight, bias, vocab_axis, vocab_size, dtype, precision, logit_softcap, parts, up, down
    )
    leading = hidden.shape[:-1]
    logit_scale = arguments.scalar("logit_scale", logit_scale)
    logit_scale = None if arguments.is_known(logit_scale, 1.0) else jnp.asarray(logit_scale)
    logit_weights = arguments.by_column("logit_weights", logit_weights, spec.vocab_size)
    temperature = arguments.temperature(temperature, leading, zero)
    if isinstance(temperature, float) and (folds or temperature == 1.0):
        if temperature != 1.0:
            spec, logit_scale = _folded(spec, logit_scale, temperature)
        temperature = None
    if labels is not None or needs_labels:
        labels = read_labels(labels, leading, spec, ignore_index, validate_labels, several=several)
    row_mask = arguments.row_mask(row_mask, leading)
    if shift := arguments.shift(shift, labels, leading):
        refuse_shift(shift, (hidden, labels))
    check_split(mesh_axes, weight, hidden, (labels, row_mask))
    return CheckedCall(
        hidden,
        weight,
        up,
        down,
        bias,
        logit_scale,
        logit_weights,
        None if temperature is None else jnp.asarray(temperature),
        labels,
        row_mask,
        spec,
        ignore_index,
        implementation,
        arguments.check_scratch_bytes(scratch_bytes),
        mesh_axes,
        shift,
        given.scale,
    )


def _folded(spec: HeadSpec, logit_scale: jax.Array | None, temperature: float) -> tuple[HeadSpec, jax.Array]:
    """A number T costs nothing: `c·tanh(s·y/c)/T` is `c'·tanh(s'·y/c')` with `c' = c/T` and `s' = s/T`."""
    inverse = jnp.asarray(1.0 / temperature, spec.accumulator)
    softcap = None if spec.softcap is None else spec.softcap / temperature
    scale = inverse if logit_scale is None else logit_scale.astype(spec.accumulator) * inverse
    return dataclasses.replace(spec, softcap=softcap), scale


def batch_spec(leading: tuple[int, ...], labels: Any | None, temperature: Any | None) -> BatchSpec:
    """The static facts of rows, from labels and temperatures or anything with their shape; None where absent."""
    several = labels is not None and labels.ndim > len(leading)
    return BatchSpec(labels.shape[-1] if labels is not None and several else None, temperature is not None)


def read_labels(
    labels: Any,
    leading: tuple[int, ...],
    spec: HeadSpec,
    ignore_index: int | None,
    validate: bool,
    of: str = "hidden's",
    several: bool = False,
) -> jax.Array:
    """Checked labels, `several` for each token where that is allowed; with `validate`, their values too."""
    labels = arguments.ids("labels", labels)
    arguments.check_labels(labels, leading, of, several)
    if validate:
        label_rule.check(labels, ignore_index, spec.vocab_size)
    return label_rule.as_array(labels)
