"""Mode *materialized*: the caller holds the logits `[N, V]`, and they are a head's hidden states, with `NO_WEIGHT`.

Streaming over the vocabulary saves nothing here; what costs is a second array of the logits' size, and each further
pass over them. So rows are taken in blocks that stay in a cache: of each block the statistics, the row loss's
derivatives and dlogits are made at once, and dlogits take the logits' place. XLA lets them have the very buffer where
the logits are not needed any more: an intermediate of a training step, or an argument that the caller donates. No
float32 copy of narrower logits is ever larger than a block.

On Hopper two kernels do so for all rows at once, without launches by the hundred: the second read misses the cache.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Head
from pallas_ce.modes.call import Call, Operands, Statistics, empty_statistics
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import streamed
from pallas_ce.parallel.shards import Local, RowArrays
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import fields_of, finalise, partial_of_tile
from pallas_ce.streaming.gradient_products import NO_ARRAYS, Arrays
from pallas_ce.streaming.rows import RowBlock, RowBlocks, Rows, zeroed

# Of a block of rows in the accumulator dtype, at most.
_BLOCK_BYTES = 8 * 2**20


class StoredLogits(NamedTuple):
    """Rows of one device whose hidden states are logits `[n, V']`: a head of `NO_WEIGHT`. Kernels take all at once."""

    how: How
    rows: RowArrays
    head: Head

    def blocks(self) -> RowBlocks:
        """All rows, at least one: those that do not count need their zeros written too."""
        size = tokens = self.rows.batch.hidden.shape[0]
        if self.how.backend.materialized is None:
            bound = min(_BLOCK_BYTES, self.how.scratch_bytes or _BLOCK_BYTES)
            size = min(tokens, max(1, bound // (self.head.spec.weight_rows * self.head.spec.accumulator.itemsize)))
        return Rows.counted(None).blocks(tokens, size)

    def of(self, block: RowBlock, logits: jax.Array) -> Self:
        """A block's rows, with what `logits` hold of it."""
        rows = self.rows._replace(batch=self.rows.batch._replace(hidden=logits))
        return self._replace(rows=jax.tree.map(block.take, rows))

    def capped(self, logits: jax.Array) -> jax.Array:
        """In the accumulator dtype."""
        return self.head.cap(logits.astype(self.head.spec.accumulator), None)

    def columns(self) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """A row's columns, which of them are not padding (None: all), and their u."""
        spec, count = self.head.spec, self.head.spec.weight_rows
        columns, u = jnp.arange(count, dtype=jnp.int32), self.head.with_padding(count).tile_logit_weights(0, count)
        return columns, None if count == spec.vocab_size else columns < spec.vocab_size, u

    def statistics(self, names: frozenset[str]) -> Statistics:
        """Primitive statistics of the rows; 0 in those that do not count."""
        logits, labels = self.rows.batch.hidden, self.rows.batch.labels
        if (kernels := self.how.backend.materialized) is not None:
            partial = kernels.statistics(self.head, logits, names)
        else:
            columns, valid, u = self.columns()
            partial = partial_of_tile(self.capped(logits), columns, valid, None, u, names)
        if "target_logit" in fields_of(names):
            assert labels is not None
            ids = jnp.maximum(labels, 0).reshape(labels.shape[0], -1)
            picked = jnp.take_along_axis(logits, ids, axis=1, mode="promise_in_bounds").reshape(labels.shape)
            partial = partial._replace(target_logit=jnp.where(labels < 0, 0.0, self.capped(picked)))
        return zeroed(self.rows.mask, finalise(partial, names))

    def dlogits(self, coefficients: coef.Coefficients, statistics: Statistics) -> jax.Array:
        """`[n, V']`, before or after rounding; exactly 0 in rows that do not count."""
        coefficients = coef.measured_from_largest(coefficients, statistics.get("log_sum"))
        reference = statistics["max_logit"] if coefficients.prob is not None else None
        gradient = Gradient(coefficients, reference, statistics.get("argmax"))
        batch, mask = self.rows.batch, self.rows.mask
        if (kernels := self.how.backend.materialized) is not None:
            return kernels.dlogits(self.head, gradient, batch, mask)
        columns, valid, u = self.columns()
        logits, softcap = self.capped(batch.hidden), self.head.spec.softcap
        of_row = batch.labels, gradient.argmax
        return zeroed(mask, coef.dlogits(coefficients, logits, reference, columns, valid, *of_row, u, softcap))


def local_statistics(names: frozenset[str], how: How, local: Local) -> tuple[Statistics, Arrays]:
    """Primitive statistics of one device's rows, at least one; 0 in those that do not count."""
    stored, logits = StoredLogits(how, local.rows, local.head), local.rows.batch.hidden

    def body(block: RowBlock, found: Statistics) -> Statistics:
        return block.put_each(found, stored.of(block, logits).statistics(names))

    return stored.blocks().for_each(body, empty_statistics(names, local.rows.batch, local.head)), NO_ARRAYS


@jax.named_scope("pallas_ce.materialized.backward")
def row_gradient(how: How, operands: Operands, kept: Statistics, cotangents: Statistics) -> jax.Array:
    """dlogits in the logits' place, from the statistics that the cotangents' derivatives read, and the cotangents."""

    def operation(how: How, local: Local) -> tuple[jax.Array, Arrays]:
        rows, (kept, cotangents) = local.rows, local.rows.more
        coefficients, batch = coef.of_batch(cotangents, kept, rows.batch)
        more = zeroed(rows.mask, coefficients), kept
        stored = StoredLogits(how, rows._replace(batch=batch, more=more), local.head)

        def body(block: RowBlock, buffer: jax.Array) -> jax.Array:
            part = stored.of(block, buffer)
            return block.put(buffer, part.dlogits(*part.rows.more))

        return stored.blocks().for_each(body, rows.batch.hidden), NO_ARRAYS

    rows = operands.rows._replace(more=(kept, cotangents))
    return streamed(how, operation, whole_head=True)(rows, operands.head, NO_ARRAYS)[0]


def statistics_and_gradient(
    call: Call, how: How, local: Local, shared_inputs: Any, cotangent: None
) -> tuple[tuple[Statistics, jax.Array], Arrays]:
    """Statistics and dlogits; where dlogits are divided by a power of two, that "factor" is among the statistics."""
    _, rows, head, _ = local
    stored, names = StoredLogits(how, rows, head), call.names | coef.saved_statistics(call.read)

    def body(block: RowBlock, carry: tuple[Statistics, jax.Array]) -> tuple[Statistics, jax.Array]:
        found, buffer = carry
        part = stored.of(block, buffer)
        # All reads of the block's logits come before dlogits replace them; else XLA would copy the whole buffer.
        statistics = jax.lax.optimization_barrier(part.statistics(names))
        cotangents = call.row_cotangents(statistics, block, (part.rows.more, shared_inputs))
        coefficients = zeroed(part.rows.mask, coef.from_cotangents(cotangents, statistics))
        if "factor" in found:
            coefficients, factor = coef.normalise(coefficients, head.largest_logit_weight)
            statistics["factor"] = jnp.broadcast_to(factor, part.rows.batch.leading)
        dlogits = part.dlogits(coefficients, statistics)
        return block.put_each(found, statistics), block.put(buffer, dlogits)

    found = empty_statistics(call.names, rows.batch, head)
    if head.spec.dtype == jnp.float16:  # dlogits, whose entries are p/N, could underflow before the upstream scalar
        found["factor"] = jnp.zeros(rows.batch.leading, head.spec.accumulator)
    return stored.blocks().for_each(body, (found, rows.batch.hidden)), NO_ARRAYS
