"""The plain forward over all rows, shared by both modes: row blocks in, statistics out, nothing else kept."""

import functools

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Plan
from pallas_ce.dispatch.settings import Settings
from pallas_ce.head import Batch, Head
from pallas_ce.parallel.entry import by_platform, streamed
from pallas_ce.parallel.shards import RowArrays, Shards
from pallas_ce.statistics.row import finalise, struct
from pallas_ce.streaming.loops import choose
from pallas_ce.streaming.rows import RowBlock, Rows
from pallas_ce.streaming.tiles import Tiles

Statistics = dict[str, jax.Array]

# Hidden states gathered at a time where some rows may not count.
_GATHERED_BYTES = 12 * 2**20
_LEAST_GATHERED_ROWS = 256


def empty_statistics(names: frozenset[str], batch: Batch, head: Head) -> Statistics:
    """Zeros for each statistic: what ignored rows keep."""
    structs = {name: struct(name, batch.leading, batch.targets, head.spec.accumulator) for name in sorted(names)}
    return {name: jnp.zeros(s.shape, s.dtype) for name, s in structs.items()}


def put_all(block: RowBlock, buffers: Statistics, values: Statistics) -> Statistics:
    """`block.put` for each of `buffers`."""
    return {name: block.put(buffer, values[name]) for name, buffer in buffers.items()}


def forward_statistics(
    settings: Settings, names: frozenset[str], batch: Batch, head: Head, mask: jax.Array | None
) -> Statistics:
    """Primitive statistics `[...]` of the rows that count, 0 in the others."""

    def operation(shards: Shards, rows: RowArrays, head: Head) -> tuple[Statistics, None]:
        rows, head = shards.enter(rows, head)
        found = by_platform(settings.ways(head), functools.partial(_local_statistics, names, shards), rows, head)
        return shards.own_rows(found), None

    with jax.named_scope("pallas_ce.forward"):
        return streamed(settings.shards, operation)(RowArrays(batch, mask), head)[0]


def _local_statistics(
    names: frozenset[str], shards: Shards, settings: Settings, rows: RowArrays, head: Head
) -> Statistics:
    """Those of the rows that one device works on."""
    tokens, head = rows.batch.hidden.shape[0], settings.worked_on(head)
    whole, backend = settings.plan(head.spec, tokens, None), settings.backend

    def visit(counted: Rows, plan: Plan) -> Statistics:
        def body(block: RowBlock, found: Statistics) -> Statistics:
            block_batch = jax.tree.map(block.take, rows.batch)
            partial = backend.statistics(head, block_batch, names, plan, block.valid_rows)
            return put_all(block, found, finalise(shards.merge(partial, head), names))

        blocks = counted.blocks(tokens, plan.rows, skipped=backend.counts_on_device or plan.rows >= tokens)
        init = empty_statistics(names, rows.batch, head)
        return blocks.for_each(body, init, without_loop=backend.counts_on_device)

    if rows.mask is None:
        return visit(Rows.counted(None), whole)
    # A backend that takes all rows at once would have all of hidden gathered. Mostly every row counts, and nothing
    # needs gathering; where not, blocks are gathered one by one.
    row_bytes = head.spec.hidden_size * rows.batch.hidden.dtype.itemsize
    parts = settings.plan(head.spec, min(tokens, max(_LEAST_GATHERED_ROWS, _GATHERED_BYTES // row_bytes)), None)
    smaller = min(whole, parts, key=lambda plan: plan.rows)

    def some() -> Statistics:
        return visit(Rows.counted(rows.mask, few_launches=backend.few_launches), smaller)

    host_is_told = backend.counts_on_device and not Tiles(tokens, smaller.rows).few
    if smaller is whole or (host_is_told and not settings.waits):
        return some()
    return choose(jnp.all(rows.mask), lambda: visit(Rows.counted(None), whole), some)
