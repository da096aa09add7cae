"""`sampled_softmax_cross_entropy`: training with a softmax over the label and a sample of the other classes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.head_options import SampledOptions, documented
from pallas_ce.api.problem import Problem
from pallas_ce.api.row_statistics import linear_row_statistics
from pallas_ce.api.specs import LowRank, WeightLike
from pallas_ce.head import Batch
from pallas_ce.parallel.entry import program, replicated
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics.labels import NO_TARGET, canonical
from pallas_ce.streaming.rows import present, zeroed


class ClassSample(NamedTuple):
    """Classes drawn for one call.

    Attributes:
        ids: `[S]` int32, all different.
        log_expected: `[V]` floating, the logarithm of how often each class of the vocabulary is expected among the ids,
            Q; finite for every class that occurs as a label.
    """

    ids: jax.Array
    log_expected: jax.Array


ClassSampler = Callable[[Any, int, int], ClassSample]


def uniform(key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    """All sets of S classes are equally likely, so that each class is in the sample with probability S/V."""
    ids = jax.random.choice(key, vocab_size, (num_samples,), replace=False).astype(jnp.int32)
    return ClassSample(ids, jnp.full(vocab_size, jnp.log(num_samples / vocab_size)))


def log_uniform(key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    """Zipf's law, `P(v) = log((v+2)/(v+1)) / log(V+1)`, for ids in descending order of frequency, without replacement.

    The S largest of `log P(v) + g_v` with Gumbel noise g are a sample without replacement. Given the noise of all other
    classes, whose S-th largest is κ_v, class v is in it with probability `Q_v = P(log P(v) + g > κ_v) =
    1 - exp(-exp(log P(v) - κ_v))`. Hence `Σ_{v in sample} x_v / Q_v` is an unbiased estimate of `Σ_v x_v`
    ("Estimating Gradients for Discrete Random Variables by Sampling without Replacement", Kool et al., section 3). The
    usual `1 - (1-P)^tries` is this with `tries = e^{-κ}` for all classes.
    """
    classes = jnp.arange(vocab_size, dtype=jnp.float32)
    log_p = jnp.log(jnp.log1p(1.0 / (classes + 1.0))) - jnp.log(jnp.log1p(jnp.float32(vocab_size)))
    perturbed = log_p + jax.random.gumbel(key, (vocab_size,), log_p.dtype, mode="high")
    values, ids = lax.top_k(perturbed, min(num_samples + 1, vocab_size))
    # The others' S-th largest: for a class in the sample the first one outside, for one outside the last one inside.
    following = values[num_samples] if num_samples < vocab_size else jnp.float32(-jnp.inf)
    inside = jnp.zeros(vocab_size, bool).at[ids[:num_samples]].set(True)
    threshold = jnp.where(inside, following, values[num_samples - 1])
    log_expected = jnp.log(-jnp.expm1(-jnp.exp(log_p - threshold)))
    return ClassSample(ids[:num_samples].astype(jnp.int32), log_expected)


SAMPLERS: dict[str, ClassSampler] = {"log_uniform": log_uniform, "uniform": uniform}


def _drawn(sampler: ClassSampler, key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    """A checked sample, without gradient; ids that are no classes are `NO_TARGET`."""
    drawn = sampler(key, num_samples, vocab_size)
    try:
        given, log_expected = drawn
        ids, log_expected = checks.ids("ids", given), jnp.asarray(log_expected)
    except (TypeError, ValueError) as error:
        raise TypeError(f"sampler returned a {type(drawn).__name__}; it must return a ClassSample") from error
    for name, x, kind, size in (
        ("ids", ids, jnp.integer, num_samples),
        ("log_expected", log_expected, jnp.floating, vocab_size),
    ):
        if x.shape != (size,) or not jnp.issubdtype(x.dtype, kind):
            wanted = f"{kind.__name__}[{size}]"
            raise ValueError(f"sampler returned {name} {x.dtype}{list(x.shape)}, where {wanted} is needed")
    return ClassSample(canonical(ids, vocab_size), lax.stop_gradient(log_expected))


@documented
def sampled_softmax_cross_entropy(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike,
    *,
    key: ArrayLike,
    num_samples: int,
    sampler: Literal["log_uniform", "uniform"] | ClassSampler = "log_uniform",
    log_expected_correction: bool = True,
    **options: Unpack[SampledOptions],
) -> jax.Array:
    r"""Cross entropy over each token's label and S sampled classes, which all tokens share.

    With S different classes drawn, and Q_v how often class v is expected among them, a row with label t has

        loss = -log( e^{y_t} / (e^{y_t} + Σ_{v sampled, v ≠ t} e^{y_v}) ),     y_v = z_v - log Q_v

    so that it takes the time of a vocabulary of S classes. It is a loss to train with: for its gradient to make `z` the
    logits of the whole softmax, the correction `-log Q` belongs to the label's logit too. Evaluate with
    `linear_cross_entropy` on the same arguments; the two are equal when `num_samples` is V.

    The S columns of the weight are gathered once, as a small head that is streamed like any other: no array of tokens ×
    samples is stored. A label that was drawn by accident is not taken out of the sum and put back: it is one of the
    sum's terms already, and serves as the target, whose `p - 1` the streamed backward forms without cancellation.
    There is no soft cap here: the correction comes after the cap, and a head adds its bias before it.

    Args:
        hidden: `[..., H]`.
        weight: `[V', H]` or `[H, V']`. Its gradient is dense, 0 in columns that are neither sampled nor labels. A GPU
            adds up equal labels' columns in any order, unless XLA is told to be deterministic.
        labels: `[...]` integers; those outside `[0, V)` count as ignored.
        key: one of JAX's random keys; a new one for each step.
        num_samples: S, from 1 to V.
        sampler: "log_uniform" (Zipf's law; ids in descending order of frequency) or "uniform", both without
            replacement; or a function `(key, num_samples, vocab_size) -> ClassSample`, a static argument: pass the same
            object each time. Its ids must be different, and lie in `[0, V)`: the loss is nan where they are not.
        log_expected_correction: subtract log Q; without it the sampled logits are used as they are.
        normalizer: scalar for the mean; by default Σ w over the tokens that count.
        logit_scale: the logits' scale; not 0 where a correction is subtracted.

    Returns:
        Array: `[]`, or `[...]` for "none", float32 (float64 for float64); 0.0 when no token counts.

    Raises:
        ValueError: shapes or values that do not fit, a sampler that returns other shapes.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice or in forward mode.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_cross_entropy, sampled_softmax_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (6, 8))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 8))
        >>> labels, key = jnp.array([0, 1, 2, 3, 50, -100]), jax.random.key(2)
        >>> loss, d_weight = jax.value_and_grad(sampled_softmax_cross_entropy, 1)(
        ...     hidden, weight, labels, key=key, num_samples=20)
        >>> d_weight.shape
        (100, 8)
        >>> whole = sampled_softmax_cross_entropy(hidden, weight, labels, key=key, num_samples=100)
        >>> bool(jnp.allclose(whole, linear_cross_entropy(hidden, weight, labels), rtol=1e-5))
        True

    References:
        "On Using Very Large Target Vocabulary for Neural Machine Translation" (Jean et al.), section 3.
    """
    problem = Problem.read(hidden, weight, checks.ids("labels", labels), **options)
    vocab_size = problem.spec.vocab_size
    num_samples = checks.count("num_samples", num_samples, vocab_size, f"vocab_size={vocab_size}")
    scale = options.get("logit_scale", 1.0)
    if log_expected_correction and checks.is_known(scale, 0.0):
        raise ValueError(f"logit_scale={scale!r} takes away the logits that log_expected_correction corrects")
    if isinstance(sampler, str):
        checks.choice("sampler", sampler, tuple(SAMPLERS))
        sampler = SAMPLERS[sampler]
    elif not callable(sampler):
        raise TypeError(
            f"sampler={sampler!r} must be a name or a function (key, num_samples, vocab_size) -> ClassSample"
        )
    return _sampled_softmax(num_samples, sampler, bool(log_expected_correction), problem, checks.key(key))


@program(static=3, by_row=lambda count, sampler, correction, problem, key: problem.options.by_row)
def _sampled_softmax(count: int, sampler: ClassSampler, correction: bool, problem: Problem, key: Any) -> jax.Array:
    spec = problem.spec
    batch, head, mask = problem.flat_rows_that_count()
    mask = present(mask)
    # Rows that do not count must not reach the gradients: neither a nan nor its product with a gradient of 0.
    hidden, targets = zeroed(mask, (batch.hidden, present(batch.labels)))
    drawn = _drawn(sampler, key, count, spec.vocab_size)
    order = jnp.arange(count, dtype=jnp.int32)
    # An id that is drawn twice keeps the first place, so that the second does not find itself there.
    place_of = (
        jnp.full(spec.vocab_size, count, jnp.int32).at[drawn.ids].min(order, mode="drop", wrap_negative_indices=False)
    )
    found_again = place_of.at[drawn.ids].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    different = jnp.all(found_again == order)
    places = jnp.where(place_of == count, NO_TARGET, place_of)[targets]

    # One gather, so that the weight's gradient is one scatter: the sampled classes first, then each row's label.
    gathered, axis, scale = jnp.concatenate([drawn.ids, targets]), spec.vocab_axis, head.logit_scale
    columns = head.columns(lambda x, axis: jnp.take(x, gathered, axis=axis))
    if correction:
        shift = -drawn.log_expected.astype(spec.accumulator)[gathered]
        shift = shift if scale is None else shift / scale  # the head multiplies its bias by the scale
        shift = shift if columns.bias is None else columns.bias.astype(spec.accumulator) + shift
        columns = dataclasses.replace(columns, bias=shift)
    # Replicated, or the samples would be split as the labels are.
    samples = columns.columns(lambda x, axis: replicated(lax.slice_in_dim(x, 0, count, axis=axis)))
    own = columns.columns(lambda x, axis: lax.slice_in_dim(x, count, gathered.size, axis=axis))
    weight: Any = samples.weight
    if samples.up is not None:
        weight = LowRank(weight, samples.up if axis == 0 else samples.up.T, problem.down, problem.term_scale)
    found = linear_row_statistics(
        hidden,
        weight,
        jnp.where(mask, places, NO_TARGET),
        row_mask=mask,
        bias=samples.bias,
        vocab_axis=axis,
        logit_scale=1.0 if scale is None else scale,
        dtype=spec.dtype,
        precision=spec.precision,
        implementation=problem.implementation,
        scratch_bytes=problem.scratch_bytes,
        mesh_axes=MeshAxes(),  # gathered for this device's labels
    )

    def product(rows: jax.Array, columns: jax.Array, axis: int) -> jax.Array:
        """Of each row and its label's column."""
        if spec.dtype == jnp.float16:  # it would lose the derivatives of many rows' mean
            return jnp.sum(rounded(rows) * rounded(columns if axis == 0 else columns.T), axis=1)
        rows, columns = rows.astype(spec.dtype), columns.astype(spec.dtype)
        dimensions = (((1,), (1 - axis,)), ((0,), (axis,)))
        return lax.dot_general(rows, columns, dimensions, spec.precision, spec.accumulator)

    def rounded(x: jax.Array) -> jax.Array:
        """As it is multiplied, with derivatives in the accumulator's dtype."""
        wide, narrow = x.astype(spec.accumulator), x.astype(spec.dtype).astype(spec.accumulator)
        return jnp.where(jnp.isfinite(wide), wide + lax.stop_gradient(narrow - wide), narrow)

    products = product(hidden, own.weight, axis)
    if own.up is not None:
        products = products + product(present(head.with_low(Batch(hidden)).low), own.up, 0)
    target = head.cap(*zeroed(mask, (products, own.bias)))
    # With the label among the samples its logit is in the sum already; else it joins: log(e^y + e^lse) - y.
    drawn_by_accident = places != NO_TARGET
    lse, target_in_sum = present(found.lse), present(found.target_logit)
    joined = jax.nn.softplus(lse - jnp.where(drawn_by_accident, 0.0, target))
    values = jnp.where(drawn_by_accident, lse - target_in_sum, joined)
    # A label of logit +inf has no probability, as in a softmax whose sum is +inf.
    values = values * jnp.where(different & ~jnp.isposinf(target), 1.0, jnp.nan)  # and so are the gradients
    return problem.reduced(values, mask)
