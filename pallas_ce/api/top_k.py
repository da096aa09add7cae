"""`linear_top_k`: the largest logits of each row, without storing the others."""

import dataclasses
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from pallas_ce.api.checks import ArrayLike, count
from pallas_ce.api.head_options import HeadOptions, computed_by
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.backends.protocol import Implementation, Plan, TopKFinder
from pallas_ce.backends.select import EVERYWHERE
from pallas_ce.head import Batch, Head, HeadSpec, tempered
from pallas_ce.modes.fold import LSE, Streams, fold_with_lse, over_rows_that_count
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import program
from pallas_ce.parallel.shards import RowArrays
from pallas_ce.statistics.row import Partial, finalise
from pallas_ce.streaming.selection import Largest, top_k
from pallas_ce.streaming.tiles import Tile


class TopK(NamedTuple):
    """The k largest logits of each row, in descending order; ties in ascending order of their ids.

    Attributes:
        logits: `[..., k]` capped logits, not divided by the temperature; 0 in rows that are masked.
        ids: `[..., k]` int32, vocabulary ids; -1 in rows that are masked.
        log_probs: `[..., k]` log-probabilities over the whole vocabulary at the given temperature; 0 in rows that are
            masked.
    """

    logits: jax.Array
    ids: jax.Array
    log_probs: jax.Array


def _finder(how: How, spec: HeadSpec, k: int) -> TopKFinder:
    own = how.backend.top_k
    # Beside the logits: their exponentials, and what selecting from them takes.
    return _Tiled((spec,), how.scratch_bytes, 4, k) if own is None else own(spec, k, how.scratch_bytes)


@program(static=1)
def _linear_top_k(k: int, problem: Problem) -> TopK:
    (batch, head, mask), spec = jax.lax.stop_gradient(problem.flat_rows_that_count()), problem.spec

    def empty(rows: int) -> TopK:
        zeros = jnp.zeros((rows, k), spec.accumulator)
        return TopK(zeros, jnp.full((rows, k), -1, jnp.int32), zeros)

    def visit(how: How, plan: Plan, rows: RowArrays, head: Head) -> TopK:
        batch = rows.batch
        best, partial = _finder(how, spec, k).find(head, batch, plan)
        scaled, lse = tempered(best.values, batch.inverse_temperature), finalise(partial, LSE)["lse"]
        # A row of -inf only: (-inf) - (-inf) would be nan.
        log_probs = scaled - jnp.where(jnp.isneginf(lse), 0.0, lse)[:, None]
        return TopK(best.values, best.places, log_probs)

    with jax.named_scope("pallas_ce.top_k"):
        rows = RowArrays(batch, mask)
        found = over_rows_that_count(
            problem.how, visit, lambda how, tokens: _finder(how, spec, k).block_sizes(tokens), empty, rows, head
        )
    return jax.tree.map(lambda x: x.reshape(*problem.leading, k), found)


class _Tiled(Streams):
    """A tile at a time, joined with the best of the tiles before it; each has at least k columns."""

    def find(self, head: Head, batch: Batch, plan: Plan) -> tuple[Largest, Partial]:
        def best_of_tile(logits: jax.Array, tile: Tile) -> Largest:
            valid = logits if tile.valid is None else jnp.where(tile.valid[None, :], logits, -jnp.inf)
            best = top_k(valid, self.least_columns)
            return best._replace(places=tile.start + best.places)

        def best_of_both(a: Largest, b: Largest) -> Largest:
            # `top_k` prefers the first of equal values, hence `a`, hence the lower id. It also settles the columns of
            # `b` that are not valid and stand there as -inf: `a` holds k entries, none below -inf.
            values, places = top_k(jnp.concatenate([a.values, b.values], 1), a.values.shape[1])
            return Largest(values, jnp.take_along_axis(jnp.concatenate([a.places, b.places], 1), places, axis=1))

        return fold_with_lse(best_of_tile, best_of_both, head, batch, plan.columns)


@computed_by(_linear_top_k)
def linear_top_k(
    hidden: ArrayLike,
    weight: WeightLike,
    k: int,
    *,
    temperature: ArrayLike = 1.0,
    row_mask: ArrayLike | None = None,
    implementation: Implementation | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[int, Problem]:
    r"""The k largest of each row of logits, without storing them.

        logits = softcap(logit_scale · (vocab_scale·(hidden·weight) + bias))

    Exact: values, ids and order as `jax.lax.top_k` gives them on the whole row. Ties go to the lowest id, and NaN of
    either sign comes first. The same pass finds the row's log-sum-exp, so that
    `log_probs = logits/temperature - lse(logits/temperature)` are over the whole vocabulary, not over the k.

    Nothing is differentiated: the results are constants. For gradients, give the ids to a function of log-probabilities
    that is differentiable.

    Args:
        hidden: `[..., H]`.
        weight: `[V', H]` or `[H, V']`.
        k: how many, from 1 to V. A Python int.
        temperature: T > 0, a scalar or `[...]`; changes `log_probs` only.
        row_mask: `[...]` bool; rows where it is False hold logits 0, ids -1 and log-probabilities 0, and their work is
            skipped.
        implementation: "xla" (any platform), "mosaic_gpu" (a Hopper kernel that stores the float32 logits of as
            many rows as `scratch_bytes` holds), or None: that one in programs for a Hopper GPU where it can, else
            "xla".
        scratch_bytes: bound on scratch memory.

    Returns:
        TopK: fields `[..., k]`, float32 (float64 for float64) and int32. A logit of -inf has log-probability -inf. In a
        row with a NaN every log-probability is NaN; where the largest logit is +inf, that is NaN.

    Raises:
        ValueError: shapes or values that do not fit, k beyond the vocabulary, a budget too small for one row, a named
            implementation that cannot serve.
        TypeError: dtypes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce import linear_top_k
        >>> hidden = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> weight = jnp.array([[0.0, 3.0], [2.0, 1.0], [2.0, 0.0], [1.0, 2.0]])  # [V, H]
        >>> print(linear_top_k(hidden, weight, 2).ids)
        [[1 2]
         [0 3]]
    """
    problem = Problem.read(hidden, weight, row_mask=row_mask, implementation=implementation, **options)
    problem = problem.tempered(temperature)
    k = count("k", k, problem.spec.vocab_size, f"vocab_size={problem.spec.vocab_size}")
    how = problem.decided(task="top_k").how
    try:
        _finder(how, problem.spec, k).block_sizes(max(problem.tokens, 1))
    except ValueError:  # the budget is too small
        if how.certain is None:
            raise
        how = dataclasses.replace(how, implementation=EVERYWHERE, certain=None)
    return k, dataclasses.replace(problem, how=how)
