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
from pallas_ce.modes.materialized_blocks import MaterializedRows as MaterializedRows
from pallas_ce.modes.materialized_blocks import MaterializedSettings as MaterializedSettings
from pallas_ce.modes.materialized_blocks import block_gradient, block_statistics
from pallas_ce.modes.materialized_blocks import decide as decide
from pallas_ce.parallel.entry import at_lowering, over_rows_only
from pallas_ce.parallel.reverse_mode import reverse_mode_only
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import only
from pallas_ce.streaming.rows import RowBlock, zeroed

_INSTEAD = "A loss written in plain JAX, on jax.nn.log_softmax, supports any order."


class Residual(NamedTuple):
    """What the forward of `statistics_and_handle` leaves: dlogits and their rows' factors; `absent()` if not made."""

    dlogits: jax.Array
    factor: jax.Array


def _zeros(settings: MaterializedSettings, names: frozenset[str], rows: MaterializedRows) -> Statistics:
    shapes = jax.eval_shape(functools.partial(block_statistics, settings, names), rows)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _entered(
    settings: MaterializedSettings,
    operation: Callable[..., Any],
    rows: MaterializedRows,
    more: Any = (),
    shared: Any = (),
) -> Any:
    """`operation(settings, rows, more, shared)`, split over the mesh, and of each part by what serves it.

    `more` are `[N, ...]`, as the operation's results are; all rows share `shared`.
    """

    def local(settings: MaterializedSettings, by_row: Any, shared: Any) -> Any:
        return operation(settings, by_row[0]._replace(logit_weights=shared[0]), by_row[1], shared[1])

    def chosen(by_row: Any, shared: Any) -> Any:
        return at_lowering(settings.variants(by_row[0].logits.shape[0]), local, by_row, shared)

    return over_rows_only(chosen)((rows._replace(logit_weights=None), more), (rows.logit_weights, shared))


def _forward_statistics(settings: MaterializedSettings, names: frozenset[str], rows: MaterializedRows) -> Statistics:
    def operation(settings: MaterializedSettings, rows: MaterializedRows, more: Any, shared: Any) -> Statistics:
        del more, shared

        def body(block: RowBlock, found: Statistics) -> Statistics:
            part = rows.of(block)
            return put_all(block, found, zeroed(part.mask, block_statistics(settings, names, part)))

        return settings.blocks(rows.logits.shape[0]).for_each(body, _zeros(settings, names, rows))

    with jax.named_scope("pallas_ce.materialized.forward"):
        found: Statistics = _entered(settings, operation, rows)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row_statistics(settings: MaterializedSettings, names: frozenset[str], rows: MaterializedRows) -> Statistics:
    """Primitive statistics of N rows, N and V at least 1; differentiable in the logits, any cotangents.

    The statistics of rows that do not count are 0, and so is their gradient.
    """
    return _forward_statistics(settings, names, rows)


def _forward(
    settings: MaterializedSettings, names: frozenset[str], primals: Any
) -> tuple[Statistics, tuple[MaterializedRows, Statistics]]:
    rows = evaluate.values_of(primals)
    saved = coef.saved_statistics(names)
    found = _forward_statistics(settings, names | saved, evaluate.first_order_only(rows, _INSTEAD))
    return only(found, names), (rows, only(found, saved))


def _backward(
    settings: MaterializedSettings, names: frozenset[str], saved: Any, cotangents: dict[str, Any]
) -> tuple[Any, ...]:
    del names
    cotangents = {name: g for name, g in evaluate.given(cotangents).items() if g is not None}
    gradient: Any = jax.tree.map(lambda _: None, saved[0])
    if cotangents:
        (rows, kept), cotangents = evaluate.first_order_only((saved, cotangents), _INSTEAD)
        gradient = gradient._replace(logits=row_gradient(settings, rows, kept, cotangents))
    return (gradient,)


def row_gradient(
    settings: MaterializedSettings, rows: MaterializedRows, kept: Statistics, cotangents: Statistics
) -> jax.Array:
    """dlogits in the logits' place, from the statistics that the cotangents' derivatives read, and the cotangents."""

    def operation(settings: MaterializedSettings, rows: MaterializedRows, more: Any, shared: Any) -> jax.Array:
        del shared
        statistics, cotangents = more
        if rows.labels is not None and rows.labels.ndim > 1:
            of_targets = {name: g for name, g in cotangents.items() if name in ("target_logit", "log_prob")}
            cotangents = cotangents | {n: coef.at_first_occurrence(g, rows.labels) for n, g in of_targets.items()}
        given = statistics, cotangents

        def body(block: RowBlock, buffer: jax.Array) -> jax.Array:
            part = rows._replace(logits=buffer).of(block)
            statistics, cotangents = jax.tree.map(block.take, given)
            coefficients = _coefficients(cotangents, statistics, part.labels)
            return block.put(buffer, block_gradient(settings, coefficients, part, statistics))

        return settings.blocks(rows.logits.shape[0]).for_each(body, rows.logits)

    with jax.named_scope("pallas_ce.materialized.backward"):
        dlogits: jax.Array = _entered(settings, operation, rows, (kept, cotangents))
    return dlogits


def _coefficients(cotangents: Statistics, statistics: Statistics, labels: jax.Array | None) -> coef.Coefficients:
    """As `gradient.from_cotangents`, with targets of the labels' shape; nothing comes from where there is none."""
    if "log_prob" in cotangents:
        assert labels is not None
        cotangents = cotangents | {"log_prob": jnp.where(labels >= 0, cotangents["log_prob"], 0.0)}
    return coef.from_cotangents(cotangents, statistics)


_row_statistics.defvjp(_forward, _backward, symbolic_zeros=True)
row_statistics = reverse_mode_only(_row_statistics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics_and_handle(
    call: Call[MaterializedSettings], rows: MaterializedRows, inputs: tuple[Any, Any]
) -> tuple[Statistics, jax.Array]:
    """As `evaluate` has them of a head: dlogits are made in the forward, the backward scales them.

    Args:
        call: the static facts.
        rows: N and V at least 1, with one label each.
        inputs: `(by_row, shared)` for `row_total`.
    """
    found = _forward_statistics(call.settings, call.names, rows)
    return with_handle(found, inputs, call.settings.spec.accumulator)


def _fused_forward(
    call: Call[MaterializedSettings], primals: Any, primal_inputs: Any
) -> tuple[tuple[Statistics, jax.Array], Residual]:
    needs_grad = primals.logits.perturbed and call.read - {"argmax"}
    rows, inputs = evaluate.first_order_only(evaluate.values_of((primals, primal_inputs)), _INSTEAD)
    residual = Residual(absent(), absent())
    if needs_grad:
        with jax.named_scope("pallas_ce.materialized.forward_and_gradient"):
            operation = functools.partial(_statistics_and_gradient, call)
            found, *made = _entered(call.settings, operation, rows, *inputs)
        residual = Residual(*(absent() if x is None else x for x in made))
    else:
        found = _forward_statistics(call.settings, call.names, rows)
    return with_handle(found, inputs, call.settings.spec.accumulator), residual


def _statistics_and_gradient(
    call: Call[Any], settings: MaterializedSettings, rows: MaterializedRows, row_inputs: Any, shared_inputs: Any
) -> Any:
    """Statistics, dlogits and, where they are normalised, the power of two of each row that they are divided by."""
    tokens, u = rows.logits.shape[0], rows.logit_weights
    names = call.names | coef.saved_statistics(call.read)
    largest = 0.0 if u is None else jnp.max(jnp.abs(u))

    def body(block: RowBlock, carry: Any) -> Any:
        found, buffer, factors = carry
        part = rows._replace(logits=buffer).of(block)
        statistics = block_statistics(settings, names, part)
        # All reads of the block's logits come before dlogits replace them; else XLA would copy the whole buffer.
        statistics = jax.lax.optimization_barrier(zeroed(part.mask, statistics))
        cotangents = row_cotangents(call, statistics, block, (jax.tree.map(block.take, row_inputs), shared_inputs))
        coefficients = coef.from_cotangents(cotangents, statistics)
        if part.mask is not None:
            coefficients = coef.select(coefficients, part.mask)
        if factors is not None:
            coefficients, factor = coef.normalise(coefficients, largest)
            factors = block.put(factors, jnp.broadcast_to(factor, part.logits.shape[:1]))
        values = block_gradient(settings, coefficients, part, statistics)
        return put_all(block, found, statistics), block.put(buffer, values), factors

    factors = jnp.zeros(tokens, settings.spec.accumulator) if settings.normalises else None
    carry = (_zeros(settings, names, rows), rows.logits, factors)
    found, gradient, factors = settings.blocks(tokens).for_each(body, carry)
    return only(found, call.names), gradient, factors


def _fused_backward(
    call: Call[MaterializedSettings], residual: Residual, cotangents: tuple[Any, Any]
) -> tuple[Any, ...]:
    upstream = evaluate.given(cotangents[1])
    made = jnp.issubdtype(residual.dlogits.dtype, jnp.floating)
    if not made or upstream is None:
        return None, None
    (dlogits, factor), upstream = evaluate.first_order_only((residual, upstream), _INSTEAD)
    spec = call.settings.spec
    scale = upstream * factor[:, None] if call.settings.normalises else upstream
    return MaterializedRows((scale * dlogits.astype(spec.accumulator)).astype(spec.dtype)), None


_statistics_and_handle.defvjp(_fused_forward, _fused_backward, symbolic_zeros=True)
statistics_and_handle = reverse_mode_only(_statistics_and_handle)
