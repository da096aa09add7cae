"""From a head and a block of rows to a launch of the kernel, and from its outputs to what backends return."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Gradient
from pallas_ce.backends.triton import binding, configs
from pallas_ce.backends.triton.configs import Config, Use
from pallas_ce.head import Batch, Head
from pallas_ce.statistics.row import Partial, fields_of, merge
from pallas_ce.statistics.table import FIELDS

# What the kernel calls the coefficients whose names are statistics', too.
_RENAMED = {"target": "target_coefficient", "argmax": "argmax_coefficient"}
_PLAIN = frozenset({"lse", "target_logit"})


def apart(x: jax.Array) -> jax.Array:
    """`x` as an array that begins where the kernel needs it to: XLA hands slices to a kernel wherever they lie."""
    return jax.lax.optimization_barrier(x)


def statistics(
    head: Head, batch: Batch, names: frozenset[str], *, filled: jax.Array | None = None, stored: bool = False
) -> tuple[Partial, jax.Array | None]:
    """The `Partial` over the head's vocabulary; and the logits `[n, V]` float32, if they are to be `stored`.

    Statistics of rows from `filled []` on mean nothing.
    """
    plain = names <= _PLAIN and _no_options(head, batch)
    config = _config(head, "many" if not plain else "stash" if stored else "forward")
    rows, columns = _shape(head, batch)
    blocks = -(-columns // config.columns)
    fields = [field for field in fields_of(names) if field != "target_logit"]
    kinds = {field: jnp.int32 if field == "argmax" else jnp.float32 for field in fields}
    outputs = {field: jax.ShapeDtypeStruct((blocks, rows), kind) for field, kind in kinds.items()}
    inputs = {}
    if "target_logit" in names:
        assert batch.labels is not None
        inputs["labels"] = batch.labels
        outputs["target_logit"] = jax.ShapeDtypeStruct(batch.labels.shape, jnp.float32)
    if "mean_logit" in names and head.logit_weights is not None:
        inputs["u"] = head.logit_weights
    if stored or not outputs:
        outputs["stored"] = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    found = _run(head, batch, config, inputs, outputs, filled=filled)
    partial = _joined(found, fields)
    if batch.labels is not None and "target_logit" in found:
        exists = (batch.labels >= 0) & (batch.labels < (columns if head.valid_columns is None else head.valid_columns))
        partial = partial._replace(target_logit=jnp.where(exists, found["target_logit"], 0.0))
    return partial, found.get("stored")


def dlogits(head: Head, batch: Batch, gradient: Gradient, first: jax.Array | None) -> jax.Array:
    """`[n, V]` in the compute dtype; 0 in columns before `first []`."""
    coefficients = {name: c for name, c in gradient.coefficients._asdict().items() if c is not None}
    inputs = {_RENAMED.get(name, name): c.astype(jnp.float32) for name, c in coefficients.items()}
    if gradient.lse is not None and "prob" in coefficients:
        inputs["lse"] = jnp.where(jnp.isneginf(gradient.lse), jnp.inf, gradient.lse)
    if "target" in coefficients:
        assert batch.labels is not None
        inputs["labels"] = batch.labels
    if "argmax" in coefficients:
        assert gradient.argmax is not None
        inputs["argmax_at"] = gradient.argmax
    if "logit_weights" in coefficients and head.logit_weights is not None:
        inputs["u"] = head.logit_weights
    outputs = {"stored": jax.ShapeDtypeStruct(_shape(head, batch), head.spec.dtype)}
    plain = coefficients.keys() <= {"prob", "target"} and batch.targets == () and _no_options(head, batch)
    config = _config(head, "dlogits" if plain else "many")
    return _run(head, batch, config, inputs, outputs, first=first, gradient=True)["stored"]


def _shape(head: Head, batch: Batch) -> tuple[int, int]:
    return batch.hidden.shape[0], head.spec.vocab_size


def _config(head: Head, use: Use) -> Config:
    return configs.config_for(head.spec, binding.capability(), use)


def _no_options(head: Head, batch: Batch) -> bool:
    given = (head.bias, head.logit_scale, head.spec.softcap, batch.inverse_temperature)
    return all(option is None for option in given)


def _joined(found: dict[str, jax.Array], fields: Sequence[str]) -> Partial:
    """One `Partial` `[n]` of those of the column blocks `[blocks, n]`, by the rule that all backends share."""
    blocks = Partial(**{field: found[field] for field in fields})
    neutral = Partial(**{field: jnp.asarray(FIELDS[field].neutral, found[field].dtype) for field in fields})
    return jax.lax.reduce(blocks, neutral, merge, (0,)) if fields else blocks


def _run(
    head: Head,
    batch: Batch,
    config: Config,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    filled: jax.Array | None = None,
    first: jax.Array | None = None,
    gradient: bool = False,
) -> dict[str, jax.Array]:
    spec, (rows, columns) = head.spec, _shape(head, batch)
    last = columns if head.valid_columns is None else head.valid_columns
    bounds = (0 if first is None else first, last, rows if filled is None else filled)
    given = {
        "hidden": apart(batch.hidden.astype(spec.dtype)),
        "weight": apart(head.weight.astype(spec.dtype)),
        "bounds": jnp.stack([jnp.asarray(bound, jnp.int32) for bound in bounds]),
        "bias": None if head.bias is None else head.bias[:columns],
        "scale": None if head.logit_scale is None else head.logit_scale.reshape(1),
        "inverse_temperature": batch.inverse_temperature,
        **inputs,
    }
    arrays = {name: x for name, x in given.items() if x is not None}
    for name in arrays.keys() - {"hidden", "weight"}:
        integers = jnp.issubdtype(arrays[name].dtype, jnp.integer)
        arrays[name] = apart(arrays[name].astype(jnp.int32 if integers else jnp.float32))
    targets = 0
    if "labels" in inputs:
        targets = 1 if inputs["labels"].ndim == 1 else inputs["labels"].shape[1]
    constants: dict[str, Any] = {
        "ROWS": rows,
        "COLUMNS": columns,
        "H": spec.hidden_size,
        "STRIDE": spec.weight_rows,
        "AXIS": spec.vocab_axis,
        "K": targets,
        "CAP": spec.softcap,
        "UNIFORM": spec.uniform_weight,
        "MASKED": bool(columns % config.columns) or head.valid_columns is not None or first is not None,
        "GRADIENT": gradient,
        "DESCRIPTORS": config.descriptors,
        "BLOCK_ROWS": config.rows,
        "BLOCK_COLUMNS": config.columns,
        "WINDOW": config.window,
        "GROUP": config.group,
    }
    tiles = -(-rows // config.rows) * -(-columns // config.columns)
    return binding.call(
        "head_kernel",
        arrays,
        outputs,
        constants,
        programs=min(tiles, configs.multiprocessors()) if config.descriptors else tiles,
        warps=config.warps,
        stages=config.stages,
        scratch=config.descriptors,
    )
