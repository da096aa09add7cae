"""Logits that lie in memory: row statistics in one read of them, and dlogits in their place in a read and a write.

The epilogues are those of the kernels that make logits by a product; only the tiles come from elsewhere.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.mosaic_gpu.gemm import launch, layouts, tile_stream
from pallas_ce.backends.mosaic_gpu.gemm.tile_stream import Facts, stream
from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, operands, partials
from pallas_ce.backends.mosaic_gpu.kernels.dlogits_kernel import DlogitsEpilogue
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import LogitSpec
from pallas_ce.backends.mosaic_gpu.kernels.forward_kernel import StatisticsEpilogue
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Config, device_refusal, schedule
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import LogitsSpec
from pallas_ce.statistics.row import Partial, fields_for, reads_logit_weights

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

# Two blocks of dlogits for each warpgroup on their way to memory; see `layouts.tile_staging`.
_STAGED_BYTES = COMPUTE_WARPGROUPS * 2 * layouts.BLOCK * layouts.BLOCK_BYTES

# Columns of which dlogits are computed at a time: with all options, a whole tile's intermediate values would spill.
_PIECE = 64


def statistics(
    spec: LogitsSpec,
    logits: jax.Array,
    logit_weights: jax.Array | None,
    names: frozenset[str],
    config: Config | None = None,
) -> Partial:
    """See `protocol.Materialized`; `logit_weights [columns]`, and `config` for tests.

    Raises:
        ValueError: the kernel cannot read such logits where they are.
    """
    fields = fields_for(names)
    config = config or tile_stream.tiles(spec.dtype.itemsize)
    u = logit_weights if reads_logit_weights(names) else None
    facts, of_logits, inputs = _prepare(spec, logits, config, u, bytes_per_row=4 * len(fields))
    outputs = partials.outputs(fields, facts.schedule.windows, facts.padded_rows)
    epilogue, name = StatisticsEpilogue(of_logits, fields, config.width), "pallas_ce_materialized_statistics"
    found = launch.run(stream, name, facts, (_aligned(logits),), epilogue, inputs, outputs)
    return partials.read(found, fields, logits.shape[0])


def dlogits(
    spec: LogitsSpec,
    gradient: Gradient,
    logits: jax.Array,
    logit_weights: jax.Array | None,
    labels: jax.Array | None,
    valid: jax.Array | None,
    config: Config | None = None,
) -> jax.Array:
    """See `protocol.Materialized`: where XLA need not keep the logits, in their buffer. `config` is for tests.

    Raises:
        ValueError: the kernel cannot read such logits where they are.
    """
    config = config or tile_stream.tiles(spec.dtype.itemsize, _STAGED_BYTES, _PIECE)
    by_row = dlogits_kernel.vectors_by_row(gradient.coefficients, gradient.reference)
    present = frozenset(by_row) - {"reference"}
    if "target" in present:
        assert labels is not None
        by_row["labels"] = labels
    if gradient.argmax is not None:
        by_row["argmax_column"] = gradient.argmax
    if valid is not None:
        by_row["counts"] = valid.astype(jnp.float32)
    u = logit_weights if "logit_weights" in present else None
    facts, of_logits, inputs = _prepare(spec, logits, config, u, bytes_per_row=0)
    inputs = {name: operands.pad(x, (facts.padded_rows,)) for name, x in by_row.items()} | inputs
    epilogue = DlogitsEpilogue(of_logits, present, spec.columns, spec.dtype, config.rows, config.width)

    def write(stored: Any) -> None:
        launch.run(stream, "pallas_ce_materialized_dlogits", facts, (stored,), epilogue, inputs, {})

    return pl.run_state(write)(_aligned(logits))


def _aligned(logits: jax.Array) -> jax.Array:
    """`operands.apart`, but for what is sliced by rows that all begin at such multiples, since logits are large."""
    return logits if logits.shape[1] * logits.dtype.itemsize % operands.ALIGNMENT == 0 else operands.apart(logits)


def _prepare(
    spec: LogitsSpec, logits: jax.Array, config: Config, u: jax.Array | None, bytes_per_row: int
) -> tuple[Facts, LogitSpec, dict[str, jax.Array]]:
    """How tiles are handed out, how stored numbers become logits, and u as an epilogue reads it."""
    if reason := refusal(spec, logits.shape[0]):
        raise ValueError(f"implementation='mosaic_gpu' cannot serve this call: {reason}")
    # All columns, padding included, whose gradient is to be written as well.
    found = schedule(config, logits.shape[0], spec.columns, bytes_per_row)
    columns = found.column_blocks * config.columns
    of_logits = LogitSpec(
        columns=spec.vocab_size,
        ragged=columns > spec.vocab_size,
        counted=False,
        bias=False,
        scale=False,
        softcap=spec.softcap,
        uniform_weight=1.0 / spec.vocab_size,
    )
    inputs = {} if u is None else {"u": operands.pad(u[: spec.vocab_size].astype(jnp.float32), (columns,))}
    return Facts(config, found), of_logits, inputs


def refusal(spec: LogitsSpec, rows: int | None = None) -> str | None:
    """Why the kernels cannot read such logits, `rows` of them if known, where they are; None where they can."""
    if spec.dtype not in _DTYPES:
        return f"its kernels read bfloat16, float16 and float32 logits, not {spec.dtype.name}; use 'xla'"
    if (rows or 0) % operands.ROW_MULTIPLE or spec.columns % operands.LENGTH_MULTIPLE:
        shape = f"[{'N' if rows is None else rows}, {spec.columns}]"
        return (
            f"its kernels read rows in multiples of {operands.ROW_MULTIPLE} and columns in multiples of "
            f"{operands.LENGTH_MULTIPLE}, and these logits are {shape}; pad them, or use 'xla'"
        )
    if spec.columns * spec.dtype.itemsize == layouts.BLOCK_BYTES:  # see `operands.stored_shape`
        return f"its kernels cannot write rows of exactly {layouts.BLOCK_BYTES} bytes; use 'xla'"
    return device_refusal() if rows is None else None  # asked when the call was made, where its arrays are known
