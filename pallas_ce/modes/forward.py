"""The plain forward over all rows, shared by both modes: row blocks in, statistics out, nothing else kept."""

import functools

import jax
import jax.numpy as jnp

from pallas_ce.backends.protocol import Plan
from pallas_ce.head import NO_WEIGHT, Head
from pallas_ce.modes import materialized
from pallas_ce.modes.call import Statistics, empty_statistics
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import Operation, streamed
from pallas_ce.parallel.shards import Local
from pallas_ce.statistics.row import finalise
from pallas_ce.streaming.loops import chosen_by_device
from pallas_ce.streaming.rows import RowBlock, Rows, few_ignored, zeroed
from pallas_ce.streaming.tiles import Tiles

# Hidden states gathered at a time where some rows may not count: few, for the sake of memory. Rows are in steps that
# kernels take without padding, which would be a second copy.
_GATHERED_BYTES = 12 * 2**20
_GATHERED_STEP = 256


def forward_statistics(how: How, names: frozenset[str], head: Head, *, before_gradient: bool = False) -> Operation:
    """Makes rows and such a head the primitive statistics `[...]` of the rows that count, 0 in the others.

    Memory that hidden's gradient will take is free for a copy of hidden where this comes `before_gradient`.
    """
    stored = head.weight is NO_WEIGHT
    local = materialized.local_statistics if stored else functools.partial(_local_statistics, before_gradient)
    return jax.named_scope("pallas_ce.forward")(streamed(how, functools.partial(local, names), whole_head=stored))


def _local_statistics(before_gradient: bool, names: frozenset[str], how: How, local: Local) -> tuple[Statistics, None]:
    shards, rows, head, _ = local
    hidden, backend = rows.batch.hidden, how.backend
    tokens, whole = hidden.shape[0], how.block_sizes(head.spec, hidden.shape[0], None)

    def visit(mask: jax.Array | None, plan: Plan) -> Statistics:
        """Of the rows that `mask` counts; where it is None of all, 0 in those that do not count."""

        def body(block: RowBlock, found: Statistics) -> Statistics:
            block_batch = jax.tree.map(block.take, rows.batch)
            partial = backend.statistics(head, block_batch, names, plan, block.filled)
            return block.put_each(found, finalise(shards.merge(partial, head), names))

        blocks = Rows.counted(mask).blocks(tokens, plan.rows, skipped=plan.skips_rows)
        found = blocks.for_each(body, empty_statistics(names, rows.batch, head), unrolled=plan.skips_rows)
        return found if mask is not None else zeroed(rows.mask, found)

    if rows.mask is None or (before_gradient and whole.skips_rows and whole.rows >= tokens):
        # No branch: each branch would compile a kernel of its own.
        return shards.own_rows(visit(rows.mask, whole)), None
    # To pack all rows at once would take a copy of hidden's size.
    steps = _GATHERED_BYTES // (_GATHERED_STEP * head.spec.hidden_size * hidden.dtype.itemsize)
    parts = how.block_sizes(head.spec, min(tokens, _GATHERED_STEP * max(1, steps)), None)
    parts = parts._replace(columns=min(parts.columns, whole.columns))  # what the smaller blocks free stays free
    if parts.rows >= whole.rows or (parts.skips_rows and not Tiles(tokens, parts.rows).few):
        return shards.own_rows(visit(rows.mask, min(whole, parts, key=lambda plan: plan.rows))), None
    # Rows do not depend on each other: those that do not count are worked on and left out.
    few = few_ignored(jnp.sum(rows.mask, dtype=jnp.int32), tokens)
    if parts.skips_rows:  # a loop in a branch would make XLA ask the host anyway
        few = chosen_by_device(few)
    every, counted = functools.partial(visit, None, whole), functools.partial(visit, rows.mask, parts)
    return shards.own_rows(jax.lax.cond(few, every, counted)), None
