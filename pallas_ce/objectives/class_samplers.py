"""Which classes a sampled softmax draws, and how often each is expected among them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.api import checks
from pallas_ce.statistics import labels


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


_NAMED: dict[str, ClassSampler] = {"log_uniform": log_uniform, "uniform": uniform}

Name = Literal["log_uniform", "uniform"]


def find(sampler: Any) -> ClassSampler:
    """The sampler of that name, or the caller's own."""
    if isinstance(sampler, str):
        checks.choice("sampler", sampler, tuple(_NAMED))
        return _NAMED[sampler]
    if not callable(sampler):
        raise TypeError(
            f"sampler={sampler!r} must be a name or a function (key, num_samples, vocab_size) -> ClassSample"
        )
    return sampler


def draw(sampler: ClassSampler, key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    """A checked sample, without gradient; ids that are no classes are `labels.NO_TARGET`."""
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
    return ClassSample(labels.canonical(ids, vocab_size), lax.stop_gradient(log_expected))
