"""Mode *recompute* (the paper's Algorithm 2): the forward keeps O(tokens), the backward recomputes tiles of logits.

Four products in all (8·N·H·V operations). It takes any cotangents of the row statistics, as often as asked.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_ce.backends.protocol import Gradient, HeadSums
from pallas_ce.dispatch.settings import Settings
from pallas_ce.head import Batch, Head, NeedsGrad, TileStep
from pallas_ce.modes import sweep
from pallas_ce.modes.differentiation import (
    Gradients,
    Inputs,
    Known,
    Saved,
    first_order_only,
    flags_of,
    input_cotangents,
    inputs_needing_grad,
    is_zero,
    values_of,
)
from pallas_ce.modes.forward import Statistics, forward_statistics
from pallas_ce.parallel.entry import at_lowering, streamed
from pallas_ce.parallel.shards import RowArrays, Shards, psum
from pallas_ce.statistics import gradient as coef
from pallas_ce.streaming.rows import RowBlock


class _Kept(NamedTuple):
    """What the backward finds of the forward.

    Attributes:
        statistics: those that coefficients are made of.
        weight: the weight gathered inside a `shard_map`, once for both passes; else None.
        bias: likewise the bias.
    """

    statistics: Statistics
    weight: jax.Array | None = None
    bias: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def row_statistics(
    settings: Settings, names: frozenset[str], batch: Batch, head: Head, mask: jax.Array | None, known: Known | None
) -> Statistics:
    """Primitive statistics of the rows of `batch`, differentiable in `hidden` and the head's arrays but u."""
    if known is not None:
        return {name: known.statistics[name] for name in names}
    return forward_statistics(settings, names, batch, head, mask)


def _forward(settings: Settings, names: frozenset[str], *primals: Any) -> tuple[Statistics, Saved]:
    values: Inputs = values_of(primals[:3])
    known: Known | None = values_of(primals[3])
    saved_names = coef.saved_statistics(names)
    batch, head, mask = first_order_only(values)
    kept_head: tuple[Any, ...] = ()
    if _gathers(settings):
        assert settings.shards is not None
        head = settings.shards.gather(head)
        settings, kept_head = _told_it_is_whole(settings), (head.weight, head.bias)
    if known is not None:
        found = first_order_only(known.statistics)
    else:
        found = forward_statistics(settings, names | saved_names, batch, head, mask)
    kept = _Kept({name: found[name] for name in saved_names}, *kept_head)
    saved = Saved(*values, kept, flags_of(inputs_needing_grad(primals[0].hidden, primals[1])))
    return {name: found[name] for name in names}, saved


def _backward(settings: Settings, names: frozenset[str], saved: Saved, cotangents: dict[str, Any]) -> tuple[Any, ...]:
    del names
    given = {name: g for name, g in cotangents.items() if name != "argmax" and not is_zero(g)}
    gradients = Gradients()
    if given and saved.needs_grad:
        used, given = first_order_only((saved, given))
        if settings.shards is not None:
            given = {name: psum(g, settings.shards.cotangents_by_row) for name, g in given.items()}
        with jax.named_scope("pallas_ce.recompute"):
            head, weight_dtype = used.head, used.head.weight.dtype
            if _gathers(settings):
                settings = _told_it_is_whole(settings)
                head = dataclasses.replace(head, weight=used.kept.weight, bias=used.kept.bias)
            operation = streamed(
                settings.shards, functools.partial(_gradients, settings, saved.needs_grad, weight_dtype)
            )
            kept = dict(used.kept.statistics)
            rows = RowArrays(used.batch, used.mask, kept.pop("argmax", None), (kept, given))
            d_hidden, of_head = operation(rows, head)
        gradients = sweep.finished(used.batch.hidden, used.head, d_hidden, of_head)
    return *input_cotangents(saved, gradients), None


row_statistics.defvjp(_forward, _backward, symbolic_zeros=True)


def _gathers(settings: Settings) -> bool:
    """Whether a weight is gathered inside a `shard_map`; under `jit` the partitioner sees to it."""
    return settings.shards is not None and bool(settings.shards.gathered)


def _told_it_is_whole(settings: Settings) -> Settings:
    assert settings.shards is not None
    return dataclasses.replace(settings, shards=dataclasses.replace(settings.shards, handed_whole=True))


def _gradients(
    settings: Settings, needs_grad: NeedsGrad, weight_dtype: np.dtype, shards: Shards, rows: RowArrays, head: Head
) -> tuple[jax.Array | None, HeadSums]:
    operation = functools.partial(_local_gradients, needs_grad, shards, weight_dtype)
    rows, head = shards.enter(rows, head)
    return at_lowering(settings.variants(head), operation, rows, head)


def _local_gradients(
    needs_grad: NeedsGrad, shards: Shards, weight_dtype: np.dtype, settings: Settings, rows: RowArrays, head: Head
) -> tuple[jax.Array | None, HeadSums]:
    kept, cotangents = rows.more
    coefficients = coef.from_cotangents(cotangents, kept, rows.batch)
    if rows.mask is not None:
        coefficients = coef.select(coefficients, rows.mask)
    coefficients, factor = coef.normalise(coefficients, head.largest_logit_weight)
    lse = kept["lse"] if coefficients.need_probabilities else None
    argmax = rows.argmax if coefficients.argmax is not None else None
    backend, tokens = settings.backend, rows.batch.hidden.shape[0]
    plan = settings.plan(head.spec, tokens, "recompute")

    def products(block: RowBlock) -> TileStep:
        block_coefficients = jax.tree.map(block.take, coefficients)
        if block.valid is not None:
            block_coefficients = coef.select(block_coefficients, block.valid)
        block_batch, block_lse, block_argmax = jax.tree.map(block.take, (rows.batch, lse, argmax))
        gradient = Gradient(block_coefficients, block_lse, block_argmax, needs_grad, factor)
        return backend.recompute(head, block_batch, gradient, plan, block)

    return sweep.gradient_sums(shards, rows, head, weight_dtype, plan, needs_grad, factor, products)
