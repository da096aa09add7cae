"""`linear_sample`: samples from the softmax of each row and their log-probabilities, without storing all logits."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from pallas_ce.api.checks import ArrayLike, count, share
from pallas_ce.api.checks import key as check_key
from pallas_ce.api.head_options import HeadOptions, computed_by
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import WeightLike
from pallas_ce.api.top_k import TopK, linear_top_k
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Head, tempered
from pallas_ce.modes.fold import LSE, Streams, fold_with_lse, lse_partial, over_rows_that_count
from pallas_ce.modes.how import How
from pallas_ce.parallel.entry import program
from pallas_ce.parallel.shards import RowArrays
from pallas_ce.statistics.row import Partial, finalise, gap
from pallas_ce.streaming.rows import flat_rows, present
from pallas_ce.streaming.selection import top_k as sorted_top_k
from pallas_ce.streaming.tiles import Tile, Tiles


class Samples(NamedTuple):
    """One sample for each row.

    Attributes:
        ids: `[...]` int32, vocabulary ids; -1 in rows that are masked.
        log_probs: `[...]` their log-probabilities under the distribution they were drawn from; 0 in masked rows.
    """

    ids: jax.Array
    log_probs: jax.Array


class _Limits(NamedTuple):
    """The limits that were asked for, `[n]` or anything that becomes that; None: not asked for."""

    top_p: jax.Array | None = None
    min_p: jax.Array | None = None

    def kept(self, logits: jax.Array, inverse_temperature: jax.Array | None) -> jax.Array:
        """`logits [n, c]` with -inf for the dropped ones; for `top_p` they are in descending order."""
        scaled = tempered(logits, inverse_temperature)
        top, kept = jnp.max(scaled, axis=1, keepdims=True), jnp.ones(logits.shape, bool)
        if self.top_p is not None:
            p, mass = self.top_p[:, None], jnp.exp(gap(scaled, top))
            before = jnp.cumsum(mass, axis=1) - mass
            kept = (before < p * jnp.sum(mass, axis=1, keepdims=True)) | (p >= 1)
            kept = kept.at[:, 0].set(True)
        if self.min_p is not None:
            kept &= ~(scaled < top + jnp.log(self.min_p)[:, None])
        return jnp.where(kept, logits, -jnp.inf)


class _Drawn(NamedTuple):
    """The column whose logit and noise have the largest sum of those seen so far, `[n]` each."""

    score: jax.Array
    id: jax.Array
    logit: jax.Array


# Noise drawn as one array, or tile by tile from a stream, would depend on the blocks and tiles. Here each number is a
# hash of the key, the row and the column alone (counter-based, as JAX's own generator is): any tile can make its own.
def row_keys(key: Any, rows: int) -> jax.Array:
    """A key `[2]` uint32 for each row, `[rows, 2]`."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    return _hash(words, jnp.arange(rows, dtype=jnp.uint32))


def gumbel(keys: jax.Array, columns: jax.Array, dtype: np.dtype) -> jax.Array:
    """Standard Gumbel noise `[n, c]` for rows with `keys [n, 2]` at `columns`, `[c]` or `[n, c]` int32.

    With u uniform in (0, 1), `E = -log(1 - u)` is exponential and `-log E` is Gumbel. The largest of many noises, which
    decide a sample, come from the smallest u. Those have full relative precision here, down to 2⁻⁶⁴: u is made of 64
    bits. Made of 24 bits, the largest of 1e5 would take only some hundred values, and probabilities be off by 1%.
    """
    columns = jnp.broadcast_to(columns, (keys.shape[0], columns.shape[-1])).astype(jnp.uint32)
    words = jax.vmap(_hash)(keys, columns)
    high, low = words[..., 0].astype(dtype), words[..., 1].astype(dtype)
    u = high * 2.0**-32 + low * 2.0**-64 + 2.0**-65
    u = jnp.minimum(u, 1.0 - np.finfo(dtype).epsneg)
    return -jnp.log(-jnp.log1p(-u))


def _hash(key: jax.Array, counts: jax.Array) -> jax.Array:
    """Two words `[m, 2]` for each of `counts [m]`. Threefry pairs the halves of its counter array."""
    words = threefry_2x32((key[0], key[1]), jnp.concatenate([counts, jnp.zeros_like(counts)]))
    return words.reshape(2, -1).T


def _draw(
    keys: jax.Array, logits: jax.Array, ids: jax.Array, valid: jax.Array | None, inverse_temperature: jax.Array | None
) -> _Drawn:
    """From `logits [n, c]` of the columns `ids`, `[c]` or `[n, c]`; `argmax` prefers the first of equal ones."""
    added = gumbel(keys, ids, logits.dtype)
    scores = logits + (added if inverse_temperature is None else added / inverse_temperature[:, None])
    scores = scores if valid is None else jnp.where(valid[None, :], scores, -jnp.inf)
    place, of_columns = scores.argmax(axis=1)[:, None], (scores, jnp.broadcast_to(ids, scores.shape), logits)
    return _Drawn(*(jnp.take_along_axis(x, place, axis=1)[:, 0] for x in of_columns))


def _finite(inverse_temperature: jax.Array | None) -> jax.Array | None:
    """1 in place of 1/0, where the log-probability is known without a product."""
    return None if inverse_temperature is None else jnp.where(jnp.isinf(inverse_temperature), 1.0, inverse_temperature)


def _samples(drawn: _Drawn, partial: Partial, inverse_temperature: jax.Array | None) -> Samples:
    lse, inverse = finalise(partial, LSE)["lse"], _finite(inverse_temperature)
    scaled = drawn.logit if inverse is None else drawn.logit * inverse
    log_probs = jnp.where(jnp.isneginf(scaled), -jnp.inf, scaled - lse)
    if inverse_temperature is not None:
        log_probs = jnp.where(jnp.isinf(inverse_temperature) & jnp.isfinite(scaled), 0.0, log_probs)
    return Samples(drawn.id, log_probs)


def _sample_of_kept(
    keys: jax.Array, limits: _Limits, logits: jax.Array, ids: jax.Array, inverse_temperature: jax.Array | None
) -> Samples:
    """From what the limits `[n]` keep of `logits [n, c]` of the columns `ids`, with the noise of the whole row."""
    finite = _finite(inverse_temperature)
    logits = limits.kept(logits, finite)
    partial = lse_partial(logits, jnp.arange(logits.shape[1]), None, finite)
    return _samples(_draw(keys, logits, ids, None, inverse_temperature), partial, inverse_temperature)


def _block(how: How, plan: Plan, rows: RowArrays, head: Head) -> Samples:
    batch, (keys, limits) = rows.batch, rows.more
    inverse = batch.inverse_temperature
    if not jax.tree.leaves(limits):

        def part(logits: jax.Array, tile: Tile) -> _Drawn:
            return _draw(keys, logits, tile.columns, tile.valid, inverse)

        def better(a: _Drawn, b: _Drawn) -> _Drawn:
            # As `argmax` has it, where the columns of `a` precede `b`'s: NaN is the best.
            later = ~(b.score <= a.score) & ~jnp.isnan(a.score)
            return jax.tree.map(lambda x, y: jnp.where(later, y, x), a, b)

        batch = batch._replace(inverse_temperature=_finite(inverse))
        return _samples(*fold_with_lse(part, better, head, batch, plan.columns), inverse)

    batch, vocab_size = batch._replace(inverse_temperature=None), head.spec.vocab_size
    logits = Tiles(vocab_size, plan.columns).for_each(
        lambda tile, stored: tile.put(stored, head.tile_logits(batch, tile), axis=1),
        jnp.zeros((len(batch.hidden), vocab_size), head.spec.accumulator),
    )
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    if limits.top_p is not None:
        logits, ids = sorted_top_k(logits, vocab_size)
    return _sample_of_kept(keys, limits, logits, ids, inverse)


@program(static=1)
def _linear_sample(streams: Streams | None, problem: Problem, key: Any, limits: _Limits, best: TopK | None) -> Samples:
    """Samples among the `best` of each row or, by the block sizes of `streams`, among all columns."""
    (batch, head, mask), wide = jax.lax.stop_gradient(problem.flat_rows_that_count()), problem.spec.accumulator
    by_row = jax.tree.map(lambda x: jnp.broadcast_to(x.astype(wide), problem.leading).reshape(-1), limits)
    more = row_keys(key, problem.tokens), by_row

    def empty(rows: int) -> Samples:
        return Samples(jnp.full(rows, -1, jnp.int32), jnp.zeros(rows, wide))

    with jax.named_scope("pallas_ce.sample"):
        if streams is not None:
            rows, sizes = RowArrays(batch, mask, more=more), streams.block_sizes
            found = over_rows_that_count(problem.how, _block, lambda _, tokens: sizes(tokens), empty, rows, head)
        else:
            logits, ids, _ = flat_rows(problem.leading, present(best))
            found = _sample_of_kept(*more, logits, ids, batch.inverse_temperature)
            if mask is not None:
                found = jax.tree.map(lambda x, fill: jnp.where(mask, x, fill), found, empty(problem.tokens))
    return jax.tree.map(lambda x: x.reshape(problem.leading), found)


@computed_by(_linear_sample)
def linear_sample(
    key: ArrayLike,
    hidden: ArrayLike,
    weight: WeightLike,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    row_mask: ArrayLike | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Streams | None, Problem, Any, _Limits, TopK | None]:
    r"""Samples each row of `softmax(logits / temperature)`, without storing all logits.

    With independent standard Gumbel noise g, `argmax_v (z_v + T·g_v)` is a sample of `softmax(z/T)` for T > 0 and the
    largest logit for T = 0. Only the best column so far and the running log-sum-exp are kept, so one pass draws the
    sample and its log-probability. The noise is a function of key, row and column: the sample depends neither on
    `scratch_bytes` nor on the mask, and each row has noise of its own. A `vmap` over keys draws several samples of each
    row in one pass over the weight.

    The temperature comes first, then `top_k`, `top_p` and `min_p`, in this order, each on what the one before has left.
    The sample is the best sum of logit and noise among the columns that are left; its log-probability is relative to
    them. `top_p` and `min_p` read the k largest logits, or without `top_k` whole rows: the logits of as many rows as
    `scratch_bytes` holds are then stored at a time, and sorted for `top_p`.

    Nothing is differentiated: the results are constants. For gradients, give the ids to a function of log-probabilities
    that is differentiable.

    Args:
        key: one of JAX's random keys.
        hidden: `[..., H]`.
        weight: `[V', H]` or `[H, V']`.
        temperature: T ≥ 0, a scalar or `[...]`; 0 takes the largest logit, the lowest id where several tie, with
            log-probability 0 if that logit is finite.
        top_k: sample among the k largest logits only (ties to the lowest id); the log-probabilities are those among
            them. None: among all.
        top_p: p in (0, 1], a number, `[]` or `[...]`: sample among the most likely columns before which less than p of
            the probability lies (ties: the lowest id first), which are the fewest that reach p. After `top_k`, the
            probability is relative to the k. None: all columns.
        min_p: in [0, 1], a number, `[]` or `[...]`: sample among columns at least `min_p` times as likely as the most
            likely one; after `top_k` and `top_p`.
        row_mask: `[...]` bool; rows where it is False hold id -1 and log-probability 0, and their work is skipped.
        scratch_bytes: bound on scratch memory.

    Returns:
        Samples: fields `[...]`. A row of -inf only has no distribution: its id is 0, its log-probability -inf. A row
        with a NaN has the first one's id, else a row with +inf the first one's, whatever the limits; log-probability
        NaN, as `jax.nn.log_softmax` has it of both.

    Raises:
        ValueError: shapes or values that do not fit, a budget too small for one row.
        TypeError: dtypes that do not fit; a key that is none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_sample
        >>> hidden, weight = jnp.ones((4, 3)), jnp.ones((5, 3))
        >>> samples = linear_sample(jax.random.key(0), hidden, weight)
        >>> samples.ids.shape, bool(jnp.allclose(samples.log_probs, -jnp.log(5.0)))
        ((4,), True)
        >>> print(linear_sample(jax.random.key(0), hidden, weight, temperature=0.0).ids)
        [0 0 0 0]

    References:
        "A* Sampling" (Maddison, Tarlow, Minka), section 2: the Gumbel-max trick.
    """
    key = check_key(key)
    problem = Problem.read(hidden, weight, row_mask=row_mask, **options).tempered(temperature, zero=True)
    spec = problem.spec
    limits = _Limits(share("top_p", top_p, problem.leading), share("min_p", min_p, problem.leading, zero=True))
    if top_k is not None:
        k = count("top_k", top_k, spec.vocab_size, f"vocab_size={spec.vocab_size}")
        return None, problem, key, limits, linear_top_k(hidden, weight, k, row_mask=row_mask, **options)
    if jax.tree.leaves(limits):
        # XLA's program for a CPU has eight arrays of whole rows at a time, a GPU's has four and what its sort takes.
        streams = Streams((spec,), problem.scratch_bytes, tile_arrays=1, row_arrays=8)
    else:
        # The logits, their exponentials, two words of random bits, the noise and its sum with the logits.
        streams = Streams((spec,), problem.scratch_bytes, tile_arrays=6)
    streams.block_sizes(max(problem.tokens, 1))  # raises where the budget is too small
    return streams, problem, key, limits, None
