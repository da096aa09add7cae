"""`Problem`: from the arguments of a public function of a head to rows, a head and how it is carried out."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from pallas_ce.api import checks, specs
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.backends.select import warn_once
from pallas_ce.head import Batch, BatchSpec, Head, HeadSpec
from pallas_ce.modes.how import WORK, How, Task, decide
from pallas_ce.parallel.mesh_axes import MeshAxes, check_split, refuse_shift, shards_of
from pallas_ce.statistics import labels as label_rule
from pallas_ce.statistics.cross_entropy import reduce_rows
from pallas_ce.streaming.loops import varying
from pallas_ce.streaming.rows import flat_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """How losses by row become what a call returns, by the public names and defaults: arrays, and static facts."""

    token_weights: Any | None = None
    class_weights: Any | None = None
    label_smoothing: Any | None = 0.0
    z_loss: Any | None = 0.0
    normalizer: Any | None = None
    reduction: str = dataclasses.field(default="mean", metadata={"static": True})
    backward: Backward = dataclasses.field(default="auto", metadata={"static": True})
    return_metrics: bool = dataclasses.field(default=False, metadata={"static": True})

    def checked(self, leading: tuple[int, ...], vocab_size: int, of: str = "hidden's") -> Self:
        """For rows of the shape `leading`, `of` an argument that errors name. The number 0 is no term: None."""
        checks.check_reduction(self.reduction, self.normalizer, self.backward)
        label_smoothing = checks.scalar("label_smoothing", self.label_smoothing, 0.0, 1.0)
        z_loss = checks.scalar("z_loss", self.z_loss, 0.0)
        return dataclasses.replace(
            self,
            token_weights=checks.shaped("token_weights", self.token_weights, leading, f"{of} leading shape"),
            class_weights=checks.shaped("class_weights", self.class_weights, (vocab_size,), "vocab_size's shape"),
            label_smoothing=None if checks.is_known(label_smoothing, 0.0) else label_smoothing,
            z_loss=None if checks.is_known(z_loss, 0.0) else z_loss,
            normalizer=checks.normalizer(self.normalizer),
        )

    @property
    def by_row(self) -> bool:
        """Whether the loss is not reduced."""
        return self.reduction == "none"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The checked arguments that all functions of a head share: a pytree of arrays, with static facts.

    Arrays are as the caller gave them, None where absent; `up`, `down` and `term_scale` are a low-rank term's.
    `logit_scale` is None where it is the number 1. `temperature` is `[]` or `[...]`; None where it is the number 1 or
    another number that the head has been divided by. `options` say how losses by row become what a call returns, and
    `how`, once it is `decided`, how the call is carried out.
    """

    hidden: jax.Array
    weight: jax.Array
    up: jax.Array | None = None
    down: jax.Array | None = None
    bias: jax.Array | None = None
    vocab_scale: jax.Array | None = None
    logit_scale: jax.Array | None = None
    logit_weights: jax.Array | None = None
    temperature: jax.Array | None = None
    labels: jax.Array | None = None
    row_mask: jax.Array | None = None
    options: Options
    spec: HeadSpec = dataclasses.field(metadata={"static": True})
    ignore_index: int | None = dataclasses.field(default=None, metadata={"static": True})
    implementation: Implementation | None = dataclasses.field(default=None, metadata={"static": True})
    scratch_bytes: int | None = dataclasses.field(default=None, metadata={"static": True})
    mesh_axes: MeshAxes | None = dataclasses.field(default=None, metadata={"static": True})
    shift: int = dataclasses.field(default=0, metadata={"static": True})
    term_scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    how: How = dataclasses.field(default=How("xla", None, None), metadata={"static": True})

    @classmethod
    def read(
        cls,
        hidden: Any,
        weight: Any,
        labels: Any | None = None,
        *,
        bias: Any | None = None,
        vocab_scale: Any | None = None,
        vocab_axis: int = 0,
        vocab_size: int | None = None,
        logit_softcap: float | None = None,
        logit_scale: Any = 1.0,
        logit_weights: Any | None = None,
        temperature: Any = 1.0,
        row_mask: Any | None = None,
        ignore_index: int | None = -100,
        dtype: Any | None = None,
        precision: Any | None = None,
        implementation: Implementation | None = None,
        scratch_bytes: int | None = None,
        mesh_axes: MeshAxes | None = None,
        validate_labels: bool = False,
        shift: int = 0,
        several: bool = False,
        **of_loss: Any,
    ) -> Self:
        """Checks the arguments of a public function, by their public names.

        A number as temperature goes into the head; see also `tempered`. `several`: whether a row may have several
        labels. `of_loss` are `Options`.
        """
        ignore_index = checks.ignored(ignore_index)
        hidden, given = checks.array("hidden", hidden), specs.read_weight(weight)
        if implementation != "reference":
            for name, x in (("hidden", hidden), ("weight", given.weight)):
                checks.known_sizes(name, x, "implementation='reference' for symbolic rows; it stores the logits")
        by_column: dict[str, Any] = {"bias": bias, "vocab_scale": vocab_scale}
        by_column = {name: checks.array(name, x) for name, x in by_column.items() if x is not None}
        if mesh_axes is not None and not isinstance(mesh_axes, MeshAxes):
            axis = mesh_axes if isinstance(mesh_axes, str) else "tensor"
            example = f"MeshAxes(vocabulary={axis!r})"
            raise TypeError(f"mesh_axes={mesh_axes!r} must be a MeshAxes, such as {example}, or None")
        parts = (1, 1) if mesh_axes is None else mesh_axes.parts
        spec = specs.head_spec(hidden, given, by_column, vocab_axis, vocab_size, dtype, precision, logit_softcap, parts)
        leading = hidden.shape[:-1]
        logit_scale = checks.scalar("logit_scale", logit_scale)
        logit_scale = None if checks.is_known(logit_scale, 1.0) else jnp.asarray(logit_scale)
        temperature = checks.temperature(temperature, leading)
        if isinstance(temperature, float):
            if temperature != 1.0:  # `c·tanh(s·y/c)/T` is `c'·tanh(s'·y/c')` with `c' = c/T` and `s' = s/T`
                inverse = jnp.asarray(1.0 / temperature, spec.accumulator)
                logit_scale = inverse if logit_scale is None else logit_scale.astype(spec.accumulator) * inverse
                softcap = None if spec.softcap is None else spec.softcap / temperature
                spec = dataclasses.replace(spec, softcap=softcap)
            temperature = None
        shift = checks.shift(shift, labels, leading)
        if labels is not None:
            labels = checks.labels(
                labels, leading, spec.vocab_size, ignore_index, validate_labels, several=several, shift=shift
            )
        elif validate_labels:
            raise ValueError("validate_labels=True needs labels, which is None")
        if shift:
            refuse_shift(shift, (hidden, labels))
        problem = cls(
            hidden=hidden,
            weight=given.weight,
            up=given.up,
            down=given.down,
            logit_scale=logit_scale,
            logit_weights=checks.shaped("logit_weights", logit_weights, (spec.vocab_size,), "vocab_size's shape"),
            temperature=temperature,
            labels=labels,
            row_mask=checks.mask("row_mask", row_mask, leading),
            options=Options(**of_loss).checked(leading, spec.vocab_size),
            spec=spec,
            ignore_index=ignore_index,
            implementation=implementation,
            scratch_bytes=checks.scratch(scratch_bytes),
            mesh_axes=mesh_axes,
            shift=shift,
            term_scale=given.scale,
            **by_column,
        )
        check_split(problem)
        return problem

    def tempered(self, temperature: Any, zero: bool = False) -> Self:
        """At a temperature beside the head, whose logits are needed without it; with `zero` it may be 0."""
        read = checks.temperature(temperature, self.leading, zero)
        return dataclasses.replace(self, temperature=None if checks.is_known(read, 1.0) else jnp.asarray(read))

    @property
    def leading(self) -> tuple[int, ...]:
        """Hidden's leading shape."""
        return self.hidden.shape[:-1]

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.leading)

    def decided(
        self, others: Any = (), *, task: Task = "head", arrays: Any | None = None, padded_share: HeadSpec | None = None
    ) -> Self:
        """Decides how the call is carried out; `others` are its further arrays, a pair's teacher. See also `decide`.

        `arrays`, by default hidden states and weight, may know the device.
        """
        if WORK[task].split and (doubt := check_split(self)):
            warn_once(doubt)
        how = decide(
            self.spec,
            self.tokens,
            (self.hidden, self.weight) if arrays is None else arrays,
            task=task,
            scalar_loss=not self.options.by_row,
            rows=self.batch_spec,
            backward=self.options.backward,
            implementation=self.implementation,
            scratch_bytes=self.scratch_bytes,
            shards=shards_of(self.mesh_axes, self, others) if WORK[task].split else None,
            checked=bool(varying(self)),
            padded_share=padded_share,
            teacher=others.spec if task == "pair" else None,
        )
        return dataclasses.replace(self, how=how)

    @property
    def batch_spec(self) -> BatchSpec:
        """The static facts of the rows."""
        targets = () if self.labels is None else self.labels.shape[len(self.leading) :]
        return BatchSpec(targets[0] if targets else None, self.temperature is not None)

    def rows(self) -> tuple[Batch, Head]:
        """The rows, with canonical labels `[...]` or `[..., K]`, and the head; inside jit."""
        spec, wide, ids = self.spec, self.spec.accumulator, None
        if self.labels is not None:
            ids = self.shifted(label_rule.canonical(self.labels, spec.vocab_size), label_rule.NO_TARGET)
        given = self.logit_scale, self.logit_weights, self.temperature
        scale, u, temperature = jax.tree.map(lambda x: x.astype(wide), given)
        if temperature is not None:
            temperature = jnp.broadcast_to(jax.lax.stop_gradient(1.0 / temperature), self.leading)
        up, down = self.up, self.down
        if up is not None and down is not None:
            up, down = (up, down) if spec.vocab_axis == 0 else (up.T, down.T)
            down = self.term_scale * down.astype(wide)
        return Batch(self.hidden, ids, temperature), Head(
            self.weight, self.bias, scale, jax.lax.stop_gradient(u), spec, None, up, down, self.vocab_scale
        )

    def shifted(self, by_token: jax.Array, fill: int) -> jax.Array:
        """`[..., *K]` values of tokens at the rows that predict these; `fill` where there is none."""
        axis = len(self.leading) - 1
        return label_rule.shifted(by_token, self.shift, axis, fill) if self.shift else by_token

    @property
    def token_weights(self) -> jax.Array | None:
        """`[...]` in the accumulator dtype, at the rows that predict their tokens; None: 1 each."""
        weights = self.options.token_weights
        return None if weights is None else self.shifted(weights, 0).astype(self.spec.accumulator)

    def reduced(self, values: jax.Array, mask: jax.Array | None) -> jax.Array:
        """The loss from values of rows, `[...]` or `[N]`, which count where `mask` is True."""
        options, weights = self.options, self.options.token_weights
        weights = None if weights is None else weights.reshape(values.shape)
        loss = reduce_rows(values, mask, weights, options.reduction, options.normalizer, self.how.total)
        return loss.reshape(self.leading) if options.by_row else loss

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
