"""Mode *materialized*: the caller holds the logits `[N, V]`. Statistics by row blocks, dlogits over their buffer.

Streaming over the vocabulary saves nothing here; what costs is a second array of the logits' size, and each further
pass over them. So rows are taken in blocks that stay in a cache: of each block the statistics, the row loss's
derivatives and dlogits are made at once, and dlogits take the logits' place. XLA lets them have the very buffer where
the logits are not needed any more: an intermediate of a training step, or an argument that the caller donates. No
float32 copy of narrower logits is ever larger than a block.

On Hopper two kernels do so for all rows at once, without launches by the hundred: the second read misses the cache.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, absent
from pallas_ce.modes.forward import Statistics, put_all
from pallas_ce.modes.in_forward import row_cotangents, with_handle
from pallas_ce.modes.materialized_blocks import MaterializedSettings as MaterializedSettings
from pallas_ce.modes.materialized_blocks import block_gradient, block_statistics
from pallas_ce.modes.materialized_blocks import decide as decide
from pallas_ce.parallel.entry import at_lowering, over_rows_only
from pallas_ce.statistics import gradient as coef
from pallas_ce.streaming.rows import RowBlock, zeroed

_INSTEAD = "A loss written in plain JAX, on jax.nn.log_softmax, supports any order."


class Residual(NamedTuple):
    """What the forward of `statistics_and_handle` leaves: dlogits and their rows' factors; `absent()` if not made."""

    dlogits: jax.Array
    factor: jax.Array


def _zeros(
    settings: MaterializedSettings,
    names: frozenset[str],
    logits: jax.Array,
    logit_weights: jax.Array | None,
    labels: jax.Array | None,
) -> Statistics:
    shapes = jax.eval_shape(functools.partial(block_statistics, settings, names), logits, logit_weights, labels)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _entered(settings: MaterializedSettings, operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation(settings, by_row, shared)`, split over the mesh, and of each part by what serves it."""

    def chosen(by_row: Any, shared: Any) -> Any:
        rows = jax.tree.leaves(by_row)[0].shape[0]
        return at_lowering(settings.variants(rows), operation, by_row, shared)

    return over_rows_only(chosen)


def _forward_statistics(settings: MaterializedSettings, names: frozenset[str], *arrays: Any) -> Statistics:
    def operation(settings: MaterializedSettings, by_row: Any, logit_weights: Any) -> Statistics:
        logits, labels, _ = by_row

        def body(block: RowBlock, found: Statistics) -> Statistics:
            block_logits, block_labels, valid = jax.tree.map(block.take, by_row)
            values = block_statistics(settings, names, block_logits, logit_weights, block_labels)
            return put_all(block, found, zeroed(valid, values))

        return settings.blocks(logits.shape[0]).for_each(body, _zeros(settings, names, logits, logit_weights, labels))

    logits, logit_weights, labels, mask = arrays
    with jax.named_scope("pallas_ce.materialized.forward"):
        return _entered(settings, operation)((logits, labels, mask), logit_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def row_statistics(
    settings: MaterializedSettings,
    names: frozenset[str],
    logits: jax.Array,
    logit_weights: jax.Array | None,
    labels: jax.Array | None,
    mask: jax.Array | None,
) -> Statistics:
    """Primitive statistics of `logits [N, columns]`, N and V at least 1; differentiable in the logits, any cotangents.

    Args:
        settings: how.
        names: which statistics.
        logits: as stored.
        logit_weights: `[columns]`, the u of `mean_logit`.
        labels: `[N]` or `[N, K]` int32, -1 for no target.
        mask: `[N]` bool; the statistics of rows where it is False are 0, and so is their gradient.
    """
    return _forward_statistics(settings, names, logits, logit_weights, labels, mask)


def _forward(settings: MaterializedSettings, names: frozenset[str], *primals: Any) -> tuple[Statistics, Any]:
    values = evaluate.values_of(primals)
    saved = coef.saved_statistics(names | ({"lse"} if "log_prob" in names else set()))
    found = _forward_statistics(settings, names | saved, *evaluate.first_order_only(values, _INSTEAD))
    return {name: found[name] for name in names}, (values, {name: found[name] for name in saved})


def _backward(
    settings: MaterializedSettings, names: frozenset[str], saved: Any, cotangents: dict[str, Any]
) -> tuple[Any, ...]:
    del names
    cotangents = {name: g for name, g in evaluate.given(cotangents).items() if g is not None}
    if not cotangents:
        return None, None, None, None
    (arrays, kept), cotangents = evaluate.first_order_only((saved, cotangents), _INSTEAD)
    logits, logit_weights, labels, mask = arrays
    return row_gradient(settings, logits, logit_weights, labels, mask, kept, cotangents), None, None, None


def row_gradient(
    settings: MaterializedSettings,
    logits: jax.Array,
    logit_weights: jax.Array | None,
    labels: jax.Array | None,
    mask: jax.Array | None,
    kept: Statistics,
    cotangents: Statistics,
) -> jax.Array:
    """dlogits in the logits' place, from the statistics that the cotangents' derivatives read, and the cotangents."""

    def operation(settings: MaterializedSettings, by_row: Any, logit_weights: Any) -> jax.Array:
        logits, *rest = by_row

        def body(block: RowBlock, buffer: jax.Array) -> jax.Array:
            block_labels, valid, statistics, cotangents = jax.tree.map(block.take, rest)
            coefficients = _coefficients(cotangents, statistics, block_labels)
            values = block_gradient(
                settings, coefficients, block.take(buffer), logit_weights, block_labels, statistics, valid
            )
            return block.put(buffer, values)

        return settings.blocks(logits.shape[0]).for_each(body, logits)

    with jax.named_scope("pallas_ce.materialized.backward"):
        return _entered(settings, operation)((logits, labels, mask, kept, cotangents), logit_weights)


def _coefficients(cotangents: Statistics, statistics: Statistics, labels: jax.Array | None) -> coef.Coefficients:
    """As `coefficients.from_cotangents`, with `log_prob` among the statistics and targets of the labels' shape."""
    by_row = {name: g for name, g in cotangents.items() if name not in ("target_logit", "log_prob")}
    target = cotangents.get("target_logit")
    if "log_prob" in cotangents:
        assert labels is not None
        g = jnp.where(labels >= 0, cotangents["log_prob"], 0.0)
        target = g if target is None else target + g
        lse = -g.reshape(g.shape[0], -1).sum(axis=1)
        by_row["lse"] = by_row["lse"] + lse if "lse" in by_row else lse
    coefficients = coef.from_cotangents(by_row, statistics)
    if target is not None and "lse" in statistics:  # a row of -inf only has no distribution to change
        some = ~jnp.isneginf(statistics["lse"])
        target = jnp.where(some.reshape(-1, *[1] * (target.ndim - 1)), target, 0.0)
    return coefficients._replace(target=target)


row_statistics.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def statistics_and_handle(
    call: Call[MaterializedSettings],
    logits: jax.Array,
    logit_weights: jax.Array | None,
    labels: jax.Array | None,
    mask: jax.Array | None,
    inputs: tuple[Any, Any],
) -> tuple[Statistics, jax.Array]:
    """As `in_forward.statistics_and_handle`: dlogits are made in the forward, the backward scales them.

    Args:
        call: the static facts.
        logits: `[N, columns]`, N and V at least 1.
        logit_weights: `[columns]`, the u of `mean_logit`.
        labels: `[N]` int32.
        mask: `[N]` bool, which rows count; None: all.
        inputs: `(by_row, shared)` for `row_total`.
    """
    found = _forward_statistics(call.settings, call.names, logits, logit_weights, labels, mask)
    return with_handle(found, inputs, call.settings.spec.accumulator)


def _fused_forward(call: Call[MaterializedSettings], *primals: Any) -> tuple[tuple[Statistics, jax.Array], Residual]:
    needs_grad = primals[0].perturbed and call.read - {"argmax"}
    logits, logit_weights, labels, mask, inputs = evaluate.first_order_only(evaluate.values_of(primals), _INSTEAD)
    residual = Residual(absent(), absent())
    if needs_grad:
        with jax.named_scope("pallas_ce.materialized.forward_and_gradient"):
            operation = _entered(call.settings, functools.partial(_statistics_and_gradient, call))
            by_row = (logits, labels, mask, inputs[0])
            found, *made = operation(by_row, (logit_weights, inputs[1]))
        residual = Residual(*(absent() if x is None else x for x in made))
    else:
        found = _forward_statistics(call.settings, call.names, logits, logit_weights, labels, mask)
    return with_handle(found, inputs, call.settings.spec.accumulator), residual


def _statistics_and_gradient(
    call: Call[MaterializedSettings], settings: MaterializedSettings, by_row: Any, shared: Any
) -> Any:
    """Statistics, dlogits and, where they are normalised, the power of two of each row that they are divided by."""
    logits, labels, *_ = by_row
    logit_weights, shared_inputs = shared
    spec = settings.spec
    names = call.names | coef.saved_statistics(call.read)
    largest = 0.0 if logit_weights is None else jnp.max(jnp.abs(logit_weights))

    def body(block: RowBlock, carry: Any) -> Any:
        found, buffer, factors = carry
        block_labels, valid, row_inputs = jax.tree.map(block.take, by_row[1:])
        block_logits = block.take(buffer)
        statistics = block_statistics(settings, names, block_logits, logit_weights, block_labels)
        # All reads of the block's logits come before dlogits replace them; else XLA would copy the whole buffer.
        statistics = jax.lax.optimization_barrier(zeroed(valid, statistics))
        cotangents = row_cotangents(call, statistics, block, (row_inputs, shared_inputs))
        coefficients = coef.from_cotangents(cotangents, statistics)
        if valid is not None:
            coefficients = coef.select(coefficients, valid)
        if factors is not None:
            coefficients, factor = coef.normalise(coefficients, largest)
            factors = block.put(factors, jnp.broadcast_to(factor, block_logits.shape[:1]))
        values = block_gradient(settings, coefficients, block_logits, logit_weights, block_labels, statistics, valid)
        return put_all(block, found, statistics), block.put(buffer, values), factors

    factors = jnp.zeros(logits.shape[0], spec.accumulator) if settings.normalises else None
    carry = (_zeros(settings, names, logits, logit_weights, labels), logits, factors)
    found, gradient, factors = settings.blocks(logits.shape[0]).for_each(body, carry)
    return {name: found[name] for name in call.names}, gradient, factors


def _fused_backward(
    call: Call[MaterializedSettings], residual: Residual, cotangents: tuple[Any, Any]
) -> tuple[Any, ...]:
    upstream = evaluate.given(cotangents[1])
    made = jnp.issubdtype(residual.dlogits.dtype, jnp.floating)
    if not made or upstream is None:
        return None, None, None, None, None
    (dlogits, factor), upstream = evaluate.first_order_only((residual, upstream), _INSTEAD)
    spec = call.settings.spec
    scale = upstream * factor[:, None] if call.settings.normalises else upstream
    return (scale * dlogits.astype(spec.accumulator)).astype(spec.dtype), None, None, None, None


statistics_and_handle.defvjp(_fused_forward, _fused_backward, symbolic_zeros=True)
