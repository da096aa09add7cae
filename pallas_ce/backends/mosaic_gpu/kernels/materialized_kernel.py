"""Stored logits: row statistics in one read of them, and dlogits in their place in a read and a write.

The kernels share their epilogues with the kernels that multiply; only the tiles come from elsewhere.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu.gemm.launch import Operands
from pallas_ce.backends.mosaic_gpu.kernels import operands
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import DlogitsEpilogue, LogitSpec, vectors_by_row
from pallas_ce.backends.mosaic_gpu.kernels.forward_kernel import StatisticsEpilogue, in_launches
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, BLOCK_BYTES, FREE_BYTES, WARPGROUPS, Config, Product
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.logits import present
from pallas_ce.statistics.row import Partial, fields_of
from pallas_ce.streaming.loops import apart
from pallas_ce.streaming.tiles import pad

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

# Bytes of a tile's row, for which a row of a wgmma accumulator has registers at 16 and at 32 bits.
_TILE_BYTES = 512

# Columns that leave one `Partial` of a row.
_PARTIAL_COLUMNS = 1024

# Columns of dlogits computed at a time: with all options, a whole tile's intermediate values would spill.
_PIECE = 64


def tiles(itemsize: int, piece: int | None = None) -> Config:
    """Tiles of stored numbers, in as many stages as shared memory holds; a `piece` leaves room to stage dlogits."""
    config = Config(columns=_TILE_BYTES // itemsize, row_group=1, piece=piece)  # concurrent tiles lie in few rows
    staged = 0 if piece is None else WARPGROUPS * config.staged * BLOCK * BLOCK_BYTES
    return dataclasses.replace(config, stages=(FREE_BYTES - staged) // (config.tile_rows * _TILE_BYTES))


def statistics(head: Head, logits: jax.Array, names: frozenset[str]) -> Partial:
    """The `Partial` of `logits [n, V']`, without targets, of one kernel."""
    if not (fields := fields_of(names, targets=False)):
        return Partial()
    if logits.shape[1] * logits.dtype.itemsize % operands.ALIGNMENT:  # not always: a copy would be large
        logits = apart(logits)
    of_logits, given = _prepare(head, logits, "sum_weights" in fields_of(names))
    epilogue = StatisticsEpilogue(of_logits, fields, shared=True)
    return in_launches("pallas_ce_materialized_statistics", given, epilogue, len(logits))


def dlogits(head: Head, gradient: Gradient, batch: Batch, valid: jax.Array | None) -> jax.Array:
    """dlogits `[n, V']` of the batch's logits, which they overwrite where XLA need not keep them."""
    logits, by_row = batch.hidden, vectors_by_row(gradient)
    if "target" in by_row:
        by_row["labels"] = present(batch.labels)
    if gradient.argmax is not None:
        by_row["argmax_column"] = gradient.argmax
    if valid is not None:
        by_row["counts"] = valid.astype(jnp.float32)
    of_logits, given = _prepare(head, logits, "logit_weights" in by_row, _PIECE)
    inputs = {**{name: given.by_row(x) for name, x in by_row.items()}, **given.inputs}

    def write(stored: Any) -> None:
        reading = Operands(given.product, (stored,), inputs)
        reading.run("pallas_ce_materialized_dlogits", DlogitsEpilogue(of_logits), {})

    return apart(pl.run_state(write)(apart(logits)))


def _prepare(head: Head, logits: jax.Array, weighted: bool, piece: int | None = None) -> tuple[LogitSpec, Operands]:
    """How stored numbers become logits, which tiles there are, and u as an epilogue reads it."""
    spec, u, config = head.spec, head.logit_weights, tiles(head.spec.dtype.itemsize, piece)
    stored = max(1, _PARTIAL_COLUMNS // config.columns) if piece is None else 1
    if reason := refusal(spec, logits.shape[0]):
        raise ValueError(f"implementation='mosaic_gpu' cannot serve this call: {reason}")
    # Padding's columns are included: their gradient is written as well.
    columns = operands.round_up(spec.weight_rows, config.columns * stored)
    blocks = config.row_blocks(logits.shape[0]), columns // (config.columns * stored)
    product = Product(config, *blocks, stored=stored)
    of_logits = LogitSpec(spec.vocab_size, columns > spec.vocab_size, spec.softcap, spec.uniform_weight)
    inputs = {"u": pad(u.astype(jnp.float32), (columns,))} if weighted and u is not None else {}
    return of_logits, Operands(product, (logits,), inputs)


def refusal(spec: HeadSpec, rows: int | None = None) -> str | None:
    """Why the kernels cannot read such logits, `rows` of them if known, where they are; None where they can."""
    if spec.dtype not in _DTYPES:
        return f"its kernels read bfloat16, float16 and float32 logits, not {spec.dtype.name}; use 'xla'"
    if (rows or 0) % operands.ROW_MULTIPLE or spec.weight_rows % operands.LENGTH_MULTIPLE:
        shape = f"[{'N' if rows is None else rows}, {spec.weight_rows}]"
        return (
            f"its kernels read rows in multiples of {operands.ROW_MULTIPLE} and columns in multiples of "
            f"{operands.LENGTH_MULTIPLE}, and these logits are {shape}; pad them, or use 'xla'"
        )
    # Asked when the call was made, where its arrays are known.
    return targets.refusal("mosaic_gpu") if rows is None else None
