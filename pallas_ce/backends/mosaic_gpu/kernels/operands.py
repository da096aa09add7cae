"""A kernel's operands, from a head and a block of rows: matrices as TMA reads them, and padded vectors.

Mosaic has TMA read global memory in the tiles that shared memory has, and wgmma's are 8 rows of at least 16 elements: a
matrix has a multiple of 8 rows, whose length is a multiple of 16. The weight is read where it lies, so that heads of
other sizes are refused. Hidden states and stored logits are padded where need be.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu import schedule
from pallas_ce.backends.mosaic_gpu.gemm.launch import Operands
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import LogitSpec
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.logits import present
from pallas_ce.streaming.loops import apart
from pallas_ce.streaming.tiles import pad

ROW_MULTIPLE = 8
LENGTH_MULTIPLE = 16

# All padding of a weight counts as vocabulary up to one entry in this many, which spares zeros in its gradient.
_VOCABULARY_PER_PADDING = 64

# Mosaic wants every array to begin at a multiple of these bytes.
ALIGNMENT = 256


def padded_spec(spec: HeadSpec) -> HeadSpec:
    """The head that the kernels work on, with padding for vocabulary: all of a little, else up to the next step."""
    padding = spec.weight_rows - spec.vocab_size
    if padding == 0:
        return spec
    little = padding <= spec.vocab_size // _VOCABULARY_PER_PADDING
    stepped = min(round_up(spec.vocab_size, schedule.COLUMN_STEP), spec.weight_rows)
    return spec.with_padding(spec.weight_rows if little else stepped)


def padded_head(head: Head) -> Head:
    """The head of `padded_spec`. Padding's logits do not count; a low-rank term's padding is 0, as products read it."""
    spec = padded_spec(head.spec)
    if spec == head.spec:
        return head
    up = None if head.up is None else pad(head.up[: head.spec.vocab_size], head.up.shape)
    return dataclasses.replace(head.with_padding(spec.vocab_size), up=up)


def round_up(size: int, multiple: int) -> int:
    """The first multiple that is not less than `size`."""
    return -(-size // multiple) * multiple


def stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of a matrix `[rows, columns]` with the padding that TMA needs."""
    return round_up(rows, ROW_MULTIPLE), round_up(columns, LENGTH_MULTIPLE)


def padded(x: jax.Array) -> jax.Array:
    """A matrix of `stored_shape`, with zeros for padding."""
    return pad(x, stored_shape(*x.shape))


def operands(
    kernel: schedule.Kernel, head: Head, hidden: jax.Array, vectors: Iterable[str], width: int | None = None
) -> tuple[LogitSpec, Operands]:
    """For a kernel that makes logits of `hidden [N, H]`: how, and its operands.

    It keeps `vectors` by row, named as fields of a `Partial` or coefficients. A launch works on `width` entries of the
    vocabulary at most. Inputs are "bias" and "u" by column, "scale" and "valid" `[1]`.
    """
    # A maximum is there anyway. A weighted sum counts as two, with the sum of the weights. Deviations count as three: a
    # piece's mean must be known first, and its distances are held until then.
    kept = set(vectors) - {"max"}
    count = len(kept) + 2 * ("sum_exp_deviation_sq" in kept)
    spec, columns, rows = head.spec, head.spec.vocab_size, hidden.shape[0]
    options = (head.bias, head.logit_scale, head.logit_weights, spec.softcap)
    config = schedule.rule(kernel, spec, rows, count, sum(option is not None for option in options))
    tiled = round_up(columns, config.columns)
    ragged = tiled > columns or head.valid_columns is not None
    logits = LogitSpec(columns, ragged, spec.softcap, spec.uniform_weight)
    if width not in (None, columns):  # a launch's last tile may reach beyond the vocabulary's
        tiled += config.columns
    inputs: dict[str, jax.Array] = {}
    if head.bias is not None:
        inputs["bias"] = pad(head.bias[:columns].astype(jnp.float32), (tiled,))
    if head.logit_scale is not None:
        inputs["scale"] = head.logit_scale.astype(jnp.float32).reshape(1)
    if head.valid_columns is not None:
        inputs["valid"] = head.valid_columns.astype(jnp.int32).reshape(1)
    if kept & {"sum_weights", "logit_weights"} and head.logit_weights is not None:
        inputs["u"] = pad(head.logit_weights[:columns].astype(jnp.float32), (tiled,))
    weight = apart(head.weight.astype(spec.dtype))
    blocks = config.row_blocks(rows), config.column_blocks(width or columns)
    product = schedule.Product(config, *blocks, spec.hidden_size, right_axis=spec.vocab_axis, rank=spec.rank)
    matrices: tuple[jax.Array, ...] = padded(apart(hidden.astype(spec.dtype))), weight
    if head.up is not None:  # a low-rank term's operands, laid out like hidden states and weight, in whole steps
        low, rank = present(head.with_low(Batch(hidden)).low), round_up(spec.rank, schedule.STEP)
        up = pad(head.up.astype(spec.dtype), (spec.weight_rows, rank))
        low = pad(low, (round_up(rows, ROW_MULTIPLE), rank))
        matrices += apart(low), apart(up if spec.vocab_axis == 0 else up.T)
    return logits, Operands(product, matrices, inputs)
