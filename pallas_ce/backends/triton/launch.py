"""From a head and a block of rows to a launch of the kernel, and from its outputs to what backends return."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.protocol import Gradient
from pallas_ce.backends.triton import binding, configs
from pallas_ce.backends.triton.configs import Config, Use
from pallas_ce.head import Batch, Head
from pallas_ce.statistics.row import Partial, add, fields_for, joined, merge, reads_logit_weights
from pallas_ce.streaming.tiles import Columns, pad

# Registers that numbers take, where options and other numbers take 1; and a mask's.
_REGISTERS = {"max": 0, "sum_exp": 0, "prob": 0, "weighted_sum": 4, "logit_weights": 4}
_OF_MASK = 2

# A low-rank term's operands are padded with zeros to a multiple of this, the entries that are multiplied at a time.
_RANK_STEP = 16

# The kernel is told whether a part of the vocabulary begins at a multiple of this, so that it can load many at a time.
_STEP = 16


def statistics(head: Head, batch: Batch, names: frozenset[str], filled: jax.Array | None = None) -> Partial:
    """The `Partial` over the head's vocabulary, without targets; of rows from `filled []` on it means nothing."""
    fields = _fields(names)
    if not fields:
        return Partial()
    config = _config(head, batch, "forward", fields)
    found = _run(head, batch, config, _u(head, names), _partials(head, batch, config, fields), filled)
    return _joined(head, config, found, merge)


def exponentials(
    head: Head,
    batch: Batch,
    reference: jax.Array,
    names: frozenset[str],
    again: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[Callable[[], Partial], jax.Array]:
    """See `Block.exponentials`; about the number of rows that is given is made `again`.

    It always writes where something lies: so a program that may make them again has one such kernel, not two.
    """
    rows, into = again or (None, None)
    fields = _fields(names | {"lse"})
    config = _config(head, batch, "stash", fields)
    outputs = _partials(head, batch, config, fields)
    stored = jax.ShapeDtypeStruct((batch.hidden.shape[0], head.spec.vocab_size), head.spec.dtype)
    outputs[binding.STORED] = stored
    before = lax.empty(stored.shape, stored.dtype) if into is None else into
    inputs = _u(head, names) | {"reference": reference, binding.BEFORE: before}
    found = _run(head, batch, config, inputs, outputs, rows)
    exponentials = found.pop(binding.STORED)
    return functools.partial(_joined, head, config, found, add), exponentials


def dlogits(
    head: Head,
    batch: Batch,
    gradient: Gradient,
    part: Columns | None = None,
    *,
    into: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> jax.Array:
    """dlogits without single entries, in the compute dtype: `[n, V]`, or of a part's columns.

    Args:
        head: the head.
        batch: the rows.
        gradient: theirs, without coefficients of single entries.
        part: which columns; None: all. Those behind the vocabulary's end have dlogits of 0, too.
        into: whose memory the result takes; None: its own.
        rows: `[]`, about how many are worked on; None: all.
    """
    coefficients = {name: c for name, c in gradient.coefficients._asdict().items() if c is not None}
    inputs = dict(coefficients)
    if gradient.coefficients.need_probabilities:
        assert gradient.reference is not None
        inputs["reference"] = jnp.where(jnp.isneginf(gradient.reference), jnp.inf, gradient.reference)
    if into is not None:
        inputs[binding.BEFORE] = into
    if "logit_weights" in coefficients and head.logit_weights is not None:
        inputs["u"] = head.logit_weights
    columns = head.spec.vocab_size if part is None else part.size
    outputs = {binding.STORED: jax.ShapeDtypeStruct((batch.hidden.shape[0], columns), head.spec.dtype)}
    config = _config(head, batch, "dlogits", tuple(coefficients), part)
    return _run(head, batch, config, inputs, outputs, rows, part=part, gradient=True)[binding.STORED]


def _config(head: Head, batch: Batch, use: Use, numbers: Sequence[str], part: Columns | None = None) -> Config:
    """The tiles for a pass that makes these numbers."""
    options = (head.bias, head.spec.softcap, batch.inverse_temperature, batch.low, head.up)
    held = 2 if use == "stash" else 1  # the exponentials are stored, beside the statistics
    taken = held * sum(_REGISTERS.get(number, 1) for number in numbers) + sum(x is not None for x in options)
    find = functools.partial(configs.config_for, head.spec, binding.capability(), use, step=_step(head, part))
    masked = (
        _overlaps(head, part) or head.valid_columns is not None or (use != "dlogits" and _ragged(head, find(taken)))
    )
    return find(taken + _OF_MASK * masked)


def _ragged(head: Head, config: Config) -> bool:
    """Whether the last tile reaches beyond the vocabulary."""
    return head.spec.vocab_size % config.columns != 0


def _overlaps(head: Head, part: Columns | None) -> bool:
    """Whether some columns of a part do not count, or of another of its size."""
    return part is not None and (part.first is not None or head.spec.vocab_size % part.size != 0)


def _step(head: Head, part: Columns | None) -> int:
    """A number that divides the part's first column, for the kernel; 0 where that is the vocabulary's first."""
    return 0 if part is None else math.gcd(part.size, head.spec.vocab_size, _STEP)


def _u(head: Head, names: frozenset[str]) -> dict[str, jax.Array]:
    return {"u": head.logit_weights} if reads_logit_weights(names) and head.logit_weights is not None else {}


def _fields(names: frozenset[str]) -> tuple[str, ...]:
    """The fields that the kernel makes; the sums of u are the same for all rows."""
    return tuple(field for field in fields_for(names) if field != "sum_weights")


def _partials(head: Head, batch: Batch, config: Config, fields: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """One number for each row and block of columns."""
    shape = -(-head.spec.vocab_size // config.columns), batch.hidden.shape[0]
    return {field: jax.ShapeDtypeStruct(shape, jnp.int32 if field == "argmax" else jnp.float32) for field in fields}


def _joined(
    head: Head, config: Config, found: dict[str, jax.Array], rule: Callable[[Partial, Partial], Partial]
) -> Partial:
    """One `Partial` `[n]` from the column blocks' `[blocks, n]`."""
    if "weighted_sum" in found:
        blocks, rows = found["weighted_sum"].shape
        u = head.tile_logit_weights(0, head.spec.vocab_size)
        if head.valid_columns is not None:
            u = jnp.where(jnp.arange(u.shape[0]) < head.valid_columns, u, 0.0)
        of_blocks = pad(u, (blocks * config.columns,)).reshape(blocks, config.columns).sum(axis=1)
        found = found | {"sum_weights": jnp.broadcast_to(of_blocks[:, None], (blocks, rows))}
    return joined(Partial(**found), rule)


def padded_rank(rank: int) -> int:
    """Entries of a low-rank term's operands."""
    return -(-rank // _RANK_STEP) * _RANK_STEP


def _term(head: Head, batch: Batch) -> dict[str, jax.Array]:
    """The operands of a low-rank term, as long as the kernel takes them, in the layout of hidden states and weight."""
    if head.up is None:
        return {}
    assert batch.low is not None
    spec, length = head.spec, padded_rank(head.spec.rank)
    low = pad(batch.low.astype(spec.dtype), (batch.low.shape[0], length))
    up = pad(head.up.astype(spec.dtype), (spec.weight_rows, length))
    return {"low": low, "up": up if spec.vocab_axis == 0 else up.T}


def _run(
    head: Head,
    batch: Batch,
    config: Config,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    filled: jax.Array | None = None,
    *,
    part: Columns | None = None,
    gradient: bool = False,
) -> dict[str, jax.Array]:
    spec, rows = head.spec, batch.hidden.shape[0]
    vocabulary = spec.vocab_size
    part_or_all = part or Columns(0, vocabulary)
    columns, first = part_or_all.size, part_or_all.first
    last = vocabulary if head.valid_columns is None else head.valid_columns
    bounds = (0 if first is None else first, last, rows if filled is None else filled, part_or_all.start)
    given = {
        "hidden": batch.hidden.astype(spec.dtype),
        "weight": head.weight.astype(spec.dtype),
        "bounds": jnp.stack([jnp.asarray(bound, jnp.int32) for bound in bounds]),
        "bias": None if head.bias is None else head.bias[:vocabulary],
        "scale": None if head.logit_scale is None else head.logit_scale.reshape(1),
        "inverse_temperature": batch.inverse_temperature,
        **_term(head, batch),
        **inputs,
    }
    arrays = {name: x for name, x in given.items() if x is not None}
    for name in arrays:
        if name not in ("hidden", "weight", "bounds", "low", "up", binding.BEFORE):
            arrays[name] = arrays[name].astype(jnp.float32)
    # Stored columns behind the vocabulary are not written, so that only statistics need be told where it ends.
    ragged = not gradient and _ragged(head, config)
    stores = config.descriptors and config.stores and binding.STORED in outputs
    constants: dict[str, Any] = {
        "ROWS": rows,
        "COLUMNS": columns,
        "VOCABULARY": vocabulary,
        "ORIGIN": _step(head, part),
        "H": spec.hidden_size,
        "STRIDE": spec.weight_rows,
        "AXIS": spec.vocab_axis,
        "CAP": spec.softcap,
        "UNIFORM": spec.uniform_weight,
        "RANK": padded_rank(spec.rank),
        "RANK_STEP": _RANK_STEP,
        "PRECISION": configs.precision(spec),
        "MASKED": ragged or head.valid_columns is not None or _overlaps(head, part),
        "GRADIENT": gradient,
        "DESCRIPTORS": config.descriptors,
        "STORES": stores and configs.described(columns, spec.dtype),
        "BLOCK_ROWS": config.rows,
        "BLOCK_COLUMNS": config.columns,
    }
    tiles = -(-rows // config.rows) * -(-columns // config.columns)
    return binding.call("head_kernel", arrays, outputs, constants, config, tiles)
