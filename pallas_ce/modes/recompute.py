"""Mode *recompute* (the paper's Algorithm 2): the forward keeps O(tokens), the backward recomputes tiles of logits.

Four products in all (8·N·H·V operations). It takes any cotangents of the row statistics, as often as asked.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from pallas_ce.backends.protocol import Gradient
from pallas_ce.head import Head
from pallas_ce.modes import sweep
from pallas_ce.modes.call import Call, Operands
from pallas_ce.modes.forward import Statistics, forward_statistics
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import streamed
from pallas_ce.parallel.shards import Local, RowArrays, psum
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import only
from pallas_ce.streaming.gradient_products import NO_ARRAYS, Arrays, PerInput, TileStep, needed_products
from pallas_ce.streaming.rows import RowBlock


class _Kept(NamedTuple):
    """The forward's results that the backward reads.

    Attributes:
        statistics: as coefficients need them.
        head: gathered inside a `shard_map`, once for both passes; else None.
    """

    statistics: Statistics
    head: Head | None


def forward(call: Call, operands: Operands, needs_grad: PerInput[bool] | None) -> tuple[Statistics, _Kept | None]:
    """The statistics; keeps the ones that their derivatives read."""
    settings, known, whole = call.settings, operands.known, None
    saved: frozenset[str] = frozenset() if needs_grad is None else coef.saved_statistics(call.names)
    # Under `jit` the partitioner sees to it.
    if needs_grad is not None and settings.shards is not None and settings.shards.gathered:
        whole = settings.shards.gather(operands.head)
        settings, operands = _handed_whole(settings), operands._replace(head=whole)
    if known is None:
        before_gradient = needs_grad is not None and (needs_grad.hidden or needs_grad.logit_scale)
        found = forward_statistics(settings, call.names | saved, operands, before_gradient=before_gradient)
    else:
        found = known.statistics
    return only(found, call.names), _Kept(only(found, saved), whole)


def backward(call: Call, operands: Operands, needs_grad: PerInput[bool], kept: _Kept, cotangents: Statistics) -> Arrays:
    """Gradients from the statistics' cotangents."""
    settings, head = call.settings, operands.head
    cotangents = {name: g for name, g in cotangents.items() if g is not None}
    if settings.shards is not None:
        cotangents = {name: psum(g, settings.shards.cotangents_by_row) for name, g in cotangents.items()}
    with jax.named_scope("pallas_ce.recompute"):
        given = NO_ARRAYS._replace(weight=operands.weight_sum)
        dtype = head.weight.dtype if given.weight is None else head.spec.accumulator
        gradients = functools.partial(_gradients, needs_grad, dtype)
        if kept.head is not None:
            settings, head = _handed_whole(settings), kept.head
        rows = RowArrays(operands.batch, operands.mask, (kept.statistics, cotangents))
        return sweep.finished(operands, *streamed(settings, gradients)(rows, head, given))


def _handed_whole(settings: How) -> How:
    assert settings.shards is not None
    return dataclasses.replace(settings, shards=dataclasses.replace(settings.shards, handed_whole=True))


def _gradients(
    needs_grad: PerInput[bool], weight_dtype: np.dtype, settings: How, local: Local
) -> tuple[jax.Array | None, Arrays]:
    shards, rows, head, _ = local
    kept, cotangents = rows.more
    coefficients = coef.select(coef.from_cotangents(cotangents, kept, rows.batch), rows.mask)
    coefficients, factor = coef.normalise(coefficients, head.largest_logit_weight)
    coefficients = coef.measured_from_largest(coefficients, kept.get("log_sum"))
    reference = kept["max_logit"] if coefficients.need_probabilities else None
    argmax = shards.columns(kept["argmax"], head) if coefficients.argmax is not None else None
    backend, tokens = settings.backend, rows.batch.hidden.shape[0]
    plan, needs = settings.block_sizes(head.spec, tokens, "recompute"), needed_products(needs_grad, head.spec.rank)

    def products(block: RowBlock) -> TileStep:
        block_coefficients = coef.select(jax.tree.map(block.take, coefficients), block.valid)
        block_batch, block_reference, block_argmax = jax.tree.map(block.take, (rows.batch, reference, argmax))
        gradient = Gradient(block_coefficients, block_reference, block_argmax, needs, factor)
        return backend.recompute(head, block_batch, gradient, plan, block)

    return sweep.gradient_sums(local, weight_dtype, plan, needs_grad, factor, products)
