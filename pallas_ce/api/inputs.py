"""From public arguments to rows and a head: what the public functions share."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks as arguments
from pallas_ce.head import Batch, BatchSpec, Head, HeadSpec, LogitsSpec
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics import labels as label_rule


class HeadArrays(NamedTuple):
    """The head's arrays as the caller gave them, None where absent.

    `logit_scale` is None where it is the number 1. `temperature` is `[]` or `[...]`; None where it is the number 1 or
    another number that the head has been divided by.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    logit_scale: jax.Array | None
    logit_weights: jax.Array | None
    temperature: jax.Array | None = None

    @property
    def leading(self) -> tuple[int, ...]:
        """Hidden's leading shape."""
        return self.hidden.shape[:-1]


def read_head(
    hidden: Any,
    weight: Any,
    bias: Any | None,
    logit_scale: Any,
    logit_weights: Any | None,
    *,
    vocab_axis: int,
    vocab_size: int | None,
    logit_softcap: float | None,
    dtype: Any | None,
    temperature: Any = 1.0,
    folds: bool = True,
    zero: bool = False,
    mesh_axes: MeshAxes | None = None,
) -> tuple[HeadArrays, HeadSpec]:
    """Checked arrays and static facts.

    `folds`: whether a number as temperature goes into the head; not where the logits are needed without it. `zero`:
    whether it may be 0.
    """
    hidden, weight = arguments.array("hidden", hidden), arguments.array("weight", weight)
    bias = None if bias is None else arguments.array("bias", bias)
    mesh_axes = arguments.mesh_axes(mesh_axes)
    parts = (1, 1) if mesh_axes is None else mesh_axes.parts
    spec = arguments.head_spec(hidden, weight, bias, vocab_axis, vocab_size, dtype, logit_softcap, parts)
    logit_scale = arguments.scalar("logit_scale", logit_scale)
    scale = None if arguments.is_known(logit_scale, 1.0) else jnp.asarray(logit_scale)
    if logit_weights is not None:
        logit_weights = arguments.by_column("logit_weights", logit_weights, spec.vocab_size)
    arrays = HeadArrays(hidden, weight, bias, scale, logit_weights)
    temperature = arguments.temperature(temperature, arrays.leading, zero)
    if isinstance(temperature, float) and (folds or temperature == 1.0):
        return _folded(arrays, spec, temperature)
    return arrays._replace(temperature=jnp.asarray(temperature)), spec


def _folded(arrays: HeadArrays, spec: HeadSpec, temperature: float) -> tuple[HeadArrays, HeadSpec]:
    """A number T costs nothing: `c·tanh(s·y/c)/T` is `c'·tanh(s'·y/c')` with `c' = c/T` and `s' = s/T`."""
    if temperature == 1.0:
        return arrays, spec
    if spec.softcap is not None:
        spec = dataclasses.replace(spec, softcap=spec.softcap / temperature)
    inverse = jnp.asarray(1.0 / temperature, spec.accumulator)
    scale = inverse if arrays.logit_scale is None else arrays.logit_scale.astype(spec.accumulator) * inverse
    return arrays._replace(logit_scale=scale), spec


def batch_spec(leading: tuple[int, ...], labels: Any | None, temperature: Any | None) -> BatchSpec:
    """The static facts of rows, from labels and temperatures or anything with their shape; None where absent."""
    several = labels is not None and labels.ndim > len(leading)
    return BatchSpec(labels.shape[-1] if labels is not None and several else None, temperature is not None)


def read_labels(
    labels: Any,
    leading: tuple[int, ...],
    spec: HeadSpec | LogitsSpec,
    ignore_index: int | None,
    validate: bool,
    of: str = "hidden's",
    several: bool = False,
) -> jax.Array:
    """Checked labels, `several` for each token where that is allowed; with `validate`, their values too."""
    if not isinstance(
        labels, np.ndarray | np.generic
    ):  # whose 64-bit values JAX would cut to 32 bits before they are looked at
        labels = arguments.array("labels", labels)
    else:
        labels = np.asarray(labels)
    arguments.check_labels(labels, leading, of, several)
    if validate:
        label_rule.check(labels, ignore_index, spec.vocab_size)
    return label_rule.as_array(labels)


def read_by_row(name: str, array: Any | None, leading: tuple[int, ...], of: str = "hidden's") -> jax.Array | None:
    """A checked array with one entry for each token, or None."""
    return None if array is None else arguments.by_row(name, array, leading, of)


def read_row_mask(mask: Any | None, leading: tuple[int, ...]) -> jax.Array | None:
    """A checked mask, or None."""
    return None if mask is None else arguments.row_mask(mask, leading)


def tokens(leading: tuple[int, ...]) -> int:
    """N."""
    return math.prod(leading)


def batch_and_head(arrays: HeadArrays, spec: HeadSpec, ids: jax.Array | None = None) -> tuple[Batch, Head]:
    """The rows, with canonical labels `[...]` or `[..., K]`, and the head; inside jit."""
    wide = spec.accumulator
    u = arrays.logit_weights
    head = Head(
        arrays.weight,
        arrays.bias,
        None if arrays.logit_scale is None else arrays.logit_scale.astype(wide),
        None if u is None else jax.lax.stop_gradient(u.astype(wide)),
        spec,
    )
    temperature = by_row(arrays.temperature, arrays.leading, spec)
    return Batch(arrays.hidden, ids, None if temperature is None else 1.0 / temperature), head


def by_row(temperature: jax.Array | None, leading: tuple[int, ...], spec: HeadSpec) -> jax.Array | None:
    """Temperatures `[...]` in the accumulator dtype, a constant; inside jit."""
    if temperature is None:
        return None
    return jax.lax.stop_gradient(jnp.broadcast_to(temperature.astype(spec.accumulator), leading))


def flatten(arrays: HeadArrays, spec: HeadSpec) -> tuple[jax.Array, Head, jax.Array | None]:
    """`hidden [N, H]`, the head and temperatures `[N]`, inside jit."""
    head = batch_and_head(arrays, spec)[1]
    temperature = by_row(arrays.temperature, arrays.leading, spec)
    return arrays.hidden.reshape(-1, spec.hidden_size), head, None if temperature is None else temperature.reshape(-1)
