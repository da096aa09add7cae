"""From a head and a block of rows to a launch of either kernel, and from its outputs to what backends return."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends import entries
from pallas_ce.backends.protocol import Gradient
from pallas_ce.backends.triton import binding, configs
from pallas_ce.backends.triton.configs import Config, Use
from pallas_ce.head import Batch, Head
from pallas_ce.statistics.logits import Distances
from pallas_ce.statistics.row import Partial, add, fields_of, joined, merge
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
    return made(head, batch, names, filled)[0]() if fields_of(names, targets=False) else Partial()


def made(
    head: Head,
    batch: Batch,
    names: frozenset[str],
    rows: jax.Array | None,
    inputs: Mapping[str, jax.Array] = {},
) -> tuple[Callable[[], Partial], dict[str, jax.Array]]:
    """What makes the `Partial` without targets, and the kernel's outputs; about `rows []` are worked on.

    With inputs, the rows' references and the memory to write, the outputs have exponentials, too.
    """
    spec, fields = head.spec, [field for field in fields_of(names, targets=False) if field != "sum_weights"]
    config = _config(head, batch, "stash" if inputs else "forward", fields)
    # One number for each row and block of columns.
    blocks, n = -(-spec.vocab_size // config.columns), batch.hidden.shape[0]
    outputs = {f: jax.ShapeDtypeStruct((blocks, n), jnp.int32 if f == "argmax" else jnp.float32) for f in fields}
    if inputs:
        outputs[binding.STORED] = jax.ShapeDtypeStruct((n, spec.vocab_size), spec.dtype)
    given = {"u": head.logit_weights} if "sum_weights" in fields_of(names) and head.logit_weights is not None else {}
    found = _run(head, batch, config, given | dict(inputs), outputs, rows)

    def partial() -> Partial:
        of_blocks = {field: found[field] for field in fields}
        if "weighted_sum" in fields:  # and the sums of u, the same for all rows
            u = entries.weights_that_count(head)
            sums = pad(u, (blocks * config.columns,)).reshape(blocks, config.columns).sum(axis=1)
            of_blocks["sum_weights"] = jnp.broadcast_to(sums[:, None], (blocks, n))
        return joined(Partial(**of_blocks), add if inputs else merge)

    return partial, found


def dlogits(
    head: Head,
    batch: Batch,
    gradient: Gradient,
    part: Columns | None = None,
    *,
    into: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> jax.Array:
    """dlogits without single entries, in the compute dtype: `[n, V]`, or of a part's columns, 0 behind the last.

    The result takes the memory of `into`. About `rows []` are worked on.
    """
    inputs = {name: c for name, c in gradient.coefficients._asdict().items() if c is not None}
    config = _config(head, batch, "dlogits", tuple(inputs), part)
    if gradient.coefficients.prob is not None:
        assert gradient.reference is not None
        inputs["reference"] = jnp.where(jnp.isneginf(gradient.reference), jnp.inf, gradient.reference)
    if into is not None:
        inputs[binding.BEFORE] = into
    if "logit_weights" in inputs and head.logit_weights is not None:
        inputs["u"] = head.logit_weights
    columns = head.spec.vocab_size if part is None else part.size
    outputs = {binding.STORED: jax.ShapeDtypeStruct((batch.hidden.shape[0], columns), head.spec.dtype)}
    return _run(head, batch, config, inputs, outputs, rows, part=part, gradient=True)[binding.STORED]


def logits(
    heads: Sequence[Head], batches: Sequence[Batch], part: Columns | None = None, rows: jax.Array | None = None
) -> list[Distances]:
    """Of all columns or a part's, -inf behind the vocabulary, in the same tiles; about `rows []` are worked on.

    Heads with other options have other tiles. All columns are whole tiles of each, and a wide tile's largest logit
    stands for the narrow ones within it.
    """
    numbers, n = ("max", binding.STORED), batches[0].hidden.shape[0]
    tiles = [_config(head, batch, "logits", numbers, part) for head, batch in zip(heads, batches, strict=True)]
    widest, narrowest = max(x.columns for x in tiles), min(x.columns for x in tiles)
    part = part or Columns(0, heads[0].spec.vocab_size)
    part = Columns(part.start, -(-part.size // widest) * widest)

    def stored(head: Head, batch: Batch, config: Config) -> Distances:
        dtype = jnp.float16 if head.spec.dtype.itemsize == 2 else jnp.float32
        outputs = {
            "max": jax.ShapeDtypeStruct((part.size // config.columns, n), jnp.float32),
            binding.STORED: jax.ShapeDtypeStruct((n, part.size), dtype),
        }
        found = _run(head, batch, config, {}, outputs, rows, part=part)
        within = config.columns // narrowest
        return Distances(found[binding.STORED], found["max"] if within == 1 else jnp.repeat(found["max"], within, 0))

    return list(map(stored, heads, batches, tiles))


def product(
    head: Head,
    dlogits: jax.Array,
    total: jax.Array,
    start: jax.Array | int,
    filled: jax.Array | None,
    hidden: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """`total` with a product of `dlogits [n, c]`, of the columns from `start []` on and the first `filled []` rows.

    `dlogits·weight` is added to `total [n, H]`. With `hidden [n, H]` the part of the weight's gradient `total` is
    replaced by `scale·dlogitsᵀ·hidden`.
    """
    (rows, columns), spec, for_hidden = dlogits.shape, head.spec, hidden is None
    config = configs.product_for(spec, binding.capability(), columns)
    assert config is not None
    if hidden is None:
        left, right, sizes = dlogits, head.weight.astype(spec.dtype), (rows, spec.hidden_size, columns)
    else:
        hidden = hidden.astype(spec.dtype)
        left, right = (dlogits, hidden) if spec.vocab_axis == 0 else (hidden, dlogits)
        sizes = left.shape[1], right.shape[1], rows
    arrays = {"left": left, "right": right, binding.BEFORE: total}
    if scale is not None:
        arrays["scale"] = scale.astype(jnp.float32).reshape(1)
    constants: dict[str, Any] = {
        **dict(zip("MNK", sizes, strict=True)),
        "VOCABULARY": spec.vocab_size,
        "STRIDE": spec.weight_rows,
        "AXIS": spec.vocab_axis,
        "FOR_HIDDEN": for_hidden,
        "COUNTED": for_hidden and head.valid_columns is not None,
        "PARTS": total.dtype.itemsize // 2,
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
    }
    existing = spec.vocab_size if head.valid_columns is None else head.valid_columns
    bounds = rows if filled is None else filled, start, existing
    arrays["bounds"] = jnp.stack([jnp.asarray(bound, jnp.int32) for bound in bounds])
    tiles, outputs = config.tiles(*sizes[:2]), {binding.STORED: jax.ShapeDtypeStruct(total.shape, total.dtype)}
    return binding.call("product_kernel", arrays, outputs, constants, config, tiles)[binding.STORED]


def _config(head: Head, batch: Batch, use: Use, numbers: Sequence[str], part: Columns | None = None) -> Config:
    """The tiles for a pass that makes these numbers."""
    options = (head.bias, head.spec.softcap, batch.inverse_temperature, batch.low, head.up)
    held = 2 if use == "stash" else 1  # the exponentials are stored, beside the statistics
    taken = held * sum(_REGISTERS.get(number, 1) for number in numbers) + sum(x is not None for x in options)
    find = functools.partial(configs.config_for, head.spec, binding.capability(), use, step=_step(head, part))
    return find(taken + _OF_MASK * _masked(head, find(taken), part, statistics=use != "dlogits"))


def _masked(head: Head, config: Config, part: Columns | None, *, statistics: bool) -> bool:
    """Whether some columns do not count, of a part or of another of its size, or of the last tile.

    Stored columns behind the vocabulary are not written, so that only statistics need be told where it ends.
    """
    overlaps = part is not None and (part.first is not None or head.spec.vocab_size % part.size != 0)
    return overlaps or head.valid_columns is not None or (statistics and head.spec.vocab_size % config.columns != 0)


def _step(head: Head, part: Columns | None) -> int:
    """A number that divides the part's first column, for the kernel; 0 where that is the vocabulary's first."""
    return 0 if part is None else math.gcd(part.size, head.spec.vocab_size, _STEP)


def padded_rank(rank: int) -> int:
    """Entries of a low-rank term's operands."""
    return -(-rank // _RANK_STEP) * _RANK_STEP


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
    spec, rows, rank, vocabulary = head.spec, batch.hidden.shape[0], padded_rank(head.spec.rank), head.spec.vocab_size
    own = part or Columns(0, vocabulary)
    last = vocabulary if head.valid_columns is None else head.valid_columns
    bounds = (0 if own.first is None else own.first, last, rows if filled is None else filled, own.start)
    given = {
        "hidden": batch.hidden.astype(spec.dtype),
        "weight": head.weight.astype(spec.dtype),
        "bounds": jnp.stack([jnp.asarray(bound, jnp.int32) for bound in bounds]),
        "bias": None if head.bias is None else head.bias[:vocabulary],
        "scale": None if head.logit_scale is None else head.logit_scale.reshape(1),
        "inverse_temperature": batch.inverse_temperature,
    }
    if head.up is not None and batch.low is not None:  # in the layout of hidden states and weight
        given["low"] = pad(batch.low.astype(spec.dtype), (rows, rank))
        up = pad(head.up.astype(spec.dtype), (spec.weight_rows, rank))
        given["up"] = up if spec.vocab_axis == 0 else up.T
    given |= inputs
    arrays = {name: x for name, x in given.items() if x is not None}
    for name in arrays:
        if name not in ("hidden", "weight", "bounds", "low", "up", binding.BEFORE):
            arrays[name] = arrays[name].astype(jnp.float32)
    stores = config.descriptors and config.stores and binding.STORED in outputs
    constants: dict[str, Any] = {
        "ROWS": rows,
        "COLUMNS": own.size,
        "VOCABULARY": vocabulary,
        "ORIGIN": _step(head, part),
        "H": spec.hidden_size,
        "STRIDE": spec.weight_rows,
        "AXIS": spec.vocab_axis,
        "CAP": spec.softcap,
        "UNIFORM": spec.uniform_weight,
        "RANK": rank,
        "RANK_STEP": _RANK_STEP,
        "PRECISION": configs.precision(spec),
        "MASKED": _masked(head, config, part, statistics=not gradient),
        "GRADIENT": gradient,
        "DESCRIPTORS": config.descriptors,
        "STORES": stores and configs.described(own.size, spec.dtype),
        "BLOCK_ROWS": config.rows,
        "BLOCK_COLUMNS": config.columns,
    }
    return binding.call("head_kernel", arrays, outputs, constants, config, config.tiles(rows, own.size))
