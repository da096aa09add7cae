"""Logits that lie in memory: row statistics in one read of them, and dlogits in their place in a read and a write.

The epilogues are those of the kernels that make logits by a product; only the tiles come from elsewhere.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.mosaic_gpu.gemm import layouts, tile_stream
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Carry, Place
from pallas_ce.backends.mosaic_gpu.kernels import operands, partials
from pallas_ce.backends.mosaic_gpu.kernels.dlogits_kernel import DlogitsEpilogue
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import LogitSpec
from pallas_ce.backends.mosaic_gpu.kernels.forward_kernel import StatisticsEpilogue
from pallas_ce.backends.mosaic_gpu.schedule.config import COMPUTE_WARPGROUPS, Config, Schedule, device_refusal, schedule
from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import LogitsSpec
from pallas_ce.statistics.row import Partial

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
    """The `Partial` of `logits [N, columns]` over the vocabulary; no targets.

    Args:
        spec: the logits' static facts.
        logits: as stored.
        logit_weights: `[columns]`, the u of `mean_logit`; None for 1/V.
        names: primitive statistics.
        config: tiles, for tests; None to choose.

    Raises:
        ValueError: the kernel cannot read such logits where they are.
    """
    fields = partials.fields_for(names, own_maximum=True)
    config = config or tile_stream.tiles(spec.dtype.itemsize)
    plan, of_logits = _prepare(spec, logits, config, 4 * len(fields))
    inputs = _weights(spec, plan, config, logit_weights if "mean_logit" in names else None)
    outputs = partials.outputs(fields, plan.windows, plan.row_blocks * config.block_rows)
    epilogue = StatisticsEpilogue(of_logits, fields, config.width)
    found = tile_stream.run(
        "pallas_ce_materialized_statistics", _aligned(logits), config, plan, epilogue, inputs, outputs
    )
    return partials.read(found, fields, logits.shape[0])


def dlogits(
    spec: LogitsSpec,
    gradient: Gradient,
    logits: jax.Array,
    logit_weights: jax.Array | None,
    labels: jax.Array | None,
    valid_rows: jax.Array | None,
    config: Config | None = None,
) -> jax.Array:
    """dlogits `[N, columns]` in the logits' dtype and, where XLA need not keep them, in their buffer.

    Args:
        spec: the logits' static facts.
        gradient: coefficients, at least one of them, and lse and argmax where terms need them.
        logits: as stored.
        logit_weights: `[columns]`, u.
        labels: `[N]` int32, -1 for none.
        valid_rows: `[N]` bool; the others' gradient is exactly 0, whatever they hold. None: all.
        config: tiles, for tests; None to choose.

    Raises:
        ValueError: the kernel cannot read such logits where they are.
    """
    config = config or tile_stream.tiles(spec.dtype.itemsize, _STAGED_BYTES, _PIECE)
    plan, of_logits = _prepare(spec, logits, config, 0)
    present = {name: x.astype(jnp.float32) for name, x in gradient.coefficients._asdict().items() if x is not None}
    inputs = dict(present)
    if "target" in present:
        assert labels is not None
        inputs["labels"] = labels
    if gradient.lse is not None:
        # A row of -inf only has no distribution; measured from +inf its probabilities are 0 and so is its gradient.
        inputs["lse"] = jnp.where(jnp.isneginf(gradient.lse), jnp.inf, gradient.lse)
    if gradient.argmax is not None:
        inputs["argmax_column"] = gradient.argmax
    if valid_rows is not None:
        inputs["valid"] = valid_rows.astype(jnp.float32)
    inputs = {name: operands.pad(x, (plan.row_blocks * config.block_rows,)) for name, x in inputs.items()}
    inputs |= _weights(spec, plan, config, logit_weights if "logit_weights" in present else None)
    formula = DlogitsEpilogue(of_logits, frozenset(present), spec.columns, spec.dtype, config.rows, config.width)

    def write(stored: Any) -> None:
        tile_stream.run("pallas_ce_materialized_dlogits", stored, config, plan, InPlaceEpilogue(formula), inputs, {})

    return pl.run_state(write)(_aligned(logits))


def _aligned(logits: jax.Array) -> jax.Array:
    """`operands.apart`, but for what is sliced by rows that all begin at such multiples, since logits are large."""
    return logits if logits.shape[1] * logits.dtype.itemsize % operands.ALIGNMENT == 0 else operands.apart(logits)


@dataclasses.dataclass(frozen=True)
class InPlaceEpilogue:
    """The formula's dlogits in place of the logits, 0 in rows that do not count."""

    formula: DlogitsEpilogue

    def scratch(self, config: Config) -> dict[str, Any]:
        """That of the formula."""
        return self.formula.scratch(config)

    def start(self, refs: dict[str, Any], place: Place) -> Carry:
        """Vectors by row that the whole window needs."""
        valid = layouts.rows_of(refs["valid"], place.row, self.formula.rows) if "valid" in refs else None
        return valid, self.formula.start(refs, place)

    def tile(self, refs: dict[str, Any], place: Place, product: jax.Array, carry: Carry) -> Carry:
        """Rows that do not count have coefficients of 0; logits of 0 there keep their nan or inf from mattering."""
        valid, by_row = carry
        if valid is not None:
            product = jnp.where(layouts.along_columns(valid, product.shape) > 0, product, 0.0)
        return valid, self.formula.tile({**refs, "dlogits": refs["matrix"]}, place, product, by_row)

    def finish(self, refs: dict[str, Any], place: Place, carry: Carry) -> None:
        """Waits until the last tile has left shared memory."""
        self.formula.finish(refs, place, carry[1])


def _prepare(spec: LogitsSpec, logits: jax.Array, config: Config, bytes_per_row: int) -> tuple[Schedule, LogitSpec]:
    """How tiles are handed out, and how stored numbers become logits."""
    if reason := refusal(spec, logits.shape[0]):
        raise ValueError(f"implementation='mosaic_gpu' cannot serve this call: {reason}")
    # All columns, padding included, whose gradient is to be written as well.
    plan = schedule(config, logits.shape[0], spec.columns, bytes_per_row)
    return plan, LogitSpec(
        columns=spec.vocab_size,
        ragged=plan.column_blocks * config.columns > spec.vocab_size,
        counted=False,
        bias=False,
        scale=False,
        softcap=spec.softcap,
        uniform_weight=1.0 / spec.vocab_size,
    )


def _weights(spec: LogitsSpec, plan: Schedule, config: Config, u: jax.Array | None) -> dict[str, jax.Array]:
    """The u of `mean_logit` as an epilogue reads it."""
    padded = plan.column_blocks * config.columns
    return {} if u is None else {"u": operands.pad(u[: spec.vocab_size].astype(jnp.float32), (padded,))}


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
