"""`linear_sample`: samples from the softmax of each row and their log-probabilities, without storing logits."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.api import checks as arguments
from pallas_ce.api import inputs
from pallas_ce.api.checks import ArrayLike, DTypeLike
from pallas_ce.api.top_k import check_k, linear_top_k
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Head, HeadSpec, tempered
from pallas_ce.modes.fold import Streams, fold_tiles, over_rows_that_count
from pallas_ce.parallel.explicit_axes import in_automatic_region
from pallas_ce.statistics.row import Partial, finalise, merge, partial_of_tile
from pallas_ce.streaming import noise
from pallas_ce.streaming.tiles import Tile, Tiles

_LSE = frozenset({"lse"})


class Samples(NamedTuple):
    """One sample for each row.

    Attributes:
        ids: `[...]` int32, vocabulary ids; -1 in rows that are masked.
        log_probs: `[...]` their log-probabilities under the distribution they were drawn from; 0 in masked rows.
    """

    ids: jax.Array
    log_probs: jax.Array


def linear_sample(
    key: ArrayLike,
    hidden: ArrayLike,
    weight: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    row_mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    vocab_axis: int = 0,
    vocab_size: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: ArrayLike = 1.0,
    dtype: DTypeLike | None = None,
    scratch_bytes: int | None = None,
) -> Samples:
    r"""Samples each row of `softmax(logits / temperature)`, without storing logits.

    With independent standard Gumbel noise g, `argmax_v (z_v + T·g_v)` is a sample of `softmax(z/T)` for T > 0 and the
    largest logit for T = 0. Only the best column so far and the running log-sum-exp are kept, so one pass draws the
    sample and its log-probability. The noise is a function of key, row and column: the sample depends neither on
    `scratch_bytes` nor on the mask, and each row has noise of its own. A `vmap` over keys draws several samples of each
    row in one pass over the weight.

    Nothing is differentiated: the results are constants. For gradients, give the ids to a function of log-probabilities
    that is differentiable.

    Args:
        key: one of JAX's random keys.
        hidden: `[..., H]`.
        weight: `[V', H]` or `[H, V']`.
        temperature: T ≥ 0, a scalar or `[...]`; 0 takes the largest logit, the lowest id where several tie, with
            log-probability 0.
        top_k: sample among the k largest logits only (ties to the lowest id); the log-probabilities are those among
            them. None: among all.
        row_mask: `[...]` bool; rows where it is False hold id -1 and log-probability 0, and their work is skipped.
        bias: `[V']`.
        vocab_axis: see `linear_row_statistics`, as for all that follow.
        vocab_size: V, where the weight is padded.
        logit_softcap: the cap of the logits.
        logit_scale: their scale.
        dtype: compute dtype.
        scratch_bytes: bound on scratch memory.

    Returns:
        Samples: fields `[...]`. A row of -inf only has no distribution: its id is 0, its log-probability -inf.

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
    options: dict[str, Any] = {
        "vocab_axis": vocab_axis,
        "vocab_size": vocab_size,
        "logit_softcap": logit_softcap,
        "dtype": dtype,
    }
    arrays, spec = inputs.read_head(
        hidden, weight, bias, logit_scale, None, **options, temperature=temperature, folds=False, zero=True
    )
    leading, key = arrays.hidden.shape[:-1], arguments.key(key)
    mask = inputs.read_row_mask(row_mask, leading)
    if top_k is not None:
        k = check_k("top_k", top_k, spec.vocab_size)
        options |= {"bias": bias, "logit_scale": logit_scale, "row_mask": mask, "scratch_bytes": scratch_bytes}
        best = linear_top_k(hidden, weight, k, **options)
        function = functools.partial(_sample_of_best, spec)
        return in_automatic_region(function, True, arrays.hidden, key, best.logits, best.ids, arrays.temperature, mask)
    # The logits, their exponentials, two words of random bits, the noise and its sum with the logits.
    streams = Streams((spec,), arguments.check_scratch_bytes(scratch_bytes), 6)
    streams.plan(max(inputs.tokens(leading), 1))  # raises where the budget is too small
    function = functools.partial(_linear_sample, _Static(spec, streams))
    return in_automatic_region(function, True, arrays.hidden, key, arrays, mask)


@dataclasses.dataclass(frozen=True)
class _Static:
    spec: HeadSpec
    streams: Streams


class _Drawn(NamedTuple):
    """The column whose logit and noise have the largest sum of those seen so far, `[n]` each."""

    score: jax.Array
    id: jax.Array
    logit: jax.Array


def _draw(
    keys: jax.Array, logits: jax.Array, ids: jax.Array, valid: jax.Array | None, temperature: jax.Array | None
) -> _Drawn:
    """From `logits [n, c]` of the columns `ids`, `[c]` or `[n, c]`; `argmax` prefers the first of equal ones."""
    added = noise.gumbel(keys, ids, logits.dtype)
    scores = logits + (added if temperature is None else temperature[:, None] * added)
    scores = scores if valid is None else jnp.where(valid, scores, -jnp.inf)
    place = scores.argmax(axis=1)[:, None]

    def chosen(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.broadcast_to(x, scores.shape), place, axis=1)[:, 0]

    return _Drawn(chosen(scores), chosen(ids), chosen(logits))


def _merge_drawn(a: _Drawn, b: _Drawn) -> _Drawn:
    """The better of both, where the columns of `a` lie before those of `b`."""
    return jax.tree.map(lambda x, y: jnp.where(b.score > a.score, y, x), a, b)


def _divisor(temperature: jax.Array | None) -> jax.Array | None:
    """1 in the place of 0, where the log-probability is known without a division."""
    return None if temperature is None else jnp.where(temperature == 0, 1.0, temperature)


def _samples(drawn: _Drawn, partial: Partial, temperature: jax.Array | None) -> Samples:
    lse = finalise(partial, _LSE)["lse"]
    divisor = _divisor(temperature)
    scaled = drawn.logit if divisor is None else drawn.logit / divisor
    log_probs = jnp.where(jnp.isneginf(scaled), -jnp.inf, scaled - lse)
    if temperature is not None:
        log_probs = jnp.where((temperature == 0) & ~jnp.isneginf(scaled), 0.0, log_probs)
    return Samples(drawn.id, log_probs)


def _block(by_row: tuple[jax.Array, jax.Array, jax.Array | None], head: Head, plan: Plan) -> Samples:
    hidden, keys, temperature = by_row
    divisor = _divisor(temperature)

    def part(tile: Tile) -> tuple[_Drawn, Partial]:
        logits = head.tile_logits(hidden, tile)
        partial = partial_of_tile(tempered(logits, divisor), tile.columns, tile.valid, None, None, _LSE)
        return _draw(keys, logits, tile.columns, tile.valid, temperature), partial

    def join(a: tuple[_Drawn, Partial], b: tuple[_Drawn, Partial]) -> tuple[_Drawn, Partial]:
        return _merge_drawn(a[0], b[0]), merge(a[1], b[1])

    drawn, partial = fold_tiles(Tiles(head.spec.vocab_size, plan.columns), part, join)
    return _samples(drawn, partial, temperature)


@functools.partial(jax.jit, static_argnums=0)
def _linear_sample(static: _Static, key: Any, arrays: inputs.HeadArrays, row_mask: jax.Array | None) -> Samples:
    spec, leading = static.spec, arrays.hidden.shape[:-1]
    hidden, head, temperature = lax.stop_gradient(inputs.flatten(arrays, spec))
    mask = None if row_mask is None else row_mask.reshape(-1)

    def empty(rows: int) -> Samples:
        return Samples(jnp.full(rows, -1, jnp.int32), jnp.zeros(rows, spec.accumulator))

    with jax.named_scope("pallas_ce.sample"):
        by_row = (hidden, noise.row_keys(key, hidden.shape[0]), temperature)
        found = over_rows_that_count(_block, static.streams.plan, empty, by_row, head, mask)
    return jax.tree.map(lambda x: x.reshape(leading), found)


@functools.partial(jax.jit, static_argnums=0)
def _sample_of_best(
    spec: HeadSpec,
    key: Any,
    logits: jax.Array,
    ids: jax.Array,
    temperature: jax.Array | None,
    row_mask: jax.Array | None,
) -> Samples:
    """A sample among `logits [..., k]` of the columns `ids`, with the noise that the whole row would have had there."""
    leading, k = logits.shape[:-1], logits.shape[-1]
    logits, ids = logits.reshape(-1, k), ids.reshape(-1, k)
    by_row = inputs.by_row(temperature, leading, spec)
    temperatures = None if by_row is None else by_row.reshape(-1)
    keys = noise.row_keys(key, logits.shape[0])
    partial = partial_of_tile(tempered(logits, _divisor(temperatures)), jnp.arange(k), None, None, None, _LSE)
    found = _samples(_draw(keys, logits, ids, None, temperatures), partial, temperatures)
    if row_mask is not None:
        mask = row_mask.reshape(-1)
        found = Samples(jnp.where(mask, found.ids, -1), jnp.where(mask, found.log_probs, 0.0))
    return jax.tree.map(lambda x: x.reshape(leading), found)
